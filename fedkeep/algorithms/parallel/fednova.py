"""FedNova: clients that took more steps count no more for it."""

from dataclasses import dataclass

from fedkeep.aggregation.mean import normalised_mean
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights


@dataclass(frozen=True)
class FedNova(Algorithm):
    """Normalised averaging: w <- w - (sum_i p_i a_i) sum_i (p_i / a_i) (w - w_i), a_i the effective steps of client i.

    Equation 5 of the paper. With equal a_i this is FedAvg, bit for bit; batch norm's statistics are averaged as there.
    """

    title = "FedNova"
    paper = "Wang et al., 2020: Tackling the objective inconsistency problem in heterogeneous federated optimization"
    needs = ("sgd",)
    only_averages = False  # it weighs each update by its number of steps
    uses_num_steps = True

    def round(self, server: Server, cohort: Cohort) -> None:
        """Let all clients train the global model, and take the normalised mean of their models."""
        replies = cohort.ask(self.train, server.model)
        buffers = set(server.model) - set(server.parameter_names)
        server.model = normalised_mean(server.model, replies, server.training.momentum, buffers)

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """Train the global model on the client's own examples."""
        return client.fit(model, CrossEntropy())
