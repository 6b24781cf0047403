"""CNN-LL, the network of sequential federated learning on CIFAR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeep.models.base import Architecture, Network, Shape
from fedkeep.models.layers import Convolution, convolutional


@dataclass(frozen=True)
class CNNLL(Architecture):
    """The CIFAR network in the code of Li & Lyu (2023), "Convergence analysis of sequential federated learning".

    Two 5x5 convolutions (64 maps each), each with ReLU and 2x2 max-pooling, then 384 and 192 units and the classifier.
    797,962 parameters for 3x32x32 and 10 classes, 815,332 for 100; images from 16x16 pixels.
    """

    name: ClassVar[str] = "cnn-ll"

    def build(self, shape: Shape, classes: int) -> Network:
        """Return the network; see `Architecture.build`."""
        return convolutional(
            self.name, shape, classes, convolutions=(Convolution(64, 5), Convolution(64, 5)), hidden=(384, 192)
        )
