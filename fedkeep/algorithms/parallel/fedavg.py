"""FedAvg: clients train in parallel, the server averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedkeep.aggregation import Fusion, fused
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy, Objective
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Federated averaging: w <- sum_i n_i w_i / sum_i n_i over the cohort, each w_i trained from w.

    Methods that change nothing but the local loss derive from it and override `objective`.
    """

    paper = "McMahan et al., 2017: Communication-efficient learning of deep networks from decentralized data"

    fusion: Fusion = option("by_count", "whether clients count by their examples, or all alike")

    def round(self, server: Server, cohort: Cohort) -> None:
        server.model = fused(cohort.ask(self.train, server.model), self.fusion)

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """Train the global model on the client's own examples."""
        return client.fit(model, self.objective(client, model))

    def objective(self, client: Client[Any], model: Weights) -> Objective:
        """Return the local loss of a client that received ``model``."""
        return CrossEntropy()
