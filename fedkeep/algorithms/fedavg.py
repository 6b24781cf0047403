"""FedAvg: clients train in parallel, the server averages."""

from __future__ import annotations

from dataclasses import dataclass

from fedkeep.fusion import weighted_mean
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.models import Weights
from fedkeep.objectives import CrossEntropy


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Federated averaging: w <- sum_i n_i w_i / sum_i n_i over the cohort, each w_i trained from w."""

    paper = "McMahan et al., 2017: Communication-efficient learning of deep networks from decentralized data"

    def round(self, server: Server, cohort: Cohort) -> None:
        server.model = weighted_mean(cohort.ask(self.train, server.model))

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """Train the global model on the client's own examples."""
        return client.fit(model, CrossEntropy())
