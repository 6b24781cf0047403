"""Weight rules: how much of each teacher's target and non-target part a student takes. A method is its weight rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class WeightRule(ABC):
    """A rule that weighs teachers, example by example."""

    @abstractmethod
    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        """Return the weights (target, nontarget), both [k, n].

        From teachers' logits [k, n, classes], not yet divided by the temperature, and labels [n].
        """


@dataclass(frozen=True, eq=False)
class PerTeacher(WeightRule):
    """One weight per teacher and part, the same for every example: ``target`` [k] and ``nontarget`` [k]."""

    target: Tensor
    nontarget: Tensor

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        shape = teachers.shape[:2]
        return self.target.unsqueeze(-1).expand(shape), self.nontarget.unsqueeze(-1).expand(shape)
