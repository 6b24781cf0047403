"""Losses on the classifier's input: near anchors of the classes, near a teacher's, or contrasted (MOON, SupCon)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cosine_similarity, cross_entropy, mse_loss, normalize, relu

from fedkeep.data import Data
from fedkeep.losses.base import Batch, Loss, ModelView, Teacher, TeacherOutputs, teacher_features
from fedkeep.losses.decoupled import upcast


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

    ``teacher``: The frozen model, or its features.
    ``dataset_index``: Which of the data sets of `fit` it reads, from 0.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ("teacher",)

    teacher: Teacher
    dataset_index: int = 0

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.dataset_index]
        return mse_loss(upcast(model.features(batch)), teacher_features(self.teacher, model, batch))

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        if dataset_index != self.dataset_index or isinstance(self.teacher, Tensor):
            return self
        return replace(self, teacher=outputs.features(self.teacher))


@dataclass(frozen=True, eq=False)
class FeatureDistance(Loss):
    """||f(x) - f_teacher(x)||_2 over the whole batch as one vector, so that it grows with the root of the batch size.

    As in PASS (Zhu et al., 2021), on the first data set.

    ``teacher``: The frozen model, or its features.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ("teacher",)

    teacher: Teacher
    compares_examples = True

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[0]
        distance: Tensor = vector_norm(model.features(batch) - teacher_features(self.teacher, model, batch))
        return distance

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        if dataset_index or isinstance(self.teacher, Tensor):
            return self
        return replace(self, teacher=outputs.features(self.teacher))


@dataclass(frozen=True, eq=False)
class ModelContrastive(Loss):
    """weight * mean of -ln [e^{s(z, z_t)/tau} / (e^{s(z, z_t)/tau} + e^{s(z, z_a)/tau})], s the cosine.

    z are the student's features, z_t those of the model ``towards``, z_a those of the model ``away`` (Li et al., 2021,
    "Model-contrastive federated learning", eq. 3).

    ``towards``, ``away``: The frozen models, or their features.
    ``weight``: Factor on the mean (mu in the paper).
    ``tau``: The temperature.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ("towards", "away")

    towards: Teacher
    away: Teacher
    weight: float
    tau: float

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        features = model.features(batches[0])
        frozen = (teacher_features(teacher, model, batches[0]) for teacher in (self.towards, self.away))
        similarities = torch.stack([cosine_similarity(features, other) for other in frozen], dim=-1) / self.tau
        return self.weight * cross_entropy(similarities, similarities.new_zeros(len(features), dtype=torch.int64))

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        if dataset_index or isinstance(self.towards, Tensor) or isinstance(self.away, Tensor):
            return self
        return replace(self, towards=outputs.features(self.towards), away=outputs.features(self.away))


@dataclass(frozen=True, eq=False)
class SupCon(Loss):
    """Supervised contrastive loss: features of one class near each other, and far from all others.

    Mean over the batch, and over i's positives p, of -ln [e^{f_i.f_p/tau} / sum over a != i of e^{f_i.f_a/tau}]. f are
    the student's features, each of length 1; the positives of an example are the others of its class in the batch. An
    example without any counts as 0. It is the loss L_out of Khosla et al. (2020), "Supervised contrastive learning",
    eq. 2, with one view of each image.

    ``tau``: The temperature.
    ``dataset_index``: Which of the data sets of `fit` it reads, from 0.
    """

    tau: float = 0.07
    dataset_index: int = 0
    compares_examples = True

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.dataset_index]
        return supervised_contrastive(model.features(batch), batch.data["label"], self.tau)


def supervised_contrastive(features: Tensor, labels: Tensor, tau: float) -> Tensor:
    """Compute the supervised contrastive loss.

    ``features``: [b, width].
    ``labels``: int64 [b].
    """
    # Autocast would compute the product in half precision, whatever the features are.
    with torch.autocast(features.device.type, enabled=False):
        directions = normalize(upcast(features), dim=-1)
        products = directions @ directions.T
    is_self = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    # Not minus infinity: for an image alone in its batch the softmax would run over nothing.
    similarities = (products / tau).masked_fill(is_self, -1e9)
    positive = (labels.unsqueeze(0) == labels.unsqueeze(1)) & ~is_self
    log_p = (similarities.log_softmax(-1) * positive).sum(-1)
    return -(log_p / positive.sum(-1).clamp(min=1)).mean()
