"""Functions that class-incremental methods share: losses on parts of the classes, cached teachers, kept examples."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fedkeep.interface import Client, Data
from fedkeep.losses import (
    ZERO_LOSS,
    ClassSubset,
    CrossEntropy,
    Distillation,
    FullKL,
    Head,
    Loss,
    Scale,
    SubsetDistillation,
)
from fedkeep.losses.prototypes import herd
from fedkeep.models import Weights
from fedkeep.models.heads import WEIGHT

CEClasses = Literal["new", "all"]
"""The classes among which labels compete: the task's, or all that were seen."""


@dataclass
class CachedTaskLoss:
    """Client state: a loss whose frozen teachers were evaluated once in a task.

    ``loss``: The loss, with the teachers' outputs on the examples of ``task``.
    ``task``: The task that it belongs to; 0 before the first.
    """

    loss: Loss = ZERO_LOSS
    task: int = 0


@dataclass
class OldModelState(CachedTaskLoss):
    """Client state: also an older model.

    ``teacher``: The last model of the task before; empty in the first.
    """

    teacher: Weights = field(default_factory=dict)


def label_loss(client: Client[Any], ce_classes: CEClasses) -> Loss:
    """Return the cross-entropy among the task's own classes, or among all seen; in the first task both are equal."""
    return (
        ClassSubset(CrossEntropy(), client.num_old_classes)
        if ce_classes == "new" and client.num_old_classes
        else CrossEntropy()
    )


def distill_old_classes(
    teacher: Weights, weight: float, tau: float, dataset_index: int = 0, *, scale: Scale = "none", head: Head = "sliced"
) -> Loss:
    """Return weight * the cross-entropy with an older model's probabilities among the classes that it knows.

    ``teacher``: The older model; if empty, the loss is nothing.
    ``dataset_index``: Which of the data sets of `fit` it is about, from 0.
    ``scale``: Whether the loss is multiplied by tau squared.
    ``head``: With ``joint``, the student's softmax runs over all its outputs. This is for examples of old classes only:
        on others it would teach that they are old.
    """
    if not teacher or not weight:
        return ZERO_LOSS
    num_known = len(teacher[WEIGHT])
    if head == "joint":
        return SubsetDistillation(teacher, 0, num_known, weight, tau, scale, dataset_index)
    distillation = Distillation(
        (teacher,), FullKL(weight), tau, scale=scale, dataset_index=dataset_index, teacher_entropy=False
    )
    return ClassSubset(distillation, 0, num_known, any_label=True)


def cache_once_per_task(client: Client[Any], loss: Loss, data: Data) -> Loss:
    """Return a loss with cached teachers, which are evaluated in the client's first round of a task.

    ``client``: Its state is a `CachedTaskLoss` and keeps the result for the task's other rounds.
    ``loss``: The loss before its teachers were evaluated.
    ``data``: The examples, which must be the same in all rounds of the task.
    """
    state: CachedTaskLoss = client.state
    if state.task != client.task:
        state.loss, state.task = client.cache_teachers(loss, data), client.task
    return state.loss


def concat(data: Data, memory: Data) -> Data:
    """Return the examples of both, one after the other; an empty memory adds nothing."""
    return {name: torch.cat((column, memory[name])) for name, column in data.items()} if memory else data


def mark_generated(data: Data, generated: bool = True) -> Data:
    """Return images and labels with the column that tells `fit` whether a generator generated them."""
    labels = data["label"]
    flags = torch.full_like(labels, generated, dtype=torch.bool)
    return {"input": data["input"], "label": labels, "generated": flags}


def update_memory(client: Client[Any], model: Weights, memory: Data, count: int) -> Data:
    """Return the exemplar memory with up to ``count`` of a client's examples of each class of the task.

    ``model``: The model on whose features herding works.
    ``memory``: The memory so far; may be empty.
    """
    client.refuse_if_private("the examples that are kept, and their number,")
    labels = client.data["label"]
    features = client.features(model) if len(labels) else labels
    rows = []
    for c in range(client.num_old_classes, client.num_classes):
        members = (labels == c).nonzero().flatten()
        rows.append(members[herd(features[members], count)] if len(members) else members)
    new = {name: column[torch.cat(rows)] for name, column in client.data.items()}
    return concat(memory, new) if memory else new
