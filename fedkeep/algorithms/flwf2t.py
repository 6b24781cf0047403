"""FLwF-2T: learning without forgetting with two teachers, the client's own past model and the server's present one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedkeep.algorithms.incremental import Old, WithOldModel, joined, old_classes, remembered
from fedkeep.errors import ConfigError
from fedkeep.interface import Client, Cohort, Data, Fit, NoState, Server, on_client
from fedkeep.losses import NOTHING, Objective
from fedkeep.models import Weights
from fedkeep.models.heads import shrunk
from fedkeep.options import option


@dataclass
class Own(Old):
    """What a client keeps: also the model as it left it at its last visit, the teacher of the task to come, and perhaps
    examples of old classes."""

    own: Weights = field(default_factory=dict)
    memory: Data = field(default_factory=dict)


@dataclass(frozen=True)
class FLwF2T(WithOldModel[NoState, Own]):
    """Federated learning without forgetting with two teachers: CE[new] + w_old * KD[old] from the client's own last
    model of the task before + w_server * KD from the model that it received.

    The paper searches for its weights, and those who compare with it print none: 3 and 1 are ours. The received model
    teaches the old classes; with ``server_slice=all`` all of them from a task's second round on, when its new rows have
    been trained. The first task is FedAvg's, bit for bit. In the paper's experiments clients also keep a few examples;
    those who compare with it say nothing of them, so here there are none unless ``per_class`` says how many of each
    class, herded by the client's own model. They are then learned again, among all classes.
    """

    title = "FLwF-2T"
    paper = "Usmanova et al., 2021: A distillation-based approach integrating continual and federated learning"

    w_server: float = option(1.0, "weight of what the received model says", low=0.0)
    server_slice: Literal["old", "all"] = option("old", "classes that the received model teaches")
    per_class: int = option(0, "examples of each class that a client keeps and learns again", low=0)

    def check(self) -> None:
        if self.per_class and self.ce_slice == "new":
            raise ConfigError(
                "FLwF2T.per_class keeps examples of old classes, which have no label among the new ones: set "
                "FLwF2T.ce_slice=all too."
            )

    def end_task(self, server: Server, clients: Cohort) -> None:
        clients.ask(self.remember, server.model)

    @on_client
    def train(self, client: Client[Own], model: Weights) -> Fit:
        """Train with both teachers, and keep the own model."""
        fit = super().train(client, model)
        client.state.own = fit.model
        return fit

    @on_client
    def remember(self, client: Client[Own], model: Weights) -> None:
        """Keep the client's own last model; the task's, if it never trained. Keep examples, if any are to be kept."""
        kept = client.state
        kept.teacher = kept.own or model
        if self.per_class:
            kept.memory = remembered(client, kept.teacher, kept.memory, self.per_class, "herding")

    def examples(self, client: Client[Own]) -> Data:
        return joined(client.data, client.state.memory)

    def beside(self, client: Client[Own], model: Weights) -> Objective:
        if not client.old:
            return NOTHING
        everything = self.server_slice == "all" and client.round > 1
        return old_classes(model if everything else shrunk(model, client.old), self.w_server, self.tau)
