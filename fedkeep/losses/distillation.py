"""Distillation from frozen teachers, whose outputs are computed in every batch or cached once.

A weight rule says how much of each teacher's target and non-target part a student learns. The full divergence
KL(p^T || p^S) is the special case a = w, b = w q_y^T of the parts TC and NT (see `fedkeep.losses.decoupled`). The rules
whose names begin with ``FullKL`` weigh it example by example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedkeep.data import Data
from fedkeep.losses.base import ZERO_LOSS, Batch, Loss, ModelView, TeacherOutputs
from fedkeep.losses.decoupled import MergedTeachers, decoupled_loss, log_split, merge, upcast
from fedkeep.losses.wrappers import ClassSubset
from fedkeep.models import Weights


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
class EntropyAndLabelWeighting:
    """Weighs examples: exp(-beta_entropy H) pi(y)^-beta, H the first teacher's entropy at temperature 1 in nats.

    ASD (Yashwanth et al., 2023, eq. 5).

    ``frequency``: [classes], pi, above zero for every label that occurs.
    ``beta``, ``beta_entropy``: The exponents.
    """

    frequency: Tensor
    beta: float = 1.0
    beta_entropy: float = 1.0

    def __call__(self, teachers: Tensor, labels: Tensor) -> Tensor:
        """Compute the logarithm of each example's weight.

        Weights only matter in proportion to those of the same batch, and may be tiny or huge: hence the logarithm.

        ``teachers``: [k, n, classes], the teachers' logits.
        ``labels``: int64 [n].
        Returns: [n].
        """
        log_p = teachers[0].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return -self.beta_entropy * entropy - self.beta * self.frequency.to(labels.device)[labels].log()


def _full_kl(weight: Tensor, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    return weight, weight * log_split(teachers, labels, tau).rest.exp()


Scale = Literal["tau2", "none"]

Head = Literal["joint", "sliced"]
"""Whether the student's softmax runs over all its outputs, or over old outputs and new outputs apart."""


