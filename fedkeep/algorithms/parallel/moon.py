"""MOON: features are drawn to the global model's, and away from those of the client's own last model."""

from dataclasses import dataclass

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.interface import Algorithm, Client, Cohort, Fit, NoState, Server, on_client
from fedkeep.losses import CrossEntropy, ModelContrastive
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass
class LastModel:
    """What a client keeps.

    ``model``: The model after its last local training; None before the first.
    """

    model: Weights | None = None


@dataclass(frozen=True)
class MOON(Algorithm[NoState, LastModel]):
    """Model-contrastive federated learning: CE + mu * contrast of features (eq. 3; see `fedkeep.losses.features`).

    As in FedNTD's program: features are the classifier's input, without a projection head, mu = 0.1, tau = 0.5. The
    original has a head of two layers and tunes mu up to 10. At a client's first local training its own last model is
    the initial one.
    """

    paper = "Li et al., 2021: Model-contrastive federated learning"
    clients_read_initial_model = True

    mu: float = option(0.1, "weight of the contrast", low=0.0)
    tau: float = option(0.5, "its temperature", low=1e-3)
    aggregation: Aggregation = option("num_examples", "whether clients count by their examples, or all alike")

    def round(self, server: Server, cohort: Cohort) -> None:
        """Let all clients train the global model, and average their models."""
        server.model = aggregate(cohort.ask(self.train, server.model), self.aggregation)

    @on_client
    def train(self, client: Client[LastModel], model: Weights) -> Fit:
        """Train with the contrast between the received model and the client's own last one."""
        last = client.initial_model if client.state.model is None else client.state.model
        fit = client.fit(model, CrossEntropy() + ModelContrastive(model, last, self.mu, self.tau))
        client.state.model = fit.model
        return fit
