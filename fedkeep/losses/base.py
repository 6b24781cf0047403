"""What local training minimises, as values: `Loss`, and what a loss is given to compute itself.

A loss is a frozen dataclass of tensors and numbers, and a pure function of (model view, batches). Losses add up. Since
a loss is a value, it can be stored in a checkpoint, sent to a client, and stacked over clients; a closure could not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from torch import Tensor

from fedkeep.data import Data
from fedkeep.errors import ConfigError
from fedkeep.models import Weights


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of a data set that one training step sees.

    Attributes
    ----------
    data : Data
        The rows: images normalised and augmented, and the other columns, each of length b.
    index : Tensor
        int64 [b], the row numbers in the whole data set. A loss uses them to look up its own rows.
    """

    data: Data
    index: Tensor


class ModelView(Protocol):
    """The network in training, as a loss sees it."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The parameters by name. They require gradients."""

    def logits(self, batch: Batch) -> Tensor:
        """Return the network's logits [b, classes]; computed once per batch, however many losses ask."""

    def features(self, batch: Batch) -> Tensor:
        """Return the input of the classifier, [b, width], from the same forward pass as `logits`."""

    def teacher_logits(self, model: Weights, batch: Batch) -> Tensor:
        """Return the logits of a frozen model on the same images, in evaluation mode and without gradient."""

    def teacher_features(self, model: Weights, batch: Batch) -> Tensor:
        """Return the classifier's input of a frozen model on the same images, likewise."""


class TeacherOutputs(Protocol):
    """The outputs of frozen models on all examples of one data set."""

    def __call__(self, model: Weights) -> Tensor:
        """Return a model's logits [n, classes]."""

    def features(self, model: Weights) -> Tensor:
        """Return the input of its classifier, [n, width]."""

    def for_data(self, data: Data) -> TeacherOutputs:
        """Return the same models' outputs on another data set, such as the rotated images."""


@dataclass(frozen=True, eq=False)
class Loss(ABC):
    """One term, or a sum of terms, of a local loss.

    ``per_example_fields`` names the fields whose tensors hold one row per example of a data set; they are read only at
    a batch's ``index``. Clients whose losses differ only in the numbers inside tensors, and in the number of examples,
    can be trained side by side as one model.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        """Compute the loss of one step.

        Parameters
        ----------
        model : ModelView
            The network in training.
        batches : Sequence[Batch]
            One batch for each data set that `fit` was given. Most losses read the first.

        Returns
        -------
        Tensor
            A scalar: a mean over the batch or, for penalties, a function of the weights.
        """

    @property
    def compares_examples(self) -> bool:
        """Whether what an example adds depends on the others of its batch; DP-SGD, which takes each alone, refuses it.

        A loss that consists of others need not say so of them.
        """
        return False

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        """Replace frozen teachers by their outputs on all examples of a data set.

        Losses without teachers, and those that read another data set, return themselves.

        Parameters
        ----------
        outputs : TeacherOutputs
            ``outputs(model)`` are a model's logits [n, classes] on all of ``data``.
        data : Data
            The data set of index ``dataset_index``.
        dataset_index : int
            Which of the data sets of `fit` this is.

        Returns
        -------
        Loss
            The same loss, which no longer needs the teachers on this data set.
        """
        return self

    def __mul__(self, factor: float) -> Loss:
        """Return the loss times a number."""
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            return NotImplemented
        return Scaled(float(factor), self)

    __rmul__ = __mul__

    def __add__(self, other: Loss) -> Loss:
        check_loss(other)
        terms = (*_terms(self), *_terms(other))
        return terms[0] if len(terms) == 1 else Sum(terms)


@dataclass(frozen=True, eq=False)
class Scaled(Loss):
    """A term times a factor.

    Attributes
    ----------
    factor : float
        The factor.
    term : Loss
        The term.
    """

    factor: float
    term: Loss

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        return self.factor * self.term(model, batches)

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        term = self.term.cache_teachers(outputs, data, dataset_index)
        return ZERO_LOSS if term is ZERO_LOSS else replace(self, term=term)


@dataclass(frozen=True, eq=False)
class Sum(Loss):
    """A sum of losses, flat. The empty sum is `ZERO_LOSS`, and adding it changes nothing, not even rounding.

    ``terms``: The terms, none of which is itself a sum.
    """

    terms: tuple[Loss, ...] = ()

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        if not self.terms:
            raise ValueError("there is nothing to minimise: the loss is an empty sum")
        total: Tensor | None = None
        for term in self.terms:
            value = term(model, batches)
            check_scalar(value, term)
            total = value if total is None else total + value
        assert total is not None
        return total

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        return Sum(_terms(*(term.cache_teachers(outputs, data, dataset_index) for term in self.terms)))


ZERO_LOSS: Loss = Sum()


def check_loss(value: object) -> None:
    """Check that something is a loss."""
    if not isinstance(value, Loss):
        name = value.__name__ if isinstance(value, type) else type(value).__name__
        what = f"the class {name} itself: call it, {name}(...)" if isinstance(value, type) else f"a {name}"
        raise ConfigError(
            f"a loss of local training is an object of a subclass of fedkeep.losses.Loss, such as CrossEntropy(), not "
            f"{what}."
        )


def check_scalar(value: object, loss: Loss) -> None:
    """Check what a loss has computed; a number or a vector would train, and not as its author means."""
    if isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point():
        return
    name = type(loss).__name__
    if isinstance(value, Tensor):
        form = f"a tensor of shape {list(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
    else:
        form = "None" if value is None else f"a {type(value).__name__}, which has no gradient"
    raise ConfigError(
        f"the loss {name} must return a scalar tensor, such as the mean over the batch, and returned {form}. Look at "
        f"the last line of {name}.__call__."
    )


def _terms(*losses: Loss) -> tuple[Loss, ...]:
    return tuple(term for loss in losses for term in (loss.terms if isinstance(loss, Sum) else (loss,)))
