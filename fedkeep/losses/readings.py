"""Decoupled distillation as others may have read or written it: kept to test claims about it, not to be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from fedkeep.data import Data
from fedkeep.losses.base import Answer, Batch, Objective, Student
from fedkeep.losses.decoupled import log_split, raised
from fedkeep.models import Weights

TargetReading = Literal["binary", "single_term", "single_term_xC", "full_kl"]
Mask = Literal["gather", "additive", "zero_logit"]


def target_part(teacher: Tensor, student: Tensor, labels: Tensor, reading: TargetReading) -> Tensor:
    """Return the target part as read, [b], at temperature 1, from logits [b, classes].

    ``binary``: the divergence of (p_y, q_y), TC (Zhao et al., 2022). ``single_term``: its first term alone, p_y^T
    ln(p_y^T / p_y^S), which may be negative. ``single_term_xC``: that, once for each class, as a sum over classes of
    something without a class may be read. ``full_kl``: the whole divergence.
    """
    if reading == "full_kl":
        return kl_div(log_softmax(student, -1), log_softmax(teacher, -1), reduction="none", log_target=True).sum(-1)
    said, own = log_split(teacher, labels, 1.0), log_split(student, labels, 1.0)
    term = said.target.exp() * (said.target - own.target)
    if reading == "binary":
        return term + said.rest.exp() * (said.rest - own.rest)
    return term * teacher.shape[-1] if reading == "single_term_xC" else term


def nontarget_part(teacher: Tensor, student: Tensor, labels: Tensor, mask: Mask) -> Tensor:
    """Return the non-target part with the target masked in some way, [b], at temperature 1, from logits [b, classes].

    ``gather``: the target's logit is removed, NT. ``additive``: 1,000 is subtracted from it, as in the code of
    decoupled distillation; the same in float32. ``zero_logit``: it is set to 0, and so stays in the softmax.
    """
    if mask == "gather":
        said, own = log_split(teacher, labels, 1.0), log_split(student, labels, 1.0)
        spread = said.others.exp().scatter(-1, labels.unsqueeze(-1), 0.0)
        return (spread * (said.others - own.others)).sum(-1)
    is_target = torch.arange(teacher.shape[-1], device=labels.device) == labels.unsqueeze(-1)
    masked = [
        logits.masked_fill(is_target, 0.0) if mask == "zero_logit" else logits - 1000.0 * is_target
        for logits in (student, teacher)
    ]
    own_log, said_log = (log_softmax(logits, -1) for logits in masked)
    return kl_div(own_log, said_log, reduction="none", log_target=True).sum(-1)


@dataclass(frozen=True, eq=False)
class ReadDistillation(Objective):
    """Mean over the batch of w_target * `target_part` + w_nontarget * `nontarget_part`, taught by one model."""

    teacher: Weights
    w_target: float
    w_nontarget: float
    target: TargetReading = "binary"
    mask: Mask = "gather"

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        return self.loss(student.frozen(self.teacher, batches[0]), student.logits(batches[0]), batches[0].data["label"])

    def settle(self, answer: Answer, data: Data, on: int) -> Objective:
        return self if on else SettledReading(replace(self, teacher={}), answer(self.teacher))

    def loss(self, teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, a scalar, from logits [b, classes]."""
        teacher, student = raised(teacher), raised(student)
        if student.shape[-1] == 1:  # a class alone is certain
            return student.new_zeros(())
        target = self.w_target * target_part(teacher, student, labels, self.target)
        return (target + self.w_nontarget * nontarget_part(teacher, student, labels, self.mask)).mean()


@dataclass(frozen=True, eq=False)
class SettledReading(Objective):
    """The same, with the teacher's logits as a column [n, classes] over the first data set."""

    columns: ClassVar[tuple[str, ...]] = ("said",)

    reading: ReadDistillation
    said: Tensor

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[0]
        return self.reading.loss(self.said[batch.index], student.logits(batch), batch.data["label"])
