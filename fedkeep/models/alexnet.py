"""Two readings of "AlexNet-8", which SFedKD names for CIFAR-10 and CINIC-10 without giving its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeep.models.base import Architecture, Network, Shape
from fedkeep.models.layers import Convolution, convolutional
from fedkeep.options import option


@dataclass(frozen=True)
class AlexNet8(Architecture):
    """AlexNet for 32x32 images: five 3x3 convolutions, two hidden layers of 4096 units, and the classifier.

    SFedKD names an "AlexNet-8" and does not give its layers; this is a reconstruction after the form that is common
    for CIFAR. The convolutions have 64, 192, 384, 256 and 256 maps, padding 1, the first stride 2, and 2x2 max-pooling
    after the first, second and fifth. 23,272,266 parameters for 3x32x32 and 10 classes; images from 15x15 pixels.
    """

    name: ClassVar[str] = "alexnet8"

    dropout: float = option(0.5, "probability of dropping an input of a hidden layer, in training", low=0, high=1)

    def build(self, shape: Shape, classes: int) -> Network:
        """Return the network; see `Architecture.build`."""
        layers = (
            Convolution(64, 3, stride=2, padding=1),
            Convolution(192, 3, padding=1),
            Convolution(384, 3, padding=1, pool=None),
            Convolution(256, 3, padding=1, pool=None),
            Convolution(256, 3, padding=1),
        )
        return convolutional(self.name, shape, classes, convolutions=layers, hidden=(4096, 4096), dropout=self.dropout)


@dataclass(frozen=True)
class AlexNet8USFC(Architecture):
    """The other reading: one 11x11, one 7x7 and three 3x3 convolutions, two hidden layers, and the classifier.

    Papers of SFedKD's university describe an "8-layer AlexNet" in these words and as about 130 MB large. Kernel sizes
    and the number of layers are theirs. All else is a reconstruction: the maps (96, 256, 384, 384, 256), the 4096 units
    of the hidden layers, dropout, and the 3x3 max-pooling with stride 2 after the first, second and fifth convolution
    are those of Krizhevsky et al. (2012); stride 1 and paddings that keep the size (5, 3, 1, 1, 1) let 32x32 images in.
    30,600,586 parameters (122 MB) for 3x32x32 and 10 classes; images from 15x15 pixels.
    """

    name: ClassVar[str] = "alexnet8-usfc"

    dropout: float = option(0.5, "probability of dropping an input of a hidden layer, in training", low=0, high=1)

    def build(self, shape: Shape, classes: int) -> Network:
        """Return the network; see `Architecture.build`."""
        layers = (
            Convolution(96, 11, padding=5, pool=(3, 2)),
            Convolution(256, 7, padding=3, pool=(3, 2)),
            Convolution(384, 3, padding=1, pool=None),
            Convolution(384, 3, padding=1, pool=None),
            Convolution(256, 3, padding=1, pool=(3, 2)),
        )
        return convolutional(self.name, shape, classes, convolutions=layers, hidden=(4096, 4096), dropout=self.dropout)
