"""Task semantics distillation (TSD): how classes of different tasks are told apart, taught by the model before.

FedSKF (Electronics 2024, 13, 1772), eq. 8: with the old model's logits for the old classes beside the student's for
the new ones, a binary cross-entropy to the labels. As printed the old half is a constant, so the term teaches nothing
about old classes; its source, GLFC (Dong et al., 2022), means something else. So there are three readings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from fedkeep.data import Data
from fedkeep.losses.base import Answer, Batch, Objective, Student
from fedkeep.losses.decoupled import raised
from fedkeep.models import Weights

TSDReading = Literal["recombined_sigmoid", "recombined_softmax", "glfc"]
Reduction = Literal["mean", "sum"]


def tsd_loss(old: Tensor, student: Tensor, labels: Tensor, reading: TSDReading, reduction: Reduction) -> Tensor:
    """Return the loss, a scalar: a mean over the batch, and over the classes or summed over them.

    ``recombined_sigmoid``, as printed: of [old logits; the student's new ones] through a sigmoid each, to the one-hot
    labels. ``recombined_softmax``: of the same through a softmax, where the old logits compete with the new ones.
    ``glfc``: of all the student's logits to [sigmoid of the old logits; one-hot labels], as in GLFC's code.

    Parameters
    ----------
    old : [b, old classes], the frozen model's logits.
    student : [b, classes]. labels : int64 [b].
    """
    old, student = raised(old.detach()), raised(student)
    known, classes = old.shape[-1], student.shape[-1]
    # Not `one_hot`, which looks at the numbers and so cannot be computed for stacked clients.
    truth = (labels[:, None] == torch.arange(classes, device=labels.device)).to(student.dtype)
    if reading == "glfc":
        target = torch.cat((old.sigmoid(), truth[:, known:]), dim=-1)
        losses = binary_cross_entropy_with_logits(student, target, reduction="none")
    else:
        joined = torch.cat((old, student[:, known:]), dim=-1)
        if reading == "recombined_sigmoid":
            losses = binary_cross_entropy_with_logits(joined, truth, reduction="none")
        else:
            losses = binary_cross_entropy(joined.softmax(-1), truth, reduction="none")
    return losses.mean() if reduction == "mean" else losses.sum(-1).mean()


@dataclass(frozen=True, eq=False)
class TSD(Objective):
    """`tsd_loss` on the first data set, taught by ``teacher``, which knows the first ``known`` classes.

    Settled, it holds what the teacher said, [n, known], instead of the teacher.
    """

    columns: ClassVar[tuple[str, ...]] = ("said",)

    teacher: Weights
    known: int
    reading: TSDReading = "recombined_sigmoid"
    reduction: Reduction = "mean"
    said: Tensor | None = None

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[0]
        said = self.said[batch.index] if self.said is not None else student.frozen(self.teacher, batch)
        old = said[:, : self.known]
        return tsd_loss(old, student.logits(batch), batch.data["label"], self.reading, self.reduction)

    def settle(self, answer: Answer, data: Data, on: int) -> Objective:
        if on or self.said is not None:
            return self
        return replace(self, teacher={}, said=answer(self.teacher)[:, : self.known])
