"""Distillation from frozen teachers, whose outputs are computed in every batch or cached once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedkeep.data import Data
from fedkeep.losses.base import ZERO_LOSS, Batch, Loss, ModelView, TeacherOutputs
from fedkeep.losses.decoupled import MergedTeachers, decoupled_loss, merge, upcast
from fedkeep.losses.weight_rules import ExampleWeighting, FullKL, PerTeacher, WeightRule
from fedkeep.losses.wrappers import ClassSubset
from fedkeep.models import Weights

Scale = Literal["tau2", "none"]
Head = Literal["joint", "sliced"]
"""Whether a student's softmax runs over all its outputs, or over those of old and of new classes apart."""


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
    dataset : int
        The number of the data set that this loss reads.
    example_weights : ExampleWeighting or None
        Weighs examples, so that the mean over a batch becomes a weighted mean. None weighs all alike.
    teacher_entropy : bool
        False leaves the teachers' own entropies out, so that the full divergence becomes the cross-entropy with their
        probabilities: another value, with the same gradient.
    """

    teachers: tuple[Weights, ...]
    rule: WeightRule
    tau: float = 1.0
    scale: Scale = "tau2"
    dataset: int = 0
    example_weights: ExampleWeighting | None = None
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

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        # Only reached when images change from epoch to epoch (augmentation); otherwise `fit` caches the teachers first.
        batch = batches[self.dataset]
        student = model.logits(batch)
        if not self.teachers or student.shape[-1] == 1:  # with one class its probability is 1 in every model
            return student.new_zeros(())
        logits = torch.stack([model.teacher_logits(teacher, batch) for teacher in self.teachers])
        labels = batch.data["label"]
        merged = _merged(logits, labels, self.rule, self.tau, self.teacher_entropy)
        losses = decoupled_loss(student, labels, merged, self.tau)
        return _factor(self.tau, self.scale) * _mean(losses, _log_weights(logits, labels, self.example_weights))

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset: int) -> Loss:
        if dataset != self.dataset:
            return self
        if not self.teachers:
            return ZERO_LOSS
        return CachedDistillation.from_logits(
            torch.stack([outputs(teacher) for teacher in self.teachers]),
            data["label"],
            self.rule,
            self.tau,
            self.scale,
            dataset=self.dataset,
            example_weights=self.example_weights,
            teacher_entropy=self.teacher_entropy,
        )


@dataclass(frozen=True, eq=False)
class CachedDistillation(Loss):
    """A distillation whose teachers' outputs are columns over the n examples of a data set.

    `from_logits` builds it.

    Attributes
    ----------
    teachers : MergedTeachers
        Of all n examples.
    tau : float
        The softmax temperature of the student.
    factor : float
        Factor on the mean.
    dataset : int
        The number of the data set that this loss reads.
    log_weights : Tensor or None
        [n], logarithms of the examples' weights. None weighs all alike.
    """

    columns: ClassVar[tuple[str, ...]] = ("teachers", "log_weights")

    teachers: MergedTeachers
    tau: float
    factor: float
    dataset: int = 0
    log_weights: Tensor | None = None

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        labels: Tensor,
        rule: WeightRule,
        tau: float = 1.0,
        scale: Scale = "tau2",
        *,
        dataset: int = 0,
        example_weights: ExampleWeighting | None = None,
        teacher_entropy: bool = True,
    ) -> Loss:
        """Return the distillation from teachers of whom only the logits are at hand.

        Parameters
        ----------
        logits : Tensor
            [k, n, classes], of k teachers on all n examples.
        labels : Tensor
            int64 [n].
        rule, tau, scale, dataset, example_weights, teacher_entropy
            As in `Distillation`.

        Returns
        -------
        Loss
            `ZERO_LOSS` if there is one class only: its probability is 1 in every model.
        """
        if logits.shape[-1] == 1:
            return ZERO_LOSS
        merged = _merged(logits, labels, rule, tau, teacher_entropy)
        log_weights = _log_weights(logits, labels, example_weights)
        return cls(merged, tau, _factor(tau, scale), dataset, log_weights)

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.dataset]
        rows = MergedTeachers(
            self.teachers.target[batch.index], self.teachers.others[batch.index], self.teachers.constant[batch.index]
        )
        losses = decoupled_loss(model.logits(batch), batch.data["label"], rows, self.tau)
        return self.factor * _mean(losses, None if self.log_weights is None else self.log_weights[batch.index])


@dataclass(frozen=True, eq=False)
class JointHeadDistillation(Loss):
    """Distillation from a model that knows some of the classes only, to a student in whom all classes compete.

    Mean over the batch of -weight * s * sum_c p_c ln q_c: p is the teacher's softmax among the classes ``start`` to
    ``stop - 1``, and zero elsewhere; q is the student's, over all its outputs. So a student whose distribution inside
    the range is the teacher's, and that has outputs outside, still has a gradient, which lowers these.

    Attributes
    ----------
    teacher : Weights
        The frozen model; empty once its outputs are cached.
    start, stop : int
        The classes that the teacher knows.
    weight : float
        Factor on the loss.
    tau : float
        The softmax temperature of both.
    scale : {"tau2", "none"}
        Whether s is tau squared or 1.
    dataset : int
        The number of the data set that this loss reads.
    probabilities : Tensor or None
        [n, stop - start], p of all examples of the data set, once it is cached.
    """

    columns: ClassVar[tuple[str, ...]] = ("probabilities",)

    teacher: Weights
    start: int
    stop: int
    weight: float = 1.0
    tau: float = 1.0
    scale: Scale = "none"
    dataset: int = 0
    probabilities: Tensor | None = None

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.dataset]
        if self.probabilities is None:
            target = self._softmax(model.teacher_logits(self.teacher, batch)[..., self.start : self.stop])
        else:
            target = self.probabilities[batch.index]
        log_q = (upcast(model.logits(batch)) / self.tau).log_softmax(-1)[..., self.start : self.stop]
        factor = self.weight * _factor(self.tau, self.scale)
        return -factor * (target * log_q).sum(-1).mean()

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset: int) -> Loss:
        if dataset != self.dataset or self.probabilities is not None:
            return self
        return self.with_logits(outputs(self.teacher)[..., self.start : self.stop])

    def with_logits(self, logits: Tensor) -> JointHeadDistillation:
        """Return the same loss with the teacher's outputs in the place of the teacher.

        Parameters
        ----------
        logits : Tensor
            [n, stop - start], on all examples of the data set.

        Returns
        -------
        JointHeadDistillation
        """
        return replace(self, teacher={}, probabilities=self._softmax(logits))

    def _softmax(self, logits: Tensor) -> Tensor:
        return (upcast(logits.detach()) / self.tau).softmax(-1)


def soft_label_loss(
    logits: Tensor,
    data: Data,
    tau: float,
    weight: float = 1.0,
    *,
    start: int = 0,
    dataset: int = 0,
    scale: Scale = "none",
    outputs: int = 0,
) -> Loss:
    """Return weight * s * the mean cross-entropy with softmax(logits / tau).

    For learning from predictions whose models are not at hand: predictions were sent, not weights.

    Parameters
    ----------
    logits : Tensor
        [n, classes] on all examples of ``data``, the first column of class ``start``. Probabilities p are passed as
        tau * ln p.
    data : Data
        The data set.
    tau : float
        The softmax temperature, of the student too.
    weight : float
        Factor on the cross-entropy.
    start : int
        The first class.
    dataset : int
        The number of the data set.
    scale : {"tau2", "none"}
        Whether s is tau squared or 1.
    outputs : int
        How many outputs the student has, if all shall compete; 0 if only the classes that the logits are of shall.

    Returns
    -------
    Loss
        `ZERO_LOSS` if there is one class only, and no other competes.
    """
    stop = start + logits.shape[1]
    if outputs > logits.shape[1]:
        return JointHeadDistillation({}, start, stop, weight, tau, scale, dataset).with_logits(logits)
    if logits.shape[1] == 1:
        return ZERO_LOSS
    # The full divergence does not depend on labels, but the kernel needs the same ones here and in training.
    labels = (data["label"] - start).clamp(0, stop - start - 1)
    term = CachedDistillation.from_logits(
        logits.unsqueeze(0), labels, FullKL(weight), tau, scale, dataset=dataset, teacher_entropy=False
    )
    return ClassSubset(term, start, stop, any_label=True)


@dataclass(frozen=True, eq=False)
class LogitMatching(Loss):
    """Mean over batch and classes of the squared difference of logits (Li and Wang, 2019, FedMD).

    Attributes
    ----------
    logits : Tensor
        [n, classes], what the student's logits shall become on data set ``dataset``.
    dataset : int
        The number of the data set.
    """

    columns: ClassVar[tuple[str, ...]] = ("logits",)

    logits: Tensor
    dataset: int = 0

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.dataset]
        return (model.logits(batch) - self.logits[batch.index]).square().mean()


def _merged(logits: Tensor, labels: Tensor, rule: WeightRule, tau: float, teacher_entropy: bool) -> MergedTeachers:
    logits = upcast(logits)
    target, nontarget = rule(logits, labels, tau)
    merged = merge(logits, labels, target, nontarget, tau)
    return merged if teacher_entropy else replace(merged, constant=torch.zeros_like(merged.constant))


def _log_weights(logits: Tensor, labels: Tensor, weighting: ExampleWeighting | None) -> Tensor | None:
    return None if weighting is None else weighting(upcast(logits), labels)


def _factor(tau: float, scale: Scale) -> float:
    return tau**2 if scale == "tau2" else 1.0


def _mean(losses: Tensor, log_weights: Tensor | None) -> Tensor:
    return losses.mean() if log_weights is None else (log_weights.softmax(0) * losses).sum()
