"""MOON: features are drawn to the global model's, and away from those of the client's own last model."""

from __future__ import annotations

from dataclasses import dataclass

from fedkeep.aggregation import Fusion, fused
from fedkeep.interface import Algorithm, Client, Cohort, Fit, NoState, Server, on_client
from fedkeep.losses import Contrast, CrossEntropy
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass
class Own:
    """What a client keeps: the model as it left it at its last visit."""

    model: Weights | None = None


@dataclass(frozen=True)
class MOON(Algorithm[NoState, Own]):
    """Model-contrastive federated learning: CE + mu * contrast of features (eq. 3; see `fedkeep.losses.contrast`).

    As in FedNTD's program: features are what the classifier reads, without a projection head, mu = 0.1, tau = 0.5. The
    original has a head of two layers and tunes mu up to 10. At a client's first visit its own last model is the initial
    one.
    """

    paper = "Li et al., 2021: Model-contrastive federated learning"

    mu: float = option(0.1, "weight of the contrast", low=0.0)
    tau: float = option(0.5, "its temperature", low=1e-3)
    fusion: Fusion = option("by_count", "whether clients count by their examples, or all alike")

    def round(self, server: Server, cohort: Cohort) -> None:
        server.model = fused(cohort.ask(self.train, server.model), self.fusion)

    @on_client
    def train(self, client: Client[Own], model: Weights) -> Fit:
        """Train with the contrast between the received model and the client's own last one."""
        last = client.initial if client.state.model is None else client.state.model
        fit = client.fit(model, CrossEntropy() + Contrast(model, last, self.mu, self.tau))
        client.state.model = fit.model
        return fit
