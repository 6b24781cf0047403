"""Losses on the classifier's input: near anchors of the classes, near a teacher's, or contrasted (MOON, SupCon)."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cosine_similarity, cross_entropy, mse_loss, normalize, relu

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
    _: KW_ONLY
    dataset_index: int = 0
    teacher_features: Tensor | None = None

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.dataset_index]
        cached = self.teacher_features
        target = model.teacher_features(self.teacher, batch) if cached is None else cached[batch.index]
        return self.compared(model.features(batch), target)

    def compared(self, features: Tensor, target: Tensor) -> Tensor:
        """Return the loss of features, [b, width], that shall become those of the teacher."""
        return mse_loss(upcast(features), target)

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        if dataset_index != self.dataset_index or self.teacher_features is not None:
            return self
        return replace(self, teacher={}, teacher_features=outputs.features(self.teacher))


@dataclass(frozen=True, eq=False)
class FeatureDistance(FeatureMSE):
    """||f(x) - f_teacher(x)||_2 over the whole batch as one vector, so that it grows with the root of the batch size.

    As in PASS (Zhu et al., 2021). Fields are those of `FeatureMSE`.
    """

    compares_examples = True

    def compared(self, features: Tensor, target: Tensor) -> Tensor:
        distance: Tensor = vector_norm(features - target)
        return distance


@dataclass(frozen=True, eq=False)
class ModelContrastive(Loss):
    """weight * mean of -ln [e^{s(z, z_t)/tau} / (e^{s(z, z_t)/tau} + e^{s(z, z_a)/tau})], s the cosine.

    z are the student's features, z_t those of the model ``towards``, z_a those of the model ``away`` (Li et al., 2021,
    "Model-contrastive federated learning", eq. 3).

    ``towards``, ``away``: The frozen models; empty once their features are cached.
    ``weight``: Factor on the mean (mu in the paper).
    ``tau``: The temperature.
    ``cached``: [n, width], the features of both on all examples of the first data set.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ("cached",)

    towards: Weights
    away: Weights
    weight: float
    tau: float
    cached: tuple[Tensor, ...] = ()

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[0]
        if self.cached:
            towards, away = (features[batch.index] for features in self.cached)
        else:
            towards, away = (model.teacher_features(frozen, batch) for frozen in (self.towards, self.away))
        features = model.features(batch)
        similarities = torch.stack([cosine_similarity(features, frozen) for frozen in (towards, away)], dim=-1)
        target = similarities.new_zeros(len(features), dtype=torch.int64)
        return self.weight * cross_entropy(similarities / self.tau, target)

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        if dataset_index or self.cached:
            return self
        return replace(self, towards={}, away={}, cached=(outputs.features(self.towards), outputs.features(self.away)))


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
