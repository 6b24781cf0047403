"""FedAvgM and FedAdam: FedAvg's clients, and an optimiser on the server.

The server steps from the model towards the clients' mean by an optimiser with a state: Reddi et al., 2021, "Adaptive
federated optimization", algorithm 2, and Hsu et al., 2019, "Measuring the effects of non-identical data distribution",
for momentum. The step is mean - model over the parameters; buffers follow the mean.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.options import option


@torch.no_grad()
def momentum_step(
    model: Weights, mean: Weights, velocity: Weights, names: Collection[str], *, lr: float, momentum: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take a step with momentum: v <- momentum v + (mean - model), w <- model + lr v.

    With lr 1 and momentum 0 the new model is the mean.

    ``velocity``: v by parameter; empty means zero.
    """
    new = {name: mean[name] - model[name] + momentum * velocity.get(name, torch.zeros(())) for name in names}
    return dict(mean) | {name: model[name] + lr * v for name, v in new.items()}, new


@torch.no_grad()
def adam_step(
    model: Weights,
    mean: Weights,
    moments: tuple[Weights, Weights],
    names: Collection[str],
    *,
    lr: float,
    betas: tuple[float, float],
    tau: float,
) -> tuple[dict[str, Tensor], tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Take a step of Adam without bias correction: w <- model + lr m / (sqrt(v) + tau).

    m <- b1 m + (1 - b1) step, v <- b2 v + (1 - b2) step^2.

    ``moments``: (m, v) by parameter; empty means m = 0 and v = tau^2, as in the paper.
    ``lr``: Learning rate of the server.
    """
    beta1, beta2 = betas
    m, v = {}, {}
    for name in names:
        step = mean[name] - model[name]
        m[name] = beta1 * moments[0].get(name, torch.zeros_like(step)) + (1 - beta1) * step
        v[name] = beta2 * moments[1].get(name, torch.full_like(step, tau**2)) + (1 - beta2) * step.square()
    stepped = {name: model[name] + lr * m[name] / (v[name].sqrt() + tau) for name in names}
    return dict(mean) | stepped, (m, v)


@dataclass
class Velocity:
    """What FedAvgM's server keeps.

    ``v``: By parameter; empty means zero.
    """

    v: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class FedAvgM(Algorithm[Velocity]):
    """Federated averaging with server momentum: v <- momentum v + (mean_i w_i - w), w <- w + server_lr v.

    With ``momentum=0`` and ``server_lr=1`` this is FedAvg, up to rounding.
    """

    paper = "Hsu et al., 2019: Measuring the effects of non-identical data distribution"

    aggregation: Aggregation = option("num_examples", "whether clients count by their examples, or all alike")
    server_lr: float = option(1.0, "learning rate of the server", low=0.0)
    momentum: float = option(0.9, "momentum of the server", low=0.0, high=1.0)

    def round(self, server: Server[Velocity], cohort: Cohort) -> None:
        """Let all clients train, and step towards the mean of their models with momentum."""
        mean = aggregate(cohort.ask(self.train, server.model), self.aggregation)
        server.model, server.state.v = momentum_step(
            server.model, mean, server.state.v, server.parameter_names, lr=self.server_lr, momentum=self.momentum
        )

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """Train the global model on the client's own examples."""
        return client.fit(model, CrossEntropy())


@dataclass
class Moments:
    """What FedAdam's server keeps.

    ``m``, ``v``: By parameter; empty before the first step.
    """

    m: Weights = field(default_factory=dict)
    v: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class FedAdam(Algorithm[Moments]):
    """Adaptive federated optimisation: the server steps along mean_i w_i - w by Adam without bias correction.

    w <- w + server_lr m / (sqrt(v) + tau), v beginning at tau^2 (algorithm 2). The paper's betas; its learning rates
    and tau are tuned for each data set, so those here are only a start.
    """

    paper = "Reddi et al., 2021: Adaptive federated optimization"

    aggregation: Aggregation = option("num_examples", "whether clients count by their examples, or all alike")
    server_lr: float = option(0.01, "learning rate of the server", low=0.0)
    beta1: float = option(0.9, "decay of the first moment", low=0.0, high=1.0)
    beta2: float = option(0.99, "decay of the second moment", low=0.0, high=1.0)
    tau: float = option(1e-3, "degree of adaptivity, added to the root of the second moment", low=1e-12, high=1e15)

    def round(self, server: Server[Moments], cohort: Cohort) -> None:
        """Let all clients train, and step towards the mean of their models by Adam."""
        mean = aggregate(cohort.ask(self.train, server.model), self.aggregation)
        state = server.state
        server.model, (state.m, state.v) = adam_step(
            server.model,
            mean,
            (state.m, state.v),
            server.parameter_names,
            lr=self.server_lr,
            betas=(self.beta1, self.beta2),
            tau=self.tau,
        )

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """Train the global model on the client's own examples."""
        return client.fit(model, CrossEntropy())
