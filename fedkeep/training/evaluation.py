"""Evaluation: class-wise counts, from which all metrics follow."""

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
    """How a model did on labelled images: ``correct`` and ``total`` by class, and the mean cross-entropy."""

    correct: list[int]
    total: list[int]
    loss: float


def count(place: ClientContext, model: Weights, data: Data) -> Counts:
    """Count a model's hits on labelled images, by class, each by the first of its rows."""

    def answer(images: Tensor) -> Tensor:
        return context.runner.logits(model, place.normalise(images))[:, :: context.runner.rows]

    return tally(answer, data, place.classes)


def tally(answer: Callable[[Tensor], Tensor], data: Data, classes: int) -> Counts:
    """Count hits on labelled images, by class, of whatever gives scores [n, classes] of images."""
    # Part by part: the whole test set, normalised in float32, would take four times the memory of its bytes.
    logits = torch.cat([answer(part) for part in torch.split(data["image"], BATCH)])
    labels = data["label"]
    hits = labels[logits.argmax(-1) == labels]
    return Counts(
        correct=torch.bincount(hits, minlength=classes).tolist(),
        total=torch.bincount(labels, minlength=classes).tolist(),
        loss=cross_entropy(logits.float(), labels).item(),
    )
