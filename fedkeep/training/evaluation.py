"""Evaluation: correct predictions by class, from which all metrics are computed.

The check of losses rests on how models answer the examples that the server holds. A model is measured once, on a few
examples of each class. In a sequence the model before a hop is the one that was accepted after the last, so that a hop
costs one forward pass.
"""

import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fedkeep.interface import Data
from fedkeep.metrics import scores
from fedkeep.models import Weights
from fedkeep.training.context import ClientContext
from fedkeep.training.model_runner import BATCH


@dataclass(frozen=True)
class Counts:
    """The result of evaluating a model on labelled images.

    ``correct``: Number of correct predictions by class.
    ``total``: Number of examples by class.
    ``loss``: Mean cross-entropy.
    ``scores``: See `fedkeep.metrics.scores`; empty unless asked for.
    """

    correct: list[int]
    total: list[int]
    loss: float
    scores: Mapping[str, Any] = field(default_factory=dict)


def count_correct(context: ClientContext, model: Weights, data: Data, scored: bool = False) -> Counts:
    """Count a model's correct predictions by class, from the first classifier row of each class."""

    def predict(images: Tensor) -> Tensor:
        return context.runner.logits(model, context.normalise(images))[:, :: context.runner.rows_per_class]

    return count_predictions(predict, data, context.num_classes, scored)


def count_confusions(predict: Callable[[Tensor], Tensor], data: Data, classes: int) -> list[list[int]]:
    """Count how often each class was taken for each.

    ``predict``: Maps inputs as they are stored to scores, [n, classes].
    Returns: [classes, classes]: a row for each true class, a column for each predicted one.
    """
    predicted = torch.cat([predict(part).argmax(-1) for part in torch.split(data["input"], BATCH)])
    pairs = torch.bincount(data["label"] * classes + predicted, minlength=classes * classes)
    counts: list[list[int]] = pairs.reshape(classes, classes).tolist()
    return counts


def count_predictions(predict: Callable[[Tensor], Tensor], data: Data, classes: int, scored: bool = False) -> Counts:
    """Count correct predictions by class.

    ``predict``: Maps images as they are stored to scores, [n, classes].
    ``scored``: Whether other scores are measured too.
    """
    # In parts: the whole test set, normalised to float32, would take four times its memory.
    logits = torch.cat([predict(part) for part in torch.split(data["input"], BATCH)])
    labels = data["label"]
    hits = labels[logits.argmax(-1) == labels]
    return Counts(
        correct=torch.bincount(hits, minlength=classes).tolist(),
        total=torch.bincount(labels, minlength=classes).tolist(),
        loss=cross_entropy(logits.float(), labels).item(),
        scores=scores(labels.cpu(), logits.float().cpu()) if scored else {},
    )


KEPT = 64
"""Number of models whose measurements are kept: those of the last rounds, which may teach in the next."""
WORST = 1e9
"""The loss of an example on which a model's logits are not finite."""


@dataclass(frozen=True, eq=False)
class ClassScores:
    """How a model answers the examples of each class.

    ``logits``: Of each example, float32 [n, classes].
    ``labels``: Of each example, int64 [n].
    ``mean_of_class``: A row of weights for each class, whose product with a number for each example is the mean over
        the class, [classes, n].
    """

    logits: Tensor
    labels: Tensor
    mean_of_class: Tensor

    @cached_property
    def loss(self) -> Tensor:
        """Mean cross-entropy of each class, float32 [classes]; not a number for classes without examples."""
        losses = cross_entropy(self.logits, self.labels, reduction="none")
        # An example whose loss is not finite was measured all the same.
        return self.mean_of_class @ losses.nan_to_num_(WORST, WORST)

    @cached_property
    def correct(self) -> Tensor:
        """Share of correct answers of each class, alike."""
        return self.mean_of_class @ (self.logits.argmax(1) == self.labels).float()


class ModelCheck:
    """Measures models on the server's examples, each model once.

    ``per_class``: Most examples of each class that are used: the first ones.
    """

    def __init__(self, context: ClientContext, data: Data, per_class: int) -> None:
        self.context = context
        labels = data["label"]
        order = torch.sort(labels, stable=True).indices
        sizes = torch.bincount(labels, minlength=context.num_classes)
        place = torch.arange(len(labels), device=labels.device) - (sizes.cumsum(0) - sizes)[labels[order]]
        chosen = order[place < per_class]
        self._labels = labels[chosen]
        self._images = context.normalise(data["input"][chosen])
        member = one_hot(self._labels, context.num_classes).T.float()
        self._mean_of_class = member / member.sum(1, keepdim=True)
        self._known: dict[Hashable, tuple[list[weakref.ref[Tensor]], ClassScores]] = {}

    def scores(self, model: Weights) -> ClassScores:
        """Measure a model, unless its very tensors have been measured before."""
        key = tuple((id(tensor), tensor._version) for tensor in model.values())  # it may be changed in place
        references, scores = self._known.pop(key, ([], None))
        # An id may have gone to another tensor since.
        if scores is None or any(one() is not tensor for one, tensor in zip(references, model.values(), strict=True)):
            scores = self._measure(model)
        self._known[key] = [weakref.ref(tensor) for tensor in model.values()], scores
        if len(self._known) > KEPT:
            self._known.pop(next(iter(self._known)))
        return scores

    def _measure(self, model: Weights) -> ClassScores:
        with self.context.inference_time():
            runner = self.context.runner
            logits = runner.logits(model, self._images)[:, :: runner.rows_per_class]
            return ClassScores(logits, self._labels, self._mean_of_class)


def mean_of_labels(values: Tensor, counts: Tensor) -> float | None:
    """Return the mean of a value of each class, as it is on a client's examples.

    ``values``: A number for each class, [classes]; not a number for classes that were not measured.
    ``counts``: The client's label counts, [classes].
    Returns: The mean; None if none of the client's classes was measured.
    """
    told = zip(values.tolist(), counts.tolist(), strict=True)
    pairs = [(value, count) for value, count in told if count > 0 and value == value]
    total = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / total if pairs else None