@dataclass(frozen=True, eq=False)
class Distillation(Loss):
    """Mean over the batch of s * sum_k (a_k TC_k + b_k NT_k), for teachers given as models.

    `kl`, `not_true` and `decoupled` build the three usual cases with one teacher.

    Attributes
    ----------
    teachers : tuple[Weights, ...]
        The frozen models. Without any, nothing is distilled.
    rule : WeightRule
        Gives the weights a and b of each teacher and example.
    tau : float
        The softmax temperature of teachers and student.
    scale : {"tau2", "none"}
        ``tau2`` makes s tau squared, so that the gradient keeps its size when tau changes (Hinton et al., 2015);
        ``none`` makes it 1.
    dataset_index : int
        Which of the data sets of `fit` it reads, from 0.
    example_weights : EntropyAndLabelWeighting or None
        Weighs examples, so that the mean over a batch becomes a weighted mean. None weighs all alike.
    teacher_entropy : bool
        False leaves the teachers' own entropies out, so that the full divergence becomes the cross-entropy with their
        probabilities: another value, with the same gradient.
    """

    teachers: tuple[Weights, ...]
    rule: WeightRule
    tau: float = 1.0
    scale: Scale = "tau2"
    dataset_index: int = 0
    example_weights: EntropyAndLabelWeighting | None = None
    teacher_entropy: bool = True

    @classmethod
    def kl(cls, teacher: Weights, weight: float = 1.0, tau: float = 1.0, scale: Scale = "tau2") -> Distillation:
        """Return plain distillation, s * weight * KL(p^T || p^S) (Hinton et al., 2015).

        Parameters
        ----------
        teacher : Weights
            The frozen model.
        weight : float
            Factor on the divergence.
        tau : float
            The softmax temperature.
        scale : {"tau2", "none"}
            Whether s is tau squared or 1.
        """
        return cls((teacher,), FullKL(weight), tau, scale)

    @classmethod
    def not_true(cls, teacher: Weights, weight: float = 1.0, tau: float = 1.0, scale: Scale = "tau2") -> Distillation:
        """Return not-true distillation, s * weight * NT (Lee et al., 2022, FedNTD, eq. 4).

        Parameters
        ----------
        teacher : Weights
            The frozen model.
        weight : float
            Factor on the non-target part.
        tau : float
            The softmax temperature.
        scale : {"tau2", "none"}
            Whether s is tau squared or 1.
        """
        return cls.decoupled(teacher, 0.0, weight, tau, scale)

    @classmethod
    def decoupled(
        cls, teacher: Weights, w_target: float, w_nontarget: float, tau: float = 1.0, scale: Scale = "tau2"
    ) -> Distillation:
        """Return decoupled distillation, s * (w_target TC + w_nontarget NT) (Zhao et al., 2022, eq. 7).

        Parameters
        ----------
        teacher : Weights
            The frozen model.
        w_target, w_nontarget : float
            Factors on the target part and on the non-target part.
        tau : float
            The softmax temperature.
        scale : {"tau2", "none"}
            Whether s is tau squared or 1.
        """
        rule = PerTeacher(torch.tensor([w_target]), torch.tensor([w_nontarget]))
        return cls((teacher,), rule, tau, scale)

    @property
    def compares_examples(self) -> bool:
        return self.example_weights is not None

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        # Only reached when images change from epoch to epoch (augmentation); otherwise `fit` caches the teachers first.
        batch = batches[self.dataset_index]
        student = model.logits(batch)
        if not self.teachers or student.shape[-1] == 1:  # with one class its probability is 1 in every model
            return student.new_zeros(())
        logits = torch.stack([model.teacher_logits(teacher, batch) for teacher in self.teachers])
        merged, log_weights = self._merged(logits, batch.data["label"])
        losses = decoupled_loss(student, batch.data["label"], merged, self.tau)
        return _factor(self.tau, self.scale) * _mean(losses, log_weights)

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        if dataset_index != self.dataset_index:
            return self
        if not self.teachers:
            return ZERO_LOSS
        return self.cached(torch.stack([outputs(teacher) for teacher in self.teachers]), data["label"])

    def cached(self, logits: Tensor, labels: Tensor) -> Loss:
        """Return the distillation from teachers of whom only the logits are at hand, [k, n, classes] on all n examples.

        `ZERO_LOSS` if there is one class only: its probability is 1 in every model.
        """
        if logits.shape[-1] == 1:
            return ZERO_LOSS
        merged, log_weights = self._merged(logits, labels)
        return CachedDistillation(merged, self.tau, _factor(self.tau, self.scale), self.dataset_index, log_weights)

    def _merged(self, logits: Tensor, labels: Tensor) -> tuple[MergedTeachers, Tensor | None]:
        """Return the teachers as one, and the logarithms of the examples' weights, or None."""
        logits = upcast(logits)
        merged = merge(logits, labels, *self.rule(logits, labels, self.tau), self.tau)
        if not self.teacher_entropy:
            merged = replace(merged, constant=torch.zeros_like(merged.constant))
        return merged, None if self.example_weights is None else self.example_weights(logits, labels)


@dataclass(frozen=True, eq=False)
class CachedDistillation(Loss):
    """A distillation whose teachers' outputs are given for all n examples of a data set.

    `Distillation.cached` builds it.

    ``tau``: The softmax temperature of the student.
    ``factor``: Factor on the mean.
    ``dataset_index``: Which of the data sets of `fit` it reads, from 0.
    ``log_weights``: [n], logarithms of the examples' weights. None weighs all alike.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ("teachers", "log_weights")

    teachers: MergedTeachers
    tau: float
    factor: float
    dataset_index: int = 0
    log_weights: Tensor | None = None

    @property
    def compares_examples(self) -> bool:
        return self.log_weights is not None

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.dataset_index]
        rows = MergedTeachers(
            self.teachers.target[batch.index], self.teachers.others[batch.index], self.teachers.constant[batch.index]
        )
        losses = decoupled_loss(model.logits(batch), batch.data["label"], rows, self.tau)
        return self.factor * _mean(losses, None if self.log_weights is None else self.log_weights[batch.index])


@dataclass(frozen=True, eq=False)
class SubsetDistillation(Loss):
    """Distillation from a teacher of some of the classes, to a student whose softmax runs over all its outputs.

    Mean over the batch of -weight * s * sum_c p_c ln q_c. p is the teacher's softmax among the classes ``start`` to
    ``stop - 1`` and zero elsewhere; q is the student's softmax among all outputs. So a student that has the teacher's
    distribution inside the subset, and probability outside of it, still has a gradient, which lowers the other outputs.

    ``teacher``: The frozen model; empty once its outputs are cached.
    ``start``: The first class that the teacher knows.
    ``stop``: One beyond the last class that it knows.
    ``weight``: Factor on the loss.
    ``tau``: The softmax temperature of teacher and student.
    ``scale``: Whether s is tau squared, or 1.
    ``dataset_index``: Which of the data sets of `fit` it reads, from 0.
    ``probabilities``: p on all examples, [n, stop - start]; None before it is cached.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ("probabilities",)

    teacher: Weights
    start: int
    stop: int
    weight: float = 1.0
    tau: float = 1.0
    scale: Scale = "none"
    dataset_index: int = 0
    probabilities: Tensor | None = None

    @classmethod
    def from_logits(
        cls, logits: Tensor, start: int, weight: float, tau: float, scale: Scale, *, dataset_index: int = 0
    ) -> SubsetDistillation:
        """Return the loss for a teacher whose logits on all examples, [n, its classes], are known already."""
        probabilities = _probabilities(logits, tau)
        return cls({}, start, start + logits.shape[-1], weight, tau, scale, dataset_index, probabilities)

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.dataset_index]
        if self.probabilities is None:
            logits = model.teacher_logits(self.teacher, batch)[..., self.start : self.stop]
            target = _probabilities(logits, self.tau)
        else:
            target = self.probabilities[batch.index]
        student = (upcast(model.logits(batch)) / self.tau).log_softmax(-1)[..., self.start : self.stop]
        factor = self.weight * _factor(self.tau, self.scale)
        return -factor * (target * student).sum(-1).mean()

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        if dataset_index != self.dataset_index or self.probabilities is not None:
            return self
        logits = outputs(self.teacher)[..., self.start : self.stop]
        return replace(self, teacher={}, probabilities=_probabilities(logits, self.tau))


