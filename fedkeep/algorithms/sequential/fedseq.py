"""FedSeq: one model is passed from client to client."""

from dataclasses import dataclass

from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights


@dataclass(frozen=True)
class FedSeq(Algorithm):
    """Sequential federated learning: each client of the round trains the model that the client before it left.

    The last client's model is the round's. A lost client is skipped, and the next one starts from the last good model.
    """

    paper = "Li & Lyu, 2023: Convergence analysis of sequential federated learning on heterogeneous data"
    sequential = True

    def round(self, server: Server, cohort: Cohort) -> None:
        """Pass the model from client to client."""
        for client in cohort:
            if reply := client.ask(self.train, server.model):
                server.model = reply.model

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """Train the previous client's model on this client's examples."""
        return client.fit(model, CrossEntropy())
