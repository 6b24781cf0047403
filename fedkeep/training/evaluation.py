"""Evaluation: class-wise counts of correct predictions, from which all metrics follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedkeep.interface import Data
from fedkeep.models import Weights
from fedkeep.training.context import ClientContext
from fedkeep.training.model_runner import BATCH


@dataclass(frozen=True)
class Counts:
    """How a model did on labelled images.

    Attributes
    ----------
    correct, total : list[int]
        Correct predictions and examples, by class.
    loss : float
        Mean cross-entropy.
    """

    correct: list[int]
    total: list[int]
    loss: float


def count_correct(context: ClientContext, model: Weights, data: Data) -> Counts:
    """Count a model's correct predictions by class; the first of a class's rows counts."""

    def predict(images: Tensor) -> Tensor:
        return context.runner.logits(model, context.normalise(images))[:, :: context.runner.rows]

    return count_predictions(predict, data, context.classes)


def count_predictions(predict: Callable[[Tensor], Tensor], data: Data, classes: int) -> Counts:
    """Count correct predictions by class, of a function from images to scores [n, classes]."""
    # Part by part: the whole test set, normalised in float32, would take four times the memory of its bytes.
    logits = torch.cat([predict(part) for part in torch.split(data["image"], BATCH)])
    labels = data["label"]
    hits = labels[logits.argmax(-1) == labels]
    return Counts(
        correct=torch.bincount(hits, minlength=classes).tolist(),
        total=torch.bincount(labels, minlength=classes).tolist(),
        loss=cross_entropy(logits.float(), labels).item(),
    )
