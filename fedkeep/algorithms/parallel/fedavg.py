"""FedAvg: clients train in parallel, the server averages."""

from dataclasses import dataclass
from typing import Any

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy, Loss
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Federated averaging: w <- sum_i n_i w_i / sum_i n_i over the cohort, each w_i trained from w (algorithm 1).

    Methods that change nothing but the local loss derive from it and override `local_loss`.
    """

    paper = "McMahan et al., 2017: Communication-efficient learning of deep networks from decentralized data"

    aggregation: Aggregation = option("num_examples", "whether clients count by their examples, or all alike")

    def round(self, server: Server, cohort: Cohort) -> None:
        """Let all clients train the global model, and average their models."""
        server.model = aggregate(cohort.ask(self.train, server.model), self.aggregation)

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """Train the global model on the client's own examples."""
        return client.fit(model, self.local_loss(client, model))

    def local_loss(self, client: Client[Any], model: Weights) -> Loss:
        """Return the local loss.

        ``model``: The global model that the client received.
        """
        return CrossEntropy()
