"""Losses on the classifier's input: near anchors of the classes, or near a teacher's features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import mse_loss, relu

from fedkeep.data import Data
from fedkeep.losses.base import Batch, Loss, ModelView, TeacherOutputs
from fedkeep.losses.decoupled import upcast
from fedkeep.models import Weights


def bounding_loss(features: Tensor, anchors: Tensor, slack: float) -> Tensor:
    """Return max(0, MSE - slack) of features and anchors (Tran et al., 2024, LANDER).

    ``features``, ``anchors``: [b, width]. The squared error is a mean over the whole batch.
    ``slack``: The error that costs nothing.
    """
    return relu(mse_loss(upcast(features), anchors) - slack)


@dataclass(frozen=True, eq=False)
class BoundingLoss(Loss):
    """`bounding_loss` of the first data set's features and the anchors of their classes.

    ``anchors``: [classes, width].
    ``slack``: The error that costs nothing.
    """

    anchors: Tensor
    slack: float
    compares_examples = True

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[0]
        return bounding_loss(model.features(batch), self.anchors[batch.data["label"]], self.slack)


@dataclass(frozen=True, eq=False)
class FeatureMSE(Loss):
    """Mean squared error between the student's and a teacher's features, over batch and width.

    ``teacher``: The frozen model; empty once its features are cached.
    ``dataset_index``: Which of the data sets of `fit` it reads, from 0.
    ``teacher_features``: [n, width], the cached features.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ("teacher_features",)

    teacher: Weights
    dataset_index: int = 0
    teacher_features: Tensor | None = None

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.dataset_index]
        cached = self.teacher_features
        target = model.teacher_features(self.teacher, batch) if cached is None else cached[batch.index]
        return mse_loss(upcast(model.features(batch)), target)

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        if dataset_index != self.dataset_index or self.teacher_features is not None:
            return self
        return replace(self, teacher={}, teacher_features=outputs.features(self.teacher))


@dataclass(frozen=True, eq=False)
class FeatureDistance(Loss):
    """||f(x) - f_teacher(x)||_2 over the whole batch as one vector, so that it grows with the root of the batch size.

    As in PASS (Zhu et al., 2021), on the first data set.

    ``teacher``: The frozen model; empty once its features are cached.
    ``teacher_features``: [n, width], the cached features.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ("teacher_features",)

    teacher: Weights
    teacher_features: Tensor | None = None
    compares_examples = True

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[0]
        cached = self.teacher_features
        target = model.teacher_features(self.teacher, batch) if cached is None else cached[batch.index]
        distance: Tensor = vector_norm(model.features(batch) - target)
        return distance

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        if dataset_index or self.teacher_features is not None:
            return self
        return replace(self, teacher={}, teacher_features=outputs.features(self.teacher))
