"""The quality check: whether generated images show their classes, and whether a classifier can learn from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.data import Data

Classifier = Callable[[Tensor], Tensor]
"""Maps uint8 images [n, channels, height, width] to logits [n, classes]."""

TrainClassifier = Callable[[Data], Classifier]
"""Trains a classifier on labelled images, always in the same way."""


@dataclass(frozen=True, eq=False)
class QualityReport:
    """Accuracies of two classifiers by class, each float64 [classes]; NaN for a class without images.

    ``real``: Trained on real images, tested on real images: the reference.
    ``shown``: The same classifier, tested on generated images: do they show their classes?
    ``learned``: Trained on generated images, tested on real images: can one learn from them?
    """

    real: Tensor
    shown: Tensor
    learned: Tensor


def quality_check(
    train_classifier: TrainClassifier, train: Data, test: Data, generated: Data, num_classes: int
) -> QualityReport:
    """Return how good generated images are.

    ``train``: Real training images: ``"input"``, uint8 [n, channels, height, width], and ``"label"``, int64 [n].
    """
    reference = train_classifier(train)
    real, shown = (class_accuracies(reference, data, num_classes) for data in (test, generated))
    return QualityReport(real, shown, class_accuracies(train_classifier(generated), test, num_classes))


def class_accuracies(classifier: Classifier, data: Data, num_classes: int) -> Tensor:
    """Return the share of each class's images that are classified correctly, float64 [num_classes]."""
    labels = data["label"].cpu()
    correct = classifier(data["input"]).argmax(1).cpu() == labels
    total = torch.bincount(labels, minlength=num_classes).double()
    return torch.bincount(labels[correct], minlength=num_classes).double() / total
