"""Prototype augmentation of PASS (Zhu et al., 2021): old classes are kept by their mean features and noise around them.

The classifier sees noisy mean features of old classes, and features must not move away from the model before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cross_entropy, linear

from fedkeep.data import Data
from fedkeep.losses.base import Answer, Batch, Objective, Student
from fedkeep.losses.decoupled import raised
from fedkeep.models import Weights
from fedkeep.models.heads import BIAS, WEIGHT

LARGEST = 1e6
"""A radius beyond it is no radius of features: its noise would drown everything."""


@dataclass(frozen=True, eq=False)
class Prototypes:
    """What stands for classes without their examples.

    Attributes
    ----------
    classes : int64 [k]. means : their mean features, [k, width]. examples : how many each is the mean of, int64 [k].
    radius : of the noise around them. Its square is the mean over classes of their features' variance, itself a mean
        over the width (trace of the covariance / width, divided by n - 1); classes with one example do not count, and
        without any other it is 0.
    """

    classes: Tensor
    means: Tensor
    examples: Tensor
    radius: float

    def fault(self, classes: range, width: int, held: int) -> str | None:
        """Return what is wrong with prototypes that claim to be of some of these classes, or None if nothing is.

        Parameters
        ----------
        held : how many examples there are.
        """
        named = self.classes.tolist()
        if self.classes.dim() != 1 or self.classes.dtype != torch.int64 or len(set(named)) < len(named):
            return f"prototypes whose classes are no distinct numbers: {named}"
        count = len(named)
        if self.means.shape != (count, width) or self.examples.shape != (count,) or self.means.dtype != torch.float32:
            return f"prototypes of shape {list(self.means.shape)} for {count} classes, not {[count, width]} in float32"
        if wrong := set(named) - set(classes):
            return f"prototypes of {sorted(wrong)}, which are no classes of this task"
        examples = self.examples.tolist()
        if self.examples.dtype != torch.int64 or min(examples, default=1) < 1 or sum(examples) > held:
            return f"prototypes of no examples, or of more than it has: {examples}, and it has {held}"
        return f"prototypes of radius {self.radius}" if not 0 <= self.radius < LARGEST else None

    def drawn(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return features [count, width] of random classes, their mean plus radius * N(0, I), and these classes.

        Parameters
        ----------
        generator : on the CPU.
        """
        places = torch.randint(len(self.classes), (count,), generator=generator).to(self.classes.device)
        noise = torch.randn(count, self.means.shape[1], generator=generator).to(self.means)
        return self.means[places] + self.radius * noise, self.classes[places]


@torch.no_grad()
def prototypes(features: Tensor, labels: Tensor) -> Prototypes:
    """Return the prototypes of the classes that occur, in order.

    Parameters
    ----------
    features : [n, width]. labels : int64 [n], of at least one example.
    """
    counts = torch.bincount(labels)
    found = counts.nonzero().flatten()
    members = [features[labels == c] for c in found.tolist()]
    variances = [rows.var(dim=0).mean() for rows in members if len(rows) > 1]
    radius = float(torch.stack(variances).mean().sqrt()) if variances else 0.0
    return Prototypes(found, torch.stack([rows.mean(0) for rows in members]), counts[found], radius)


def added(old: Prototypes | None, new: Prototypes | None, fixed: bool) -> Prototypes | None:
    """Return the prototypes of older classes and those of other, newer ones; None stands for no class at all.

    Parameters
    ----------
    fixed : whether the first radius that is not 0 stays for all classes, or the newest replaces it.
    """
    if old is None or new is None:
        return old or new
    radius = (old.radius or new.radius) if fixed else new.radius
    columns = {name: torch.cat((getattr(old, name), getattr(new, name))) for name in ("classes", "means", "examples")}
    return Prototypes(**columns, radius=radius)


def pooled(told: Sequence[Prototypes]) -> Prototypes | None:
    """Return the prototypes of all parties' examples together; the squared radius is the mean over these examples.

    Each class's mean is that of all its examples. The spread of one party's mean around another's is left out: what
    is known of the variance is what each party found around its own.
    """
    if not told:
        return None
    labels, means = torch.cat([one.classes for one in told]), torch.cat([one.means for one in told])
    weights = torch.cat([one.examples for one in told])
    totals = torch.bincount(labels, weights.double())
    found = totals.nonzero().flatten()
    sums = means.new_zeros(len(totals), means.shape[1]).index_add_(0, labels, means * weights[:, None])
    examples = totals[found]
    squares = sum(one.radius**2 * int(one.examples.sum()) for one in told)
    radius = math.sqrt(squares / float(examples.sum()))
    return Prototypes(found, sums[found] / examples[:, None].to(sums), examples.long(), radius)


@dataclass(frozen=True, eq=False)
class PrototypeEntropy(Objective):
    """Cross-entropy of the classifier on given features, its logits divided by ``tau``.

    Attributes
    ----------
    features : [n, width], one for each example of the first data set, whose batches say which a step sees.
    labels : int64 [n], rows of the classifier.
    """

    columns: ClassVar[tuple[str, ...]] = ("features", "labels")

    features: Tensor
    labels: Tensor
    tau: float = 0.1

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        rows = batches[0].index
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
