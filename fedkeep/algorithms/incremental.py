"""What class-incremental methods share: losses on slices, an old model that teaches, and examples that are kept."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import Literal
import torch
from typing_extensions import TypeVar
from fedkeep.interface import Algorithm
from fedkeep.interface import Client
from fedkeep.interface import Cohort
from fedkeep.interface import Data
from fedkeep.interface import Fit
from fedkeep.interface import Server
from fedkeep.interface import on_client
from fedkeep.interface.party import S
from fedkeep.models import Weights
from fedkeep.models.heads import WEIGHT
from fedkeep.options import option
from fedkeep.aggregation import Fusion
from fedkeep.aggregation import fused
from fedkeep.losses import NOTHING
from fedkeep.losses import CrossEntropy
from fedkeep.losses import Distillation
from fedkeep.losses import Objective
from fedkeep.losses import Slice
from fedkeep.losses import Whole
from fedkeep.losses.exemplars import herded
from fedkeep.objectives import AmongAll
from fedkeep.objectives import Head
from fedkeep.objectives import Scale

CESlice = Literal["new", "all"]
Selection = Literal["herding", "random"]
Scope = Literal["client", "global"]


def cross_entropy(client: Client[Any], ce_slice: CESlice) -> Objective:
    """Return the cross-entropy among the task's own classes, or among all seen; in the first task the same."""
    return Slice(CrossEntropy(), client.old) if ce_slice == "new" and client.old else CrossEntropy()


def by_head(ce_slice: CESlice | Literal["by_head"], head: Head) -> CESlice:
    """Return the classes with which labels compete."""
    if ce_slice == "by_head":
        return "all" if head == "joint" else "new"
    return ce_slice


def old_classes(
    teacher: Weights, weight: float, tau: float, on: int = 0, *, scale: Scale = "none", head: Head = "sliced"
) -> Objective:
    """Return weight * cross-entropy with an older model's probabilities among the classes that it knows.

    It is over data set ``on``. Without a model, or without weight, it is nothing. With a ``joint`` head the student's
    probabilities are those among all its outputs: for examples of old classes only, as of others it would say that they
    are old.
    """
    if not teacher or not weight:
        return NOTHING
    known = len(teacher[WEIGHT])
    if head == "joint":
        return AmongAll(teacher, 0, known, weight, tau, scale, on)
    term = Distillation((teacher,), Whole(weight), tau, scale=scale, on=on, form="ce")
    return Slice(term, 0, known, any_label=True)


def joined(data: Data, memory: Data) -> Data:
    """Return the examples of both, one after the other; an empty memory adds nothing."""
    return {name: torch.cat((column, memory[name])) for name, column in data.items()} if memory else data


def made(data: Data, yes: bool = True) -> Data:
    """Return images with their labels, marked as made by a generator, or as not (see `fit`)."""
    labels = data["label"]
    return {"image": data["image"], "label": labels, "made": torch.full_like(labels, yes, dtype=torch.bool)}


def share(count: int, scope: Scope, clients: int) -> int:
    """Return how many examples of a class each client keeps, if it or if all together shall have ``count``."""
    return count if scope == "client" else max(1, count // clients)


def remembered(client: Client[Any], model: Weights, memory: Data, count: int, how: Selection) -> Data:
    """Return the memory with up to ``count`` of a client's examples of each class of the task.

    Of the classes that are there already the first ``count`` stay: an exemplar set is cut short, not chosen anew.

    Parameters
    ----------
    model : whose features decide, if they are herded.
    """
    labels = client.data["label"]
    features = client.features(model) if how == "herding" and len(labels) else labels
    rows = []
    for c in range(client.old, client.classes):
        members = (labels == c).nonzero().flatten()
        if how == "herding":
            chosen = herded(features[members], count) if len(members) else members
        else:
            chosen = torch.randperm(len(members), generator=client.rng("exemplars"))[:count].to(members.device)
        rows.append(members[chosen])
    fresh = {name: column[torch.cat(rows)] for name, column in client.data.items()}
    return joined(_cut(memory, count), fresh) if memory else fresh


def _cut(memory: Data, count: int) -> Data:
    """Return the first ``count`` examples of each class."""
    labels = memory["label"]
    earlier = (labels[:, None] == labels).tril(-1).sum(1)  # of its class, before it
    return {name: column[earlier < count] for name, column in memory.items()}


@dataclass
class Taught:
    """What a client keeps: what old models say about the examples of ``task``."""

    lesson: Objective = NOTHING
    task: int = 0


@dataclass
class Old(Taught):
    """What a client keeps: also a model of the task before."""

    teacher: Weights = field(default_factory=dict)


def once_a_task(client: Client[Any], lesson: Objective, data: Data) -> Objective:
    """Return a lesson, its teachers asked in the first of a task's rounds, and what they said kept for the others."""
    kept: Taught = client.state
    if kept.task != client.task:
        kept.lesson, kept.task = client.settle(lesson, data), client.task
    return kept.lesson


K = TypeVar("K", bound=Old, default=Old)


@dataclass(frozen=True)
class WithOldModel(Algorithm[S, K]):
    """Base of parallel methods that learn the new classes while an older model teaches the old ones."""

    w_old: float = option(3.0, "weight of what the old model says about old classes", low=0.0)
    tau: float = option(2.0, "softmax temperature; there is no tau squared", low=1e-3)
    ce_slice: CESlice = option("new", "labels among the task's classes, or among all that were seen")
    fusion: Fusion = option("uniform", "whether clients count by their examples, or all alike")

    def round(self, server: Server[S], cohort: Cohort) -> None:
        server.model = fused(cohort.ask(self.train, server.model), self.fusion)

    @abstractmethod
    def end_task(self, server: Server[S], clients: Cohort) -> None:
        """Let clients keep a model that is to teach in the next task."""

    @on_client
    def train(self, client: Client[K], model: Weights) -> Fit:
        """Train the global model on the task's labels and on what the old model said, once and for all its rounds."""
        data = self.examples(client)
        objective = self.labels(client) + self.taught(client, data) + self.beside(client, model)
        return client.fit(model, objective, data)

    def examples(self, client: Client[K]) -> Data:
        """Return what a client trains on."""
        return client.data

    def labels(self, client: Client[K]) -> Objective:
        """Return what is learned from labels."""
        return cross_entropy(client, self.ce_slice)

    def taught(self, client: Client[K], data: Data) -> Objective:
        """Return the task's lesson about these examples, which are the same in all its rounds."""
        return once_a_task(client, self.lesson(client.state), data)

    def lesson(self, kept: K) -> Objective:
        """Return what is taught in a task, before any teacher is asked."""
        return old_classes(kept.teacher, self.w_old, self.tau)

    def beside(self, client: Client[K], model: Weights) -> Objective:
        """Return what else there is to minimise for a client that received ``model``."""
        return NOTHING
