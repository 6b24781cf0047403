"""Learning from what was said, where the models that said it are not at hand: predictions travel, not weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep.data import Data
from fedkeep.losses.base import NOTHING, Batch, Objective, Student
from fedkeep.losses.distillation import Distillation, Scale
from fedkeep.losses.slices import AmongAll, Slice
from fedkeep.losses.weighting import Whole


def taught(
    said: Tensor,
    data: Data,
    tau: float,
    weight: float = 1.0,
    *,
    start: int = 0,
    on: int = 0,
    scale: Scale = "none",
    outputs: int = 0,
) -> Objective:
    """Return weight * the mean cross-entropy with softmax(said / tau), among the classes that are spoken of.

    Parameters
    ----------
    said : logits [n, classes] about all examples of ``data``, which is data set ``on``, the first of them about class
        ``start``. Probabilities p are passed as tau * ln p.
    tau : the temperature, of the student too.
    scale : whether it is multiplied by tau^2.
    outputs : how many the student has, if all shall compete; 0 for those alone that are spoken of.

    Of a class alone nothing can be said where no other competes: then it is `NOTHING`.
    """
    stop = start + said.shape[1]
    if outputs > said.shape[1]:
        return AmongAll({}, start, stop, weight, tau, scale, on).told(said)
    if said.shape[1] == 1:
        return NOTHING
    # The whole divergence does not depend on labels, but the kernel wants the same ones here and in training.
    labels = (data["label"] - start).clamp(0, stop - start - 1)
    term = Distillation(({},), Whole(weight), tau, scale=scale, on=on, form="ce")
    return Slice(term.settle(lambda model: said, {"label": labels}, on), start, stop, any_label=True)


@dataclass(frozen=True, eq=False)
class LogitMatching(Objective):
    """Mean over batch and classes of (z - said)^2, for logits ``said`` [n, classes] about data set ``on``."""

    columns: ClassVar[tuple[str, ...]] = ("said",)

    said: Tensor
    on: int = 0

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.on]
        return (student.logits(batch) - self.said[batch.index]).square().mean()
