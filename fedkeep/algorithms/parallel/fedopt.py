"""FedAvgM and FedAdam: FedAvg's clients, and an optimiser on the server."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedkeep.aggregation import Fusion, fused
from fedkeep.aggregation.adaptive import with_adam, with_momentum
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.interface.party import S
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class ServerSteps(Algorithm[S]):
    """Base of methods whose server steps towards the clients' mean; how, is decided in `round`."""

    fusion: Fusion = option("by_count", "whether clients count by their examples, or all alike")

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """Train the global model on the client's own examples."""
        return client.fit(model, CrossEntropy())


@dataclass
class Velocity:
    """What FedAvgM's server keeps, by parameter; empty means zero."""

    v: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class FedAvgM(ServerSteps[Velocity]):
    """Federated averaging with server momentum: v <- momentum v + (mean_i w_i - w), w <- w + server_lr v.

    With ``momentum=0`` and ``server_lr=1`` this is FedAvg, up to rounding.
    """

    paper = "Hsu et al., 2019: Measuring the effects of non-identical data distribution"

    server_lr: float = option(1.0, "learning rate of the server", low=0.0)
    momentum: float = option(0.9, "momentum of the server", low=0.0, high=1.0)

    def round(self, server: Server[Velocity], cohort: Cohort) -> None:
        mean = fused(cohort.ask(self.train, server.model), self.fusion)
        server.model, server.state.v = with_momentum(
            server.model, mean, server.state.v, server.parameters, lr=self.server_lr, momentum=self.momentum
        )


@dataclass
class Moments:
    """What FedAdam's server keeps, by parameter; empty means the first step is still to come."""

    m: Weights = field(default_factory=dict)
    v: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class FedAdam(ServerSteps[Moments]):
    """Adaptive federated optimisation: the server steps along mean_i w_i - w by Adam without bias correction.

    w <- w + server_lr m / (sqrt(v) + tau), v beginning at tau^2 (algorithm 2). The paper's betas; its learning rates
    and tau are tuned for each data set, so those here are only a start.
    """

    paper = "Reddi et al., 2021: Adaptive federated optimization"

    server_lr: float = option(0.01, "learning rate of the server", low=0.0)
    beta1: float = option(0.9, "what the first moment keeps of itself", low=0.0, high=1.0)
    beta2: float = option(0.99, "what the second moment keeps of itself", low=0.0, high=1.0)
    tau: float = option(1e-3, "degree of adaptivity, added to the root of the second moment", low=1e-12)

    def round(self, server: Server[Moments], cohort: Cohort) -> None:
        mean = fused(cohort.ask(self.train, server.model), self.fusion)
        kept = server.state
        server.model, (kept.m, kept.v) = with_adam(
            server.model,
            mean,
            (kept.m, kept.v),
            server.parameters,
            lr=self.server_lr,
            betas=(self.beta1, self.beta2),
            tau=self.tau,
        )
