"""FedLwF and FedProx+LwF: learning without forgetting, where the global model of the task before is the teacher."""

from dataclasses import dataclass

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.algorithms.incremental.class_incremental import (
    CEClasses,
    OldModelState,
    cache_once_per_task,
    distill_old_classes,
    label_loss,
)
from fedkeep.interface import Algorithm, Client, Cohort, Fit, NoState, Server, on_client
from fedkeep.losses import Loss, QuadraticPenalty
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class FedLwF(Algorithm[NoState, OldModelState]):
    """Federated learning without forgetting: CE[new] + w_old * KD[old] on the client's own examples of new classes.

    The teacher is the last global model of the task before. KD is the cross-entropy with the teacher's probabilities
    among the old classes, at temperature 2 and without tau squared, as in TARGET's code. The first task is Finetune's,
    bit for bit. One more model travels to every client, once a task.
    """

    title = "FedLwF"
    paper = "Li & Hoiem, 2016: Learning without forgetting; federated as in the code of TARGET (Zhang et al., 2023)"

    w_old: float = option(3.0, "weight of the distillation of old classes", low=0.0)
    tau: float = option(2.0, "softmax temperature; there is no tau squared", low=1e-3)
    ce_classes: CEClasses = option("new", "labels among the task's classes, or among all that were seen")
    aggregation: Aggregation = option("uniform", "whether clients count by their examples, or all alike")

    def round(self, server: Server, cohort: Cohort) -> None:
        server.model = aggregate(cohort.ask(self.train, server.model), self.aggregation)

    def end_task(self, server: Server, clients: Cohort) -> None:
        clients.ask(self.remember, server.model)

    @on_client
    def train(self, client: Client[OldModelState], model: Weights) -> Fit:
        """Train the global model on the task's labels and the old model's outputs."""
        return client.fit(model, self.local_loss(client, model), client.data)

    def local_loss(self, client: Client[OldModelState], model: Weights) -> Loss:
        """Return the local loss, with the model that the client received."""
        distillation = distill_old_classes(client.state.teacher, self.w_old, self.tau)
        return label_loss(client, self.ce_classes) + cache_once_per_task(client, distillation, client.data)

    @on_client
    def remember(self, client: Client[OldModelState], model: Weights) -> None:
        """Keep the task's last model as the next task's teacher."""
        client.state.teacher = model


@dataclass(frozen=True)
class FedProxLwF(FedLwF):
    """FedLwF with FedProx's proximal term: ... + mu / 2 ||w - w^t||^2 over all parameters.

    FedSKF's paper, which compares with it, prints no mu: 0.001, 0.01 and 0.1 are worth trying.
    """

    title = "FedProx+LwF"
    paper = "FedSKF (Electronics 2024, 13, 1772): a baseline there, of Li et al., 2020, and Li & Hoiem, 2016"

    mu: float = option(0.01, "weight of the proximal term", low=0.0)

    def local_loss(self, client: Client[OldModelState], model: Weights) -> Loss:
        return super().local_loss(client, model) + QuadraticPenalty(model, self.mu / 2)
