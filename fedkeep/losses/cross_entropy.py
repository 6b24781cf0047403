"""Cross-entropy with the labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cross_entropy

from fedkeep.losses.base import Batch, Objective, Student
from fedkeep.losses.decoupled import raised


@dataclass(frozen=True, eq=False)
class CrossEntropy(Objective):
    """Mean over the batch of -ln p(label), p the softmax of the logits divided by ``tau``.

    ``on`` numbers the data set that it reads.
    """

    on: int = 0
    tau: float = 1.0

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.on]
        logits = raised(student.logits(batch))
        return cross_entropy(logits if self.tau == 1.0 else logits / self.tau, batch.data["label"])


@dataclass(frozen=True, eq=False)
class WeightedCrossEntropy(Objective):
    """Mean over the batch of -v(label) ln p(label), for ``weight`` v [classes]; not divided by the weights' sum.

    p is the softmax of the logits divided by ``tau``.
    """

    weight: Tensor
    tau: float = 1.0

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        logits, labels = raised(student.logits(batches[0])) / self.tau, batches[0].data["label"]
        return (self.weight.to(labels.device)[labels] * cross_entropy(logits, labels, reduction="none")).mean()
