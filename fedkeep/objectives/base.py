"""Objectives: what a local training minimises, as values.

An objective is a frozen dataclass of tensors and numbers and a pure function of (student, batches). Objectives add up,
and what is a value can be checkpointed, sent, and later stacked over clients; a closure could not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from fedkeep.data import Data
from fedkeep.models import Weights


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of a data set that one step sees.

    Attributes
    ----------
    data : the drawn rows, images normalised and augmented; columns of length b.
    index : int64 [b], which rows of the whole data they are, so that an objective finds its own columns.
    """

    data: Data
    index: Tensor


class Student(Protocol):
    """The network in training, as an objective sees it."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The parameters by name, live: gradients flow into them."""

    def logits(self, batch: Batch) -> Tensor:
        """Return the network's logits [b, classes]; computed once per batch, however many objectives ask."""

    def features(self, batch: Batch) -> Tensor:
        """Return what the classifier reads, [b, width], in the same forward pass as `logits`."""

    def frozen(self, model: Weights, batch: Batch) -> Tensor:
        """Return the logits of another model on the same images, in evaluation mode and without gradient."""

    def frozen_features(self, model: Weights, batch: Batch) -> Tensor:
        """Return what another model's classifier reads, likewise."""


class Answer(Protocol):
    """Frozen models, asked about all of one data set."""

    def __call__(self, model: Weights) -> Tensor:
        """Return a model's logits [n, classes]."""

    def features(self, model: Weights) -> Tensor:
        """Return what its classifier reads, [n, width]."""

    def about(self, data: Data) -> Answer:
        """Return the same models' answers about another data set, such as these images turned."""


@dataclass(frozen=True, eq=False)
class Objective(ABC):
    """One term, or a sum of terms, of a local loss.

    ``columns`` names the fields whose tensors hold a row for each example of a data set, and are read only at a batch's
    ``index``. Clients whose objectives differ in nothing but numbers inside tensors, and in the length of columns, can
    be trained side by side as one model (`fedkeep.training.vmap_training`).
    """

    columns: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        """Return the loss, a scalar: a mean over the batch plus, for penalties, a function of the weights.

        ``batches`` holds one batch for each data set that `fit` was given; most objectives read the first.
        """

    def settle(self, answer: Answer, data: Data, on: int) -> Objective:
        """Replace frozen teachers by a column of what they say about ``data``, the data set of number ``on``.

        ``answer(model)`` gives a model's logits [n, classes] on all of ``data``. Objectives without teachers, and those
        that read another data set, return themselves.
        """
        return self

    def __add__(self, other: Objective) -> Objective:
        terms = (*_terms(self), *_terms(other))
        return terms[0] if len(terms) == 1 else Sum(terms)


@dataclass(frozen=True, eq=False)
class Sum(Objective):
    """A sum of objectives, flat. The empty sum is `NOTHING`, and adding it changes nothing, not even rounding."""

    terms: tuple[Objective, ...] = ()

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        if not self.terms:
            raise ValueError("there is nothing to minimise: the objective is an empty sum")
        total = self.terms[0](student, batches)
        for term in self.terms[1:]:
            total = total + term(student, batches)
        return total

    def settle(self, answer: Answer, data: Data, on: int) -> Objective:
        return Sum(_terms(*(term.settle(answer, data, on) for term in self.terms)))


NOTHING: Objective = Sum()


def _terms(*objectives: Objective) -> tuple[Objective, ...]:
    return tuple(
        term for objective in objectives for term in (objective.terms if isinstance(objective, Sum) else (objective,))
    )
