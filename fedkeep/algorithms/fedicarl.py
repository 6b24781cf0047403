"""FediCaRL: every client keeps a few examples of each class that it had, and learns them again with the new ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedkeep.algorithms.incremental import CESlice, Old, Selection, WithOldModel, joined, remembered
from fedkeep.interface import Client, Cohort, Data, Server, on_client
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass
class WithExemplars(Old):
    """What a client keeps: also examples of old classes."""

    memory: Data = field(default_factory=dict)


@dataclass(frozen=True)
class FediCaRL(WithOldModel[WithExemplars]):
    """Federated iCaRL: CE[all] + w_old * KD[old] on the task's examples and the exemplars, taught by the last global
    model of the task before.

    A client keeps ``per_class`` examples of each class that it holds, chosen at the task's end by herding on the global
    model's features; with ``scope=global`` that is what all clients together keep. ``memory`` limits all classes of a
    client together, as in iCaRL's paper: exemplar sets shrink as classes come. Only models travel. Classified is with
    the linear head; the nearest mean of exemplars would need them, or their means, on the server.
    """

    title = "FediCaRL"
    paper = "Rebuffi et al., 2017: iCaRL, incremental classifier and representation learning; federated"

    w_old: float = option(1.0, "weight of what the old model says about old classes", low=0.0)
    ce_slice: CESlice = option("all", "labels among the task's classes, or among all that were seen")
    per_class: int = option(20, "examples of each class that are kept", low=1)
    memory: int = option(0, "examples of all classes that a client keeps at most; 0: no limit", low=0)
    scope: Literal["client", "global"] = option("client", "whether each client keeps so many, or all together")
    selection: Selection = option("herding", "how they are chosen")

    def end_task(self, server: Server, clients: Cohort) -> None:
        count = self.per_class if self.scope == "client" else max(1, self.per_class // server.population)
        if self.memory:
            count = min(count, max(1, self.memory // server.classes))
        clients.ask(self.keep, server.model, count)

    @on_client
    def keep(self, client: Client[WithExemplars], model: Weights, count: int) -> None:
        """Keep the task's last model, and some of its examples."""
        kept = client.state
        kept.teacher = model
        kept.memory = remembered(client, model, kept.memory, count, self.selection)

    def examples(self, client: Client[WithExemplars]) -> Data:
        return joined(client.data, client.state.memory)
