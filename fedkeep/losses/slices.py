"""Losses among some of the classes: class-incremental learning has the usual terms, on a slice of the logits.

Cross-entropy among the new classes is ``Slice(CrossEntropy(), old)``, and distillation of the old ones
``Slice(Distillation(...), 0, old, any_label=True)``: classes outside do not compete, and their rows of the classifier
get no gradient. Classes are numbered in order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedkeep.data import Data
from fedkeep.losses.base import NOTHING, Answer, Batch, Objective, Student
from fedkeep.models import Weights


@dataclass(frozen=True, eq=False)
class Slice(Objective):
    """An objective that sees the logits of classes ``start`` to ``stop - 1`` only, and numbers them from 0.

    Attributes
    ----------
    term : what is computed on the slice.
    start, stop : the classes; None means up to the last.
    any_label : whether examples of other classes take part, which needs a ``stop``. Their label becomes the nearest
        inside: for terms that do not look at labels, such as the whole divergence from a teacher.
    """

    term: Objective
    start: int = 0
    stop: int | None = None
    any_label: bool = False

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        if self._is_certain:
            return next(iter(student.weights.values())).new_zeros(())
        # The images stay the same tensors: by them, a student knows what it has answered already.
        seen = [replace(batch, data=self._relabelled(batch.data)) for batch in batches]
        return self.term(_Cut(student, slice(self.start, self.stop)), seen)

    def settle(self, answer: Answer, data: Data, on: int) -> Objective:
        if self._is_certain:
            return NOTHING
        said = _CutAnswer(answer, slice(self.start, self.stop))
        return replace(self, term=self.term.settle(said, self._relabelled(data), on))

    @property
    def _is_certain(self) -> bool:
        """Whether there is one class only, which has probability 1 whatever the logits."""
        return self.stop is not None and self.stop - self.start == 1

    def _relabelled(self, data: Data) -> Data:
        if "label" not in data:
            return data
        label = data["label"] - self.start
        if self.any_label and self.stop is not None:
            label = label.clamp(0, self.stop - self.start - 1)
        return {**data, "label": label}


@dataclass(frozen=True, eq=False)
class Scaled(Objective):
    """A term times a ``factor``."""

    factor: float
    term: Objective

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        return self.factor * self.term(student, batches)

    def settle(self, answer: Answer, data: Data, on: int) -> Objective:
        term = self.term.settle(answer, data, on)
        return NOTHING if term is NOTHING else replace(self, term=term)


@dataclass(frozen=True)
class _Cut:
    """A student of whose logits, and those of its teachers, only some are seen."""

    student: Student
    classes: slice

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.student.weights

    def logits(self, batch: Batch) -> Tensor:
        return self.student.logits(batch)[..., self.classes]

    def features(self, batch: Batch) -> Tensor:
        return self.student.features(batch)

    def frozen(self, model: Weights, batch: Batch) -> Tensor:
        return self.student.frozen(model, batch)[..., self.classes]

    def frozen_features(self, model: Weights, batch: Batch) -> Tensor:
        return self.student.frozen_features(model, batch)


@dataclass(frozen=True)
class _CutAnswer:
    """The same of answers about a whole data set."""

    answer: Answer
    classes: slice

    def __call__(self, model: Weights) -> Tensor:
        return self.answer(model)[..., self.classes]

    def features(self, model: Weights) -> Tensor:
        return self.answer.features(model)

    def about(self, data: Data) -> Answer:
        return replace(self, answer=self.answer.about(data))
