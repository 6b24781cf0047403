"""FediCaRL: every client keeps a few examples of each class that it had, and learns them again with the new ones."""

from dataclasses import dataclass, field
from typing import Literal

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.algorithms.incremental.class_incremental import (
    OldModelState,
    cache_once_per_task,
    concat,
    distill_old_classes,
    update_memory,
)
from fedkeep.interface import Algorithm, Client, Cohort, Data, Fit, NoState, Server, on_client
from fedkeep.losses import TSD, ZERO_LOSS, CompensatedCrossEntropy, CrossEntropy, Loss, Scaled
from fedkeep.models import Weights
from fedkeep.models.heads import WEIGHT
from fedkeep.options import option


@dataclass
class ExemplarState(OldModelState):
    """Client state: also exemplars.

    ``memory``: Examples of old classes.
    """

    memory: Data = field(default_factory=dict)


@dataclass(frozen=True)
class FediCaRL(Algorithm[NoState, ExemplarState]):
    """Federated iCaRL: CE[all] + w_old * KD[old] on the task's examples and the exemplars.

    The teacher is the last global model of the task before. A client keeps ``exemplars_per_class`` examples of each
    class that it holds, chosen at the task's end by herding on the global model's features. Only models travel, and the
    linear classifier is evaluated, not iCaRL's nearest mean of features.

    ``loss=glfc`` is the loss of GLFC's code (Dong et al., 2022) instead: binary cross-entropies of all classes. Half of
    it has the labels as targets, with weights that balance old and new classes, and half the old model's outputs for
    old classes beside the labels of the new. GLFC's choice of an old model by a second server is left out, and so is
    its detection of tasks; its code trains with a learning rate of 2.
    """

    title = "FediCaRL"
    paper = "Rebuffi et al., 2017: iCaRL, incremental classifier and representation learning; federated"
    keeps_examples = True
    reason_against_dp_sgd = (
        "FediCaRL's clients keep examples that they choose by their features, which epsilon would not cover. Take "
        "FedLwF, which keeps none."
    )

    @property
    def reason_against_label_loss(self) -> str:
        """GLFC's loss weighs examples itself."""
        return "with loss=glfc its loss weighs examples itself" if self.loss == "glfc" else ""

    w_old: float = option(1.0, "weight of the distillation of old classes", low=0.0)
    tau: float = option(2.0, "softmax temperature; there is no tau squared", low=1e-3, only=("loss", "icarl"))
    aggregation: Aggregation = option("uniform", "whether clients count by their examples, or all alike")
    exemplars_per_class: int = option(20, "examples of each class that are kept", low=1)
    loss: Literal["icarl", "glfc"] = option("icarl", "cross-entropy and distillation, or GLFC's weighted binary ones")

    def round(self, server: Server, cohort: Cohort) -> None:
        server.model = aggregate(cohort.ask(self.train, server.model), self.aggregation)

    def end_task(self, server: Server, clients: Cohort) -> None:
        clients.ask(self.remember, server.model, self.exemplars_per_class)

    @on_client
    def train(self, client: Client[ExemplarState], model: Weights) -> Fit:
        """Train the global model on the task's examples and the exemplars."""
        state = client.state
        data = concat(client.data, state.memory)
        labels: Loss = CrossEntropy()
        if self.loss == "glfc":
            labels = Scaled(0.5 if client.num_old_classes else 1.0, CompensatedCrossEntropy(client.num_old_classes))
        return client.fit(model, labels + cache_once_per_task(client, self.distillation(state.teacher), data), data)

    def distillation(self, teacher: Weights) -> Loss:
        """Return the distillation of old classes, before the teacher is evaluated."""
        if self.loss == "icarl":
            return distill_old_classes(teacher, self.w_old, self.tau)
        return Scaled(self.w_old / 2, TSD(teacher, len(teacher[WEIGHT]), "glfc")) if teacher else ZERO_LOSS

    @on_client
    def remember(self, client: Client[ExemplarState], model: Weights, count: int) -> None:
        """Keep the task's last model, and some of its examples."""
        state = client.state
        state.teacher = model
        state.memory = update_memory(client, model, state.memory, count)
