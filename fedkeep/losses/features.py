"""Losses on what the classifier reads: bound to anchors of the classes, or equal to a teacher's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import mse_loss, relu

from fedkeep.data import Data
from fedkeep.losses.base import Answer, Batch, Objective, Student
from fedkeep.losses.decoupled import raised
from fedkeep.models import Weights


def bounding(features: Tensor, anchors: Tensor, slack: float) -> Tensor:
    """Return max(0, MSE - slack) of features and their anchors, both [b, width]; the mean is over the whole batch."""
    return relu(mse_loss(raised(features), anchors) - slack)


@dataclass(frozen=True, eq=False)
class Bounding(Objective):
    """Features of the first data set near the anchors of their classes, [classes, width] (LANDER: `bounding`)."""

    anchors: Tensor
    slack: float

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[0]
        return bounding(student.features(batch), self.anchors[batch.data["label"]], self.slack)


@dataclass(frozen=True, eq=False)
class FeatureError(Objective):
    """Mean squared error between the student's and a teacher's features, over batch and width, on data set ``on``.

    Settled, it holds the teacher's features, [n, width], instead of the teacher.
    """

    columns: ClassVar[tuple[str, ...]] = ("said",)

    teacher: Weights
    on: int = 0
    said: Tensor | None = None

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.on]
        said = self.said[batch.index] if self.said is not None else student.frozen_features(self.teacher, batch)
        return mse_loss(raised(student.features(batch)), said)

    def settle(self, answer: Answer, data: Data, on: int) -> Objective:
        if on != self.on or self.said is not None:
            return self
        return replace(self, teacher={}, said=answer.features(self.teacher))
