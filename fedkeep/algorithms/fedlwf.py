"""FedLwF and FedProx+LwF: learning without forgetting, where the global model of the task before teaches."""

from __future__ import annotations

from dataclasses import dataclass

from fedkeep.algorithms.incremental import Old, WithOldModel
from fedkeep.interface import Client, Cohort, NoState, Server, on_client
from fedkeep.losses import Objective, Quadratic
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class FedLwF(WithOldModel[NoState, Old]):
    """Federated learning without forgetting: CE[new] + w_old * KD[old], taught by the last global model of the task
    before, on the client's own examples of the new classes.

    KD is the cross-entropy with the teacher's probabilities among the old classes, at temperature 2 and without tau^2,
    as in TARGET's code. The first task is FedAvg's, bit for bit. One more model travels to every client, once a task.
    """

    title = "FedLwF"
    paper = "Li & Hoiem, 2016: Learning without forgetting; federated as in the code of TARGET (Zhang et al., 2023)"

    def end_task(self, server: Server, clients: Cohort) -> None:
        clients.ask(self.remember, server.model)

    @on_client
    def remember(self, client: Client[Old], model: Weights) -> None:
        """Keep the task's last model."""
        client.state.teacher = model


@dataclass(frozen=True)
class FedProxLwF(FedLwF):
    """FedLwF with FedProx's proximal term: ... + mu / 2 ||w - w^t||^2 over all parameters.

    FedSKF's paper, which compares with it, prints no mu: 0.001, 0.01 and 0.1 are worth trying.
    """

    title = "FedProx+LwF"
    paper = "FedSKF (Electronics 2024, 13, 1772): a baseline there, of Li et al., 2020, and Li & Hoiem, 2016"

    mu: float = option(0.01, "weight of the proximal term", low=0.0)

    def beside(self, client: Client[Old], model: Weights) -> Objective:
        return Quadratic(model, self.mu / 2)
