"""Supervised contrast: features of one class near each other, and far from all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedkeep.losses.base import Batch, Objective, Student
from fedkeep.losses.decoupled import raised


@dataclass(frozen=True, eq=False)
class SupCon(Objective):
    """Mean over the batch, and over i's positives p, of -ln [e^{f_i.f_p/tau} / sum over a != i of e^{f_i.f_a/tau}].

    f are the student's features of data set ``on``, each of length 1; the positives of an example are the others of its
    class in the batch. One without any counts as 0. It is the loss L_out of Khosla et al. (2020), "Supervised
    contrastive learning", with one view of each image.
    """

    tau: float = 0.07
    on: int = 0

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.on]
        return contrast(student.features(batch), batch.data["label"], self.tau)


def contrast(features: Tensor, labels: Tensor, tau: float) -> Tensor:
    """Return the loss of features [b, width] with labels, int64 [b]: a scalar."""
    directions = normalize(raised(features), dim=-1)
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    # Not minus infinity: of an image alone in its batch there would be nothing to sum over.
    likeness = (directions @ directions.T / tau).masked_fill(itself, -1e9)
    positive = (labels.unsqueeze(0) == labels.unsqueeze(1)) & ~itself
    said = (likeness.log_softmax(-1) * positive).sum(-1)
    return -(said / positive.sum(-1).clamp(min=1)).mean()
