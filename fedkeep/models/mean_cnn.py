"""Convolutions whose mean over all pixels the classifier reads: the networks for grey images of FedDCL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedkeep.errors import ConfigError
from fedkeep.models.base import Architecture, Network, Shape
from fedkeep.models.layers import Convolution, convolutional_body
from fedkeep.options import option


@dataclass(frozen=True)
class MeanCNN(Architecture):
    """Padded 3x3 convolutions with batch norm and ReLU, and a classifier that reads the mean over all pixels.

    FedDCL's grey images are learned by a four-layer and two different two-layer networks, whose layers are shown only
    in a figure; this is a reconstruction. Large: maps 32, 64, 128 and 128, as by default; medium: 32 and 64; small: 16
    and 32. 2x2 max-pooling after every second convolution. 242,250 parameters for 1x28x28 and 10 classes by default.
    """

    name: ClassVar[str] = "mean-cnn"

    maps: tuple[int, ...] = option((32, 64, 128, 128), "output channels of each convolution", low=1)
    pool_every: int = option(2, "2x2 max-pooling follows each so many convolutions", low=1)

    def check(self) -> None:
        """Refuse a network without convolutions."""
        if not self.maps:
            raise ConfigError(f"{self.name} needs at least one convolution: give maps, such as [16, 32].")

    def build(self, shape: Shape, classes: int) -> Network:
        """Return the network; see `Architecture.build`."""
        channels, height, width = shape
        smallest = 2 ** (len(self.maps) // self.pool_every)
        if min(height, width) < smallest:
            raise ConfigError(
                f"{self.name} needs images of at least {smallest}x{smallest} pixels, and these are {height}x{width}. "
                "Use fewer maps or a larger pool_every."
            )
        layers = [
            Convolution(maps, 3, padding=1, pool=(2, 2) if number % self.pool_every == 0 else None, norm=True)
            for number, maps in enumerate(self.maps, start=1)
        ]
        body = convolutional_body(channels, layers)
        body.add_module("mean", nn.AdaptiveAvgPool2d(1))
        body.add_module("flatten", nn.Flatten())
        return Network(body, self.maps[-1], classes)
