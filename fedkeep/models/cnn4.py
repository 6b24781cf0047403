"""CNN-4, the four-layer network of FedNTD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeep.models.base import Architecture, Network, Shape
from fedkeep.models.layers import Convolution, convolutional


@dataclass(frozen=True)
class CNN4(Architecture):
    """The four-layer network of FedNTD (Lee et al., 2022).

    Two padded 5x5 convolutions (32 and 64 maps), each with ReLU and 2x2 max-pooling, then 512 units and the classifier.
    2,156,490 parameters for 3x32x32 and 10 classes, 2,202,660 for 100; images from 4x4 pixels.
    """

    name: ClassVar[str] = "cnn4"

    def build(self, shape: Shape, classes: int) -> Network:
        """Return the network; see `Architecture.build`."""
        layers = (Convolution(32, 5, padding=2), Convolution(64, 5, padding=2))
        return convolutional(self.name, shape, classes, convolutions=layers, hidden=(512,))
