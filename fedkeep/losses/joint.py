"""One forward pass for all data sets of a step, for networks whose answer about an image depends on its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedkeep.data import Data
from fedkeep.losses.base import Answer, Batch, Objective, Student
from fedkeep.models import Weights


@dataclass(frozen=True, eq=False)
class Joint(Objective):
    """A term whose student sees the images of all data sets at once, so that batch norm's statistics are of all.

    Without batch norm it is the term itself, up to rounding.
    """

    term: Objective

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        return self.term(_Joint(student, batches), batches)

    def settle(self, answer: Answer, data: Data, on: int) -> Objective:
        return replace(self, term=self.term.settle(answer, data, on))


class _Joint:
    """A student who is asked about several batches as one; frozen models are not."""

    def __init__(self, student: Student, batches: Sequence[Batch]) -> None:
        self.student = student
        self.images = [batch.data["image"] for batch in batches]
        # One batch object for all terms: by its images, a student knows what it has answered already.
        self.whole = Batch({"image": torch.cat(self.images)}, torch.cat([batch.index for batch in batches]))

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.student.weights

    def logits(self, batch: Batch) -> Tensor:
        return self._part(self.student.logits, batch)

    def features(self, batch: Batch) -> Tensor:
        return self._part(self.student.features, batch)

    def frozen(self, model: Weights, batch: Batch) -> Tensor:
        return self.student.frozen(model, batch)

    def frozen_features(self, model: Weights, batch: Batch) -> Tensor:
        return self.student.frozen_features(model, batch)

    def _part(self, ask: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """Return what is said of one of the batches; images that a term made itself are asked about alone."""
        for number, images in enumerate(self.images):
            if images is batch.data["image"]:
                return torch.split(ask(self.whole), [len(images) for images in self.images])[number]
        return ask(batch)
