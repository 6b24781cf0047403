"""The quality gate: do generated images show their classes, and can one learn from them?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.data import Data

Classifier = Callable[[Tensor], Tensor]
"""Maps uint8 images [n, channels, height, width] to logits [n, classes]."""

Learn = Callable[[Data], Classifier]
"""Trains a classifier on images with labels, always in the same way."""


@dataclass(frozen=True, eq=False)
class Gate:
    """Accuracy by class of two classifiers, each float64 [classes]; NaN where there was no image.

    Attributes
    ----------
    real : trained on real images, asked about real test images: what the others can be compared with.
    shown : the same one, asked about generated images: do they show their classes?
    learned : trained on generated images, asked about real test images: can one learn from them?
    """

    real: Tensor
    shown: Tensor
    learned: Tensor


def quality_gate(learn: Learn, train: Data, test: Data, generated: Data, classes: int) -> Gate:
    """Return how good generated images are.

    Parameters
    ----------
    train, test, generated : ``"image"``, uint8 [n, channels, height, width], and ``"label"``, int64 [n].
    """
    judge = learn(train)
    real, shown = (class_accuracies(judge, data, classes) for data in (test, generated))
    return Gate(real, shown, class_accuracies(learn(generated), test, classes))


def class_accuracies(classifier: Classifier, data: Data, classes: int) -> Tensor:
    """Return the share of each class's images whose highest logit is their label's, float64 [classes]."""
    labels = data["label"].cpu()
    right = classifier(data["image"]).argmax(1).cpu() == labels
    total = torch.bincount(labels, minlength=classes).double()
    return torch.bincount(labels[right], minlength=classes).double() / total
