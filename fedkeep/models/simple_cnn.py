"""SimpleCNN, the small network of federated learning on CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeep.models.lenet import LeNet5


@dataclass(frozen=True)
class SimpleCNN(LeNet5):
    """The "SimpleCNN" of FedCAD on CIFAR-10: LeNet-5's layers on colour images.

    Two 5x5 convolutions (6 and 16 maps), each with ReLU and 2x2 max-pooling, then 120 and 84 units and the classifier.
    62,006 parameters for 3x32x32 and 10 classes; images from 16x16 pixels.
    """

    name: ClassVar[str] = "simple-cnn"
