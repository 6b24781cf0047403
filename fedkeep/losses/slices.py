"""Losses among some of the classes: class-incremental learning has the usual terms, on a slice of the logits.

Cross-entropy among the new classes is ``Slice(CrossEntropy(), old)``, and distillation of the old ones
``Slice(Distillation(...), 0, old, any_label=True)``: classes outside do not compete, and their rows of the classifier
get no gradient. Where they shall compete, and a teacher knows some classes only, it is ``AmongAll(...)``. Classes are
numbered in order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fedkeep.data import Data
from fedkeep.losses.base import NOTHING, Answer, Batch, Objective, Student
from fedkeep.losses.decoupled import raised
from fedkeep.losses.distillation import Scale
from fedkeep.models import Weights

Head = Literal["joint", "sliced"]
"""Whether a student's softmax runs over all its outputs, old and new, or over old ones and new ones apart."""


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


@dataclass(frozen=True, eq=False)
class AmongAll(Objective):
    """Distillation from a model that knows some of the classes only, to a student in whom all classes compete.

    Mean over the batch of -weight * s * sum_c p_c ln q_c: p is the teacher's softmax among the classes ``start`` to
    ``stop - 1``, and zero elsewhere; q is the student's, among all its outputs. So a student with the sliced
    distribution inside, and outputs outside, still has a gradient, which lowers these.

    Attributes
    ----------
    teacher : the frozen model; empty where it has spoken.
    start, stop : the classes it speaks of.
    tau : the softmax temperature of both. scale : ``tau2`` makes s tau squared, ``none`` 1.
    on : the number of the data set that it reads.
    said : what the teacher said, p of all its examples, [n, stop - start]; None before it is asked.
    """

    columns: ClassVar[tuple[str, ...]] = ("said",)

    teacher: Weights
    start: int
    stop: int
    weight: float = 1.0
    tau: float = 1.0
    scale: Scale = "none"
    on: int = 0
    said: Tensor | None = None

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.on]
        if self.said is None:
            target = self.probabilities(student.frozen(self.teacher, batch)[..., self.start : self.stop])
        else:
            target = self.said[batch.index]
        own = (raised(student.logits(batch)) / self.tau).log_softmax(-1)[..., self.start : self.stop]
        factor = self.weight * (self.tau**2 if self.scale == "tau2" else 1.0)
        return -factor * (target * own).sum(-1).mean()

    def settle(self, answer: Answer, data: Data, on: int) -> Objective:
        if on != self.on or self.said is not None:
            return self
        return self.told(answer(self.teacher)[..., self.start : self.stop])

    def told(self, logits: Tensor) -> AmongAll:
        """Return the same with what was said: logits [n, stop - start] about all examples."""
        return replace(self, teacher={}, said=self.probabilities(logits))

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the softmax at the temperature, without gradient."""
        return (raised(logits.detach()) / self.tau).softmax(-1)


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
