"""Prototype augmentation of PASS (Zhu et al., 2021): old classes are kept by their mean features and noise around them.

Its three parts, beside cross-entropy: a class is learned as four, by rotation; the classifier sees noisy mean features
of old classes; and features must not move away from the model before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cross_entropy, linear

from fedkeep.data import Data
from fedkeep.models import Weights
from fedkeep.models.heads import BIAS, WEIGHT
from fedkeep.objectives.base import Answer, Batch, Objective, Student
from fedkeep.objectives.decoupled import raised

ROTATIONS = 4


def rotated(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return images turned by 0, 90, 180 and 270 degrees, one after the other, and labels 4 y + k of the k-th turn.

    Parameters
    ----------
    images : [b, channels, side, side]. labels : int64 [b].
    """
    turned = torch.stack([images.rot90(k, (-2, -1)) for k in range(ROTATIONS)], dim=1).flatten(0, 1)
    return turned, (ROTATIONS * labels[:, None] + torch.arange(ROTATIONS, device=labels.device)).flatten()


def upright(logits: Tensor) -> Tensor:
    """Return the logits of the unturned classes, [b, classes], from [b, 4 classes]: what is evaluated."""
    return logits[:, ::ROTATIONS]


@torch.no_grad()
def prototypes(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the classes that occur, int64 [k] in order, their mean features [k, width], and the radius of the noise.

    The radius squared is the mean over classes of their features' variance, itself a mean over the width (trace of the
    covariance / width, divided by n - 1); classes with one example do not count, and without any other it is 0.

    Parameters
    ----------
    features : [n, width]. labels : int64 [n].
    """
    found = torch.bincount(labels).nonzero().flatten()
    members = [features[labels == c] for c in found.tolist()]
    variances = [rows.var(dim=0).mean() for rows in members if len(rows) > 1]
    radius = float(torch.stack(variances).mean().sqrt()) if variances else 0.0
    return found, torch.stack([rows.mean(0) for rows in members]), radius


def augmented(
    classes: Tensor, means: Tensor, radius: float, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return features [count, width] of random classes, their mean plus radius * N(0, I), and these classes [count].

    Parameters
    ----------
    classes : int64 [k]. means : [k, width].
    generator : on the CPU.
    """
    drawn = torch.randint(len(classes), (count,), generator=generator).to(classes.device)
    noise = torch.randn(count, means.shape[1], generator=generator).to(means)
    return means[drawn] + radius * noise, classes[drawn]


@dataclass(frozen=True, eq=False)
class PrototypeEntropy(Objective):
    """Cross-entropy of the classifier on given features, its logits divided by ``tau``.

    A step reads as many of the pool's rows as the batch of the first data set has, those that the batch's rows have
    modulo the pool: so in a random order, and the pool may be larger or smaller than the data.

    Attributes
    ----------
    features : the pool, [m, width]. labels : int64 [m], rows of the classifier.
    """

    features: Tensor
    labels: Tensor
    tau: float = 0.1

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        rows = batches[0].index % len(self.labels)
        logits = linear(self.features[rows], student.weights[WEIGHT], student.weights.get(BIAS))
        return cross_entropy(raised(logits) / self.tau, self.labels[rows])


@dataclass(frozen=True, eq=False)
class FeatureDistance(Objective):
    """||f(x) - f_teacher(x)||_2 over the whole batch as one vector, so that it grows with the root of the batch size.

    Settled, it holds the teacher's features, [n, width], instead of the teacher.
    """

    columns: ClassVar[tuple[str, ...]] = ("said",)

    teacher: Weights
    said: Tensor | None = None

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[0]
        said = self.said[batch.index] if self.said is not None else student.frozen_features(self.teacher, batch)
        distance: Tensor = vector_norm(student.features(batch) - said)
        return distance

    def settle(self, answer: Answer, data: Data, on: int) -> Objective:
        return self if on or self.said is not None else replace(self, teacher={}, said=answer.features(self.teacher))
