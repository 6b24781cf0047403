"""Weight rules: how much of each teacher's target and non-target part a student takes. A method is its weight rule.

The whole divergence KL(p^T || p^S) is the special case a = w, b = w q_y^T of the parts TC and NT (see
`fedkeep.losses.decoupled`): the rules below whose names begin with ``Whole`` weigh it example by example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedkeep.losses.decoupled import log_split


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
        target, nontarget = (part.to(teachers.device) for part in (self.target, self.nontarget))
        return target.unsqueeze(-1).expand(shape), nontarget.unsqueeze(-1).expand(shape)


@dataclass(frozen=True, eq=False)
class Whole(WeightRule):
    """The whole divergence from each teacher, times ``weight`` / k: plain distillation, and the mean over teachers."""

    weight: float

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        return _whole(teachers.new_full(teachers.shape[:2], self.weight / len(teachers)), teachers, labels, tau)


@dataclass(frozen=True, eq=False)
class WholeByClass(WeightRule):
    """The whole divergence, times ``weight`` [classes] of the example's label (FedCAD)."""

    weight: Tensor

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        weight = self.weight.to(teachers.device)[labels].expand(teachers.shape[:2])
        return _whole(weight, teachers, labels, tau)


@dataclass(frozen=True, eq=False)
class WholeByEntropy(WeightRule):
    """The whole divergence, times ``weight`` / k * (1 - H_k / sum_j H_j), H the teacher's entropy at temperature 1.

    EBKD (Kwon et al., 2020). With one teacher, or where all entropies are zero, every teacher counts (k - 1) / k, and 1
    for k = 1.
    """

    weight: float

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        count = len(teachers)
        if count == 1:
            return Whole(self.weight)(teachers, labels, tau)
        log_p = teachers.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        total = entropy.sum(0)
        share = torch.where(total > 0, entropy / total.clamp(min=torch.finfo(total.dtype).tiny), 1 / count)
        return _whole(self.weight / count * (1 - share), teachers, labels, tau)


@dataclass(frozen=True, eq=False)
class WholeByConfidence(WeightRule):
    """The whole divergence, times ``weight`` * (1 - softmax_k(CE(z_k, y))) / (k - 1): teachers that are right count
    more.

    CA-MKD (Zhang et al., 2022), its part on logits. ``extra_division`` divides by k once more, as its code does. With
    one teacher its weight is 1.
    """

    weight: float
    extra_division: bool = False

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        count = len(teachers)
        if count == 1:
            return Whole(self.weight)(teachers, labels, tau)
        wrong = torch.stack([cross_entropy(teacher, labels, reduction="none") for teacher in teachers])
        weight = self.weight * (1 - wrong.softmax(0)) / (count - 1)
        return _whole(weight / count if self.extra_division else weight, teachers, labels, tau)


@dataclass(frozen=True, eq=False)
class ExampleRule(ABC):
    """A rule that weighs examples against each other."""

    @abstractmethod
    def __call__(self, teachers: Tensor, labels: Tensor) -> Tensor:
        """Return the logarithm of each example's weight, [n], from teachers' logits [k, n, classes] and labels [n].

        Of the logarithm, since weights count in relation to those of the same batch, and may be tiny or huge.
        """


@dataclass(frozen=True, eq=False)
class ByEntropyAndLabel(ExampleRule):
    """exp(-beta_entropy H) pi(y)^-beta, H the first teacher's entropy at temperature 1 in nats (ASD, eq. 5).

    ``frequency`` pi [classes] is above zero for every label that occurs.
    """

    frequency: Tensor
    beta: float = 1.0
    beta_entropy: float = 1.0

    def __call__(self, teachers: Tensor, labels: Tensor) -> Tensor:
        log_p = teachers[0].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return -self.beta_entropy * entropy - self.beta * self.frequency.to(labels.device)[labels].log()


def _whole(weight: Tensor, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    return weight, weight * log_split(teachers, labels, tau).rest.exp()
