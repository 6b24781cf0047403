"""FedAvgM and FedAdam: FedAvg's clients, and an optimiser on the server.

The server steps from the model towards the clients' mean by an optimiser with a state: Reddi et al., 2021, "Adaptive
federated optimization", algorithm 2, and Hsu et al., 2019, "Measuring the effects of non-identical data distribution",
for momentum. The step is mean - model over the parameters; buffers follow the mean.
"""

from dataclasses import dataclass, field

import torch

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.options import option


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
        model, before = server.model, server.state.v
        v = {n: mean[n] - model[n] + self.momentum * before.get(n, torch.zeros(())) for n in server.parameter_names}
        server.model = dict(mean) | {n: model[n] + self.server_lr * velocity for n, velocity in v.items()}
        server.state.v = v

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """Train the global model on the client's own examples."""
        return client.fit(model, CrossEntropy())


@dataclass
class Moments:
    """What FedAdam's server keeps.

    ``m``, ``v``: By parameter; empty means m = 0 and v = tau^2, as in the paper.
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
        model, state = server.model, server.state
        stepped, m, v = dict(mean), {}, {}
        for n in server.parameter_names:
            step = mean[n] - model[n]
            m[n] = self.beta1 * state.m.get(n, torch.zeros_like(step)) + (1 - self.beta1) * step
            v[n] = self.beta2 * state.v.get(n, torch.full_like(step, self.tau**2)) + (1 - self.beta2) * step.square()
            stepped[n] = model[n] + self.server_lr * m[n] / (v[n].sqrt() + self.tau)
        server.model, state.m, state.v = stepped, m, v

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """Train the global model on the client's own examples."""
        return client.fit(model, CrossEntropy())
