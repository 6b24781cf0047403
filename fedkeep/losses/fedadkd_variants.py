"""FedADKD's equation 3 in its readings: which target part, and how the target is kept out of the non-target part.

The paper prints one term under a sum over classes on which the term does not depend, and gives no code. The term alone
is FedADKD's default. Decoupled distillation's two-class divergence TC is in `fedkeep.losses.decoupled`, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from fedkeep.data import Data
from fedkeep.losses.base import Batch, Loss, ModelView, TeacherOutputs
from fedkeep.losses.decoupled import log_split, upcast
from fedkeep.models import Weights

TargetReading = Literal["binary", "single_term"]
Mask = Literal["gather", "additive", "zero_logit"]


def target_part(teacher: Tensor, student: Tensor, labels: Tensor, reading: TargetReading) -> Tensor:
    """Compute the target part in some reading, at temperature 1.

    ``teacher``, ``student``: [b, classes], logits.
    ``labels``: int64 [b].
    ``reading``: ``binary`` is the divergence of (p_y, q_y), TC (Zhao et al., 2022, eq. 5). ``single_term`` is its first
        term alone, p_y^T ln(p_y^T / p_y^S), which may be negative.
    Returns: [b].
    """
    fixed, trained = log_split(teacher, labels, 1.0), log_split(student, labels, 1.0)
    term = fixed.target.exp() * (fixed.target - trained.target)
    if reading == "binary":
        return term + fixed.rest.exp() * (fixed.rest - trained.rest)
    return term


def nontarget_part(teacher: Tensor, student: Tensor, labels: Tensor, mask: Mask) -> Tensor:
    """Compute the non-target part with the target masked in some way, at temperature 1.

    ``teacher``, ``student``: [b, classes], logits.
    ``labels``: int64 [b].
    ``mask``: ``gather`` removes the target's logit, which gives NT. ``additive`` subtracts 1,000 from it, as in the
        code of decoupled distillation; the same in float32. ``zero_logit`` sets it to 0, so that it stays in the
        softmax.
    Returns: [b].
    """
    if mask == "gather":
        fixed, trained = log_split(teacher, labels, 1.0), log_split(student, labels, 1.0)
        others = fixed.others.exp().scatter(-1, labels.unsqueeze(-1), 0.0)
        return (others * (fixed.others - trained.others)).sum(-1)
    is_target = torch.arange(teacher.shape[-1], device=labels.device) == labels.unsqueeze(-1)
    masked = [
        logits.masked_fill(is_target, 0.0) if mask == "zero_logit" else logits - 1000.0 * is_target
        for logits in (student, teacher)
    ]
    student_log, teacher_log = (log_softmax(logits, -1) for logits in masked)
    return kl_div(student_log, teacher_log, reduction="none", log_target=True).sum(-1)


@dataclass(frozen=True, eq=False)
class FedADKDVariant(Loss):
    """Mean over the batch of w_target * `target_part` + w_nontarget * `nontarget_part`, with one teacher.

    ``teacher``: The frozen model; empty once its outputs are cached.
    ``w_target``: [], the factor on the target part. It is a tensor since clients differ in it, and losses that differ
        only in tensors are trained as one stack.
    ``w_nontarget``: The factor on the non-target part.
    ``target``: Reading of the target part.
    ``mask``: How the target is kept out of the non-target part.
    ``logits``: [n, classes], the cached outputs on all examples of the first data set.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ("logits",)

    teacher: Weights
    w_target: Tensor
    w_nontarget: float
    target: TargetReading = "single_term"
    mask: Mask = "gather"
    logits: Tensor | None = None

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch, cached = batches[0], self.logits
        teacher = upcast(model.teacher_logits(self.teacher, batch) if cached is None else cached[batch.index])
        student, labels = upcast(model.logits(batch)), batch.data["label"]
        if student.shape[-1] == 1:  # with one class its probability is 1 in every model
            return student.new_zeros(())
        target = self.w_target * target_part(teacher, student, labels, self.target)
        return (target + self.w_nontarget * nontarget_part(teacher, student, labels, self.mask)).mean()

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        return self if dataset_index else replace(self, teacher={}, logits=outputs(self.teacher))
