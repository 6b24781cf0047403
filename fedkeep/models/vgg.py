"""VGG-16, the network of FedSKF on Tiny-ImageNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeep.models.base import Architecture, Network, Shape
from fedkeep.models.layers import Convolution, convolutional
from fedkeep.options import option

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # maps and convolutions; 2x2 max-pooling ends each


@dataclass(frozen=True)
class VGG16(Architecture):
    """VGG-16 of Simonyan & Zisserman (2015), configuration D, on small images.

    Thirteen padded 3x3 convolutions with 2x2 max-pooling after the second, fourth, seventh, tenth and thirteenth, then
    two hidden layers of 4096 units, which belong to the features, and the classifier. 40,708,104 parameters for
    3x64x64 and 200 classes, 40,716,552 with batch norm; images from 32x32 pixels.
    """

    name: ClassVar[str] = "vgg16"

    vgg_bn: bool = option(False, "batch norm after every convolution")
    dropout: float = option(0.5, "probability of dropping an output of a hidden layer, in training", low=0, high=1)

    def build(self, shape: Shape, classes: int) -> Network:
        """Return the network; see `Architecture.build`."""
        layers = [
            Convolution(maps, 3, padding=1, pool=(2, 2) if place == count else None, norm=self.vgg_bn)
            for maps, count in STAGES
            for place in range(1, count + 1)
        ]
        return convolutional(
            self.name,
            shape,
            classes,
            convolutions=layers,
            hidden=(4096, 4096),
            dropout=self.dropout,
            dropped="outputs",
        )
