"""LeNet-5, the network of sequential federated learning on Fashion-MNIST."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeep.models.base import Architecture, Network, Shape
from fedkeep.models.layers import Convolution, convolutional


@dataclass(frozen=True)
class LeNet5(Architecture):
    """LeNet-5 as in the code of Li & Lyu (2023), "Convergence analysis of sequential federated learning".

    Two 5x5 convolutions (6 and 16 maps), each with ReLU and 2x2 max-pooling, then 120 and 84 units and the classifier.
    44,426 parameters for 1x28x28 and 10 classes; images from 16x16 pixels.
    """

    name: ClassVar[str] = "lenet5"

    def build(self, shape: Shape, classes: int) -> Network:
        """Return the network; see `Architecture.build`."""
        return convolutional(
            self.name, shape, classes, convolutions=(Convolution(6, 5), Convolution(16, 5)), hidden=(120, 84)
        )
