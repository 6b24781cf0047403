"""Distillation from frozen teachers, asked in every batch or once and for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedkeep.data import Data
from fedkeep.losses.base import NOTHING, Batch, Objective, Student
from fedkeep.losses.decoupled import Folded, decoupled_loss, fold, raised
from fedkeep.losses.weighting import ExampleRule, WeightRule
from fedkeep.models import Weights

Scale = Literal["tau2", "none"]
Form = Literal["kl", "ce"]


@dataclass(frozen=True, eq=False)
class Distillation(Objective):
    """Mean over the batch of s * sum_k (a_k TC_k + b_k NT_k), for teachers given as weights.

    Attributes
    ----------
    teachers : the frozen models; without any, nothing is distilled.
    rule : gives a and b.
    tau : the softmax temperature of teachers and student.
    scale : ``tau2`` multiplies by tau squared, so that the gradient keeps its size when tau changes (Hinton et al.,
    2015).
    on : the number of the data set that it reads.
    examples : weighs examples, so that the mean over a batch becomes a weighted mean; None for all alike.
    form : ``ce`` leaves the teachers' own entropies out, so that the whole divergence becomes the cross-entropy with
        their probabilities: another value, with the same gradient.
    """

    teachers: tuple[Weights, ...]
    rule: WeightRule
    tau: float = 1.0
    scale: Scale = "tau2"
    on: int = 0
    examples: ExampleRule | None = None
    form: Form = "kl"

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        # Only reached when images change from pass to pass (augmentation); otherwise `fit` settles the teachers first.
        batch = batches[self.on]
        own = student.logits(batch)
        if not self.teachers or own.shape[-1] == 1:  # a class alone is certain
            return own.new_zeros(())
        said = torch.stack([student.frozen(teacher, batch) for teacher in self.teachers])
        labels = batch.data["label"]
        losses = decoupled_loss(own, labels, self._fold(said, labels), self.tau)
        return self._factor * _mean(losses, self._weigh(said, labels))

    def settle(self, answer: Callable[[Weights], Tensor], data: Data, on: int) -> Objective:
        if on != self.on:
            return self
        if not self.teachers:
            return NOTHING
        said = torch.stack([answer(teacher) for teacher in self.teachers])
        if said.shape[-1] == 1:  # a class alone is certain, whatever the teachers say
            return NOTHING
        labels = data["label"]
        return Lesson(self._fold(said, labels), self.tau, self._factor, self.on, self._weigh(said, labels))

    def _fold(self, said: Tensor, labels: Tensor) -> Folded:
        said = raised(said)
        target, nontarget = self.rule(said, labels, self.tau)
        folded = fold(said, labels, target, nontarget, self.tau)
        return folded if self.form == "kl" else replace(folded, constant=torch.zeros_like(folded.constant))

    def _weigh(self, said: Tensor, labels: Tensor) -> Tensor | None:
        return None if self.examples is None else self.examples(raised(said), labels)

    @property
    def _factor(self) -> float:
        return self.tau**2 if self.scale == "tau2" else 1.0


@dataclass(frozen=True, eq=False)
class Lesson(Objective):
    """A distillation whose teachers have spoken: columns over the n examples of data set ``on``, times ``factor``."""

    columns: ClassVar[tuple[str, ...]] = ("folded", "weights")

    folded: Folded
    tau: float
    factor: float
    on: int = 0
    weights: Tensor | None = None  # logarithms of the examples' weights, [n]

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.on]
        said = Folded(
            self.folded.target[batch.index], self.folded.others[batch.index], self.folded.constant[batch.index]
        )
        losses = decoupled_loss(student.logits(batch), batch.data["label"], said, self.tau)
        return self.factor * _mean(losses, None if self.weights is None else self.weights[batch.index])


def _mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    return losses.mean() if weights is None else (weights.softmax(0) * losses).sum()
