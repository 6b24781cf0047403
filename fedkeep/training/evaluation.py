"""Evaluation: correct predictions by class, from which all metrics are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

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
