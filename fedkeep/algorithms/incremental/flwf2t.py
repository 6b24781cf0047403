"""FLwF-2T: learning without forgetting with two teachers, the client's own past model and the server's present one."""

from dataclasses import dataclass, field
from typing import Literal

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.algorithms.incremental.class_incremental import (
    CEClasses,
    OldModelState,
    cache_once_per_task,
    concat,
    distill_old_classes,
    label_loss,
    update_memory,
)
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Client, Cohort, Data, Fit, NoState, Server, on_client
from fedkeep.losses import ZERO_LOSS, Loss
from fedkeep.models import Weights
from fedkeep.models.heads import truncate
from fedkeep.options import option


@dataclass
class FLwF2TClientState(OldModelState):
    """What a client keeps besides its teacher.

    ``own_model``: The model as its last training left it, the teacher of the next task.
    ``memory``: Exemplars of old classes, if any are kept.
    """

    own_model: Weights = field(default_factory=dict)
    memory: Data = field(default_factory=dict)


@dataclass(frozen=True)
class FLwF2T(Algorithm[NoState, FLwF2TClientState]):
    """Federated learning without forgetting with two teachers: CE[new] + w_old * KD[old; own] + w_server * KD[server].

    The first teacher is the client's own last model of the task before, the second the model that it received. The
    paper searches for its weights, and those who compare with it print none: 3 and 1 are ours. The received model
    teaches the old classes; with ``server_classes=all`` it teaches all classes from a task's second round on, when its
    new rows have been trained. The first task is Finetune's, bit for bit. In the paper's experiments clients keep a few
    examples too; those who compare with it mention none. So there are none by default. With ``exemplars_per_class``
    each client herds so many of each class by its own model, and learns them again among all classes.
    """

    title = "FLwF-2T"
    paper = "Usmanova et al., 2021: A distillation-based approach integrating continual and federated learning"

    w_old: float = option(3.0, "weight of the distillation from the client's own old model", low=0.0)
    tau: float = option(2.0, "softmax temperature; there is no tau squared", low=1e-3)
    ce_classes: CEClasses = option("new", "labels among the task's classes, or among all that were seen")
    aggregation: Aggregation = option("uniform", "whether clients count by their examples, or all alike")
    w_server: float = option(1.0, "weight of the distillation from the received model", low=0.0)
    server_classes: Literal["old", "all"] = option("old", "classes that the received model teaches")
    exemplars_per_class: int = option(0, "examples of each class that a client keeps and learns again", low=0)

    def check(self) -> None:
        if self.exemplars_per_class and self.ce_classes == "new":
            raise ConfigError(
                "FLwF2T.exemplars_per_class keeps examples of old classes, which have no label among the new ones: set "
                "FLwF2T.ce_classes=all too."
            )

    @property
    def keeps_examples(self) -> bool:
        return self.exemplars_per_class > 0

    @property
    def reason_against_dp_sgd(self) -> str:
        why = (
            f"with FLwF2T.exemplars_per_class={self.exemplars_per_class} clients keep examples that they choose by "
            "their features, which epsilon would not cover. Set FLwF2T.exemplars_per_class=0."
        )
        return why if self.keeps_examples else ""

    def round(self, server: Server, cohort: Cohort) -> None:
        server.model = aggregate(cohort.ask(self.train, server.model), self.aggregation)

    def end_task(self, server: Server, clients: Cohort) -> None:
        clients.ask(self.remember, server.model)

    @on_client
    def train(self, client: Client[FLwF2TClientState], model: Weights) -> Fit:
        """Train with both teachers, and keep the client's own model."""
        state = client.state
        data = concat(client.data, state.memory)
        own_teacher = distill_old_classes(state.teacher, self.w_old, self.tau)
        loss = label_loss(client, self.ce_classes) + cache_once_per_task(client, own_teacher, data)
        fit = client.fit(model, loss + self.server_distillation(client, model), data)
        state.own_model = fit.model
        return fit

    def server_distillation(self, client: Client[FLwF2TClientState], model: Weights) -> Loss:
        """Return w_server * KD from the received model; nothing in the first task."""
        if not client.num_old_classes:
            return ZERO_LOSS
        teaches_all = self.server_classes == "all" and client.round > 1
        return distill_old_classes(
            model if teaches_all else truncate(model, client.num_old_classes), self.w_server, self.tau
        )

    @on_client
    def remember(self, client: Client[FLwF2TClientState], model: Weights) -> None:
        """Keep the client's own last model, or the task's if it never trained; keep exemplars, if any are wanted."""
        state = client.state
        state.teacher = state.own_model or model
        if self.exemplars_per_class:
            state.memory = update_memory(client, state.teacher, state.memory, self.exemplars_per_class)
