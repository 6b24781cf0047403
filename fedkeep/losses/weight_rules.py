"""Weight rules: how much of each teacher's target and non-target part a student learns. A method is its weight rule.

The full divergence KL(p^T || p^S) is the special case a = w, b = w q_y^T of the parts TC and NT (see
`fedkeep.losses.decoupled`). The rules whose names begin with ``FullKL`` weigh it example by example.
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
        """Compute the weights of the two parts.

        ``teachers``: [k, n, classes], the teachers' logits, not yet divided by the temperature.
        ``labels``: int64 [n].
        Returns: (target, nontarget), both [k, n].
        """


@dataclass(frozen=True, eq=False)
class PerTeacher(WeightRule):
    """One weight per teacher and part, the same for every example.

    ``target``, ``nontarget``: [k], a and b.
    """

    target: Tensor
    nontarget: Tensor

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        shape = teachers.shape[:2]
        target, nontarget = (part.to(teachers.device) for part in (self.target, self.nontarget))
        return target.unsqueeze(-1).expand(shape), nontarget.unsqueeze(-1).expand(shape)


@dataclass(frozen=True, eq=False)
class FullKL(WeightRule):
    """The full divergence from each teacher, times ``weight`` / k: plain distillation, and the mean over teachers.

    ``weight``: Of all teachers together.
    """

    weight: float

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        return _full_kl(teachers.new_full(teachers.shape[:2], self.weight / len(teachers)), teachers, labels, tau)


@dataclass(frozen=True, eq=False)
class FullKLByClass(WeightRule):
    """The full divergence, times the weight of the example's label (He et al., 2022, FedCAD).

    ``weight``: [classes].
    """

    weight: Tensor

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        weight = self.weight.to(teachers.device)[labels].expand(teachers.shape[:2])
        return _full_kl(weight, teachers, labels, tau)


@dataclass(frozen=True, eq=False)
class FullKLByEntropy(WeightRule):
    """The full divergence, times ``weight`` / k * (1 - H_k / sum_j H_j), H the teacher's entropy at temperature 1.

    EBKD (Kwon et al., 2020). With one teacher, or where all entropies are zero, every teacher counts (k - 1) / k, and 1
    for k = 1.

    ``weight``: Of all teachers together.
    """

    weight: float

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        count = len(teachers)
        if count == 1:
            return FullKL(self.weight)(teachers, labels, tau)
        log_p = teachers.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        total = entropy.sum(0)
        share = torch.where(total > 0, entropy / total.clamp(min=torch.finfo(total.dtype).tiny), 1 / count)
        return _full_kl(self.weight / count * (1 - share), teachers, labels, tau)


@dataclass(frozen=True, eq=False)
class FullKLByConfidence(WeightRule):
    """The full divergence, times ``weight`` * (1 - softmax_k(CE(z_k, y))) / (k - 1).

    Teachers that are right about an example count more. CA-MKD (Zhang et al., 2022, eqs. 3 and 4), its part on logits.
    With one teacher its weight is 1.

    ``weight``: Of all teachers together.
    """

    weight: float

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        count = len(teachers)
        if count == 1:
            return FullKL(self.weight)(teachers, labels, tau)
        errors = torch.stack([cross_entropy(teacher, labels, reduction="none") for teacher in teachers])
        weight = self.weight * (1 - errors.softmax(0)) / (count - 1)
        return _full_kl(weight, teachers, labels, tau)


@dataclass(frozen=True, eq=False)
class ExampleWeighting(ABC):
    """A rule that weighs examples against each other."""

    @abstractmethod
    def __call__(self, teachers: Tensor, labels: Tensor) -> Tensor:
        """Compute the logarithm of each example's weight.

        Weights only matter in proportion to those of the same batch, and may be tiny or huge: hence the logarithm.

        ``teachers``: [k, n, classes], the teachers' logits.
        ``labels``: int64 [n].
        Returns: [n].
        """


@dataclass(frozen=True, eq=False)
class EntropyAndLabelWeighting(ExampleWeighting):
    """exp(-beta_entropy H) pi(y)^-beta, H the first teacher's entropy at temperature 1 in nats.

    ASD (Yashwanth et al., 2023, eq. 5).

    ``frequency``: [classes], pi, above zero for every label that occurs.
    ``beta``, ``beta_entropy``: The exponents.
    """

    frequency: Tensor
    beta: float = 1.0
    beta_entropy: float = 1.0

    def __call__(self, teachers: Tensor, labels: Tensor) -> Tensor:
        log_p = teachers[0].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return -self.beta_entropy * entropy - self.beta * self.frequency.to(labels.device)[labels].log()


def _full_kl(weight: Tensor, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    return weight, weight * log_split(teachers, labels, tau).rest.exp()
