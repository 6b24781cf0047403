"""Gradient compensation of GLFC (Dong et al., 2022): old and new classes count alike, whatever their examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fedkeep.losses.base import Batch, Objective, Student
from fedkeep.losses.decoupled import raised


@dataclass(frozen=True, eq=False)
class CompensatedEntropy(Objective):
    """Mean over the batch and the classes of binary cross-entropies to the labels, examples weighted as in GLFC's code.

    The weight of an example is g = 1 - sigmoid(its label's logit), divided by the mean g of the batch's examples of the
    first ``old`` classes or, for the others, by that of the others. No gradient flows through it. Before there are old
    classes all weigh the same.
    """

    old: int

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        logits, labels = raised(student.logits(batches[0])), batches[0].data["label"]
        # Not `one_hot`, which looks at the numbers and so cannot be computed for stacked clients.
        truth = (labels[:, None] == torch.arange(logits.shape[-1], device=labels.device)).to(logits.dtype)
        losses = binary_cross_entropy_with_logits(logits, truth, reduction="none").mean(-1)
        if not self.old:
            return losses.mean()
        missing = ((1 - logits.detach().sigmoid()) * truth).sum(-1)
        is_old = (labels < self.old).to(logits.dtype)
        weights = _by_mean(missing, is_old) + _by_mean(missing, 1 - is_old)
        return (weights * losses).mean()


def _by_mean(values: Tensor, members: Tensor) -> Tensor:
    """Return values [b] divided by their mean among ``members`` (1 or 0), and 0 elsewhere."""
    mean = (values * members).sum() / members.sum().clamp(min=1)
    return values * members / mean.clamp(min=torch.finfo(values.dtype).tiny)
