"""Evaluation: class-wise counts, from which all metrics follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedkeep.engine.networks import Networks
from fedkeep.models import Weights


@dataclass(frozen=True)
class Counts:
    """How a model did on labelled images: ``correct`` and ``total`` by class, and the mean cross-entropy."""

    correct: list[int]
    total: list[int]
    loss: float


def count(networks: Networks, model: Weights, images: Tensor, labels: Tensor, classes: int) -> Counts:
    """Count a model's hits on normalised images [n, ...] with labels [n], by class."""
    logits = networks.logits(model, images)
    labels = labels.to(logits.device)
    hits = labels[logits.argmax(-1) == labels]
    return Counts(
        correct=torch.bincount(hits, minlength=classes).tolist(),
        total=torch.bincount(labels, minlength=classes).tolist(),
        loss=cross_entropy(logits.float(), labels).item(),
    )
