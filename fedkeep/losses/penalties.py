"""Penalties on the weights: one quadratic and one linear term serve proximal, curvature and control-variate methods.

One of absolute values makes weights sparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkeep.losses.base import Batch, Objective, Student
from fedkeep.models import Weights


@dataclass(frozen=True, eq=False)
class Quadratic(Objective):
    """factor * sum_j c_j (w_j - a_j)^2 over the parameters that have an anchor; buffers take no part.

    Attributes
    ----------
    anchor : a, a whole model, or the tensors of one that are held, such as its classifier.
    factor : a number, such as mu / 2 for FedProx.
    curvature : c by parameter, not negative; empty means 1 everywhere.
    """

    anchor: Weights
    factor: float
    curvature: Weights = field(default_factory=dict)

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        held = {name: weight for name, weight in student.weights.items() if name in self.anchor}
        squares = {name: (weight - self.anchor[name]).square() for name, weight in held.items()}
        if self.curvature:
            squares = {name: self.curvature[name] * square for name, square in squares.items()}
        return self.factor * torch.stack([square.sum() for square in squares.values()]).sum()

    def gradient(self, weights: Weights) -> dict[str, Tensor]:
        """Return the gradient at ``weights``, 2 factor c (w - a), of the parameters that have an anchor."""
        slopes = {
            name: 2 * self.factor * (weight - self.anchor[name])
            for name, weight in weights.items()
            if name in self.anchor
        }
        return {name: self.curvature[name] * slope for name, slope in slopes.items()} if self.curvature else slopes


@dataclass(frozen=True, eq=False)
class Slope(Objective):
    """sum_j s_j w_j over the parameters: it adds ``slope`` s to every gradient (SCAFFOLD's correction)."""

    slope: Weights

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        # Over the student's parameters, not over the slope: a whole model has buffers too, which are not trained.
        return torch.stack([(self.slope[name] * weight).sum() for name, weight in student.weights.items()]).sum()


@dataclass(frozen=True, eq=False)
class Absolute(Objective):
    """factor * sum_j |w_j| over the parameters of these ``names``."""

    names: tuple[str, ...]
    factor: float

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        return self.factor * torch.stack([student.weights[name].abs().sum() for name in self.names]).sum()