def _probabilities(logits: Tensor, tau: float) -> Tensor:
    return (upcast(logits.detach()) / tau).softmax(-1)


def soft_label_loss(
    logits: Tensor,
    data: Data,
    tau: float,
    weight: float = 1.0,
    *,
    start: int = 0,
    dataset_index: int = 0,
    scale: Scale = "none",
    num_outputs: int = 0,
) -> Loss:
    """Return weight * the mean cross-entropy with softmax(logits / tau), among the classes that the logits are of.

    For learning from predictions whose models are not at hand: predictions were sent, not weights.

    ``logits``: [n, classes] on all examples of ``data``, the first column of class ``start``. Probabilities p are
        passed as tau * ln p.
    ``tau``: The softmax temperature, of the student too.
    ``dataset_index``: Which of the data sets of `fit` it reads, from 0.
    ``scale``: Whether the loss is multiplied by tau squared.
    ``num_outputs``: How many outputs the student has, if its softmax shall run over all of them; 0 if it shall run over
        those alone that the logits are of.
    Returns: `ZERO_LOSS` if there is one class only and no other output competes with it.
    """
    if bool((impossible := logits == -torch.inf).any()):  # the kernel takes no probability of 0
        logits = upcast(logits)
        least = min(logits[~impossible].tolist(), default=0.0)
        logits = logits.masked_fill(impossible, least - 1e4 * tau)
    stop = start + logits.shape[1]
    if num_outputs > logits.shape[1]:
        return SubsetDistillation.from_logits(logits, start, weight, tau, scale, dataset_index=dataset_index)
    if logits.shape[1] == 1:
        return ZERO_LOSS
    # The full divergence does not depend on labels, but the kernel needs the same ones here and in training.
    labels = (data["label"] - start).clamp(0, stop - start - 1)
    term = Distillation((), FullKL(weight), tau, scale, dataset_index, teacher_entropy=False)
    return ClassSubset(term.cached(logits.unsqueeze(0), labels), start, stop, any_label=True)


@dataclass(frozen=True, eq=False)
class LogitMatching(Loss):
    """Mean over batch and classes of the squared difference of logits (Li and Wang, 2019, FedMD).

    ``logits``: [n, classes], what the student's logits shall become on data set ``dataset_index``.
    ``dataset_index``: Which of the data sets of `fit` it reads, from 0.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ("logits",)

    logits: Tensor
    dataset_index: int = 0

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.dataset_index]
        return (model.logits(batch) - self.logits[batch.index]).square().mean()


def _factor(tau: float, scale: Scale) -> float:
    return tau**2 if scale == "tau2" else 1.0


def _mean(losses: Tensor, log_weights: Tensor | None) -> Tensor:
    return losses.mean() if log_weights is None else (log_weights.softmax(0) * losses).sum()
