"""The plain convolutional networks of the papers: LeNet-5, SimpleCNN, CNN-4, CNN-LL, MeanCNN, AlexNet-8 and VGG-16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedkeep.errors import ConfigError
from fedkeep.models.base import Architecture, Network, Shape, image_shape
from fedkeep.models.layers import Convolution, convolutional, convolutional_body
from fedkeep.options import option


@dataclass(frozen=True)
class LeNet5(Architecture):
    """LeNet-5 as in the code of Li & Lyu (2023), "Convergence analysis of sequential federated learning".

    Two 5x5 convolutions (6 and 16 maps), each with ReLU and 2x2 max-pooling, then 120 and 84 units and the classifier.
    44,426 parameters for 1x28x28 and 10 classes; images from 16x16 pixels.
    """

    name: ClassVar[str] = "lenet5"

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        """
        return convolutional(
            self.name, shape, classes, convolutions=(Convolution(6, 5), Convolution(16, 5)), hidden=(120, 84)
        )


@dataclass(frozen=True)
class SimpleCNN(LeNet5):
    """The "SimpleCNN" of FedCAD on CIFAR-10: LeNet-5's layers on colour images.

    Two 5x5 convolutions (6 and 16 maps), each with ReLU and 2x2 max-pooling, then 120 and 84 units and the classifier.
    62,006 parameters for 3x32x32 and 10 classes; images from 16x16 pixels.
    """

    name: ClassVar[str] = "simple-cnn"


@dataclass(frozen=True)
class CNN4(Architecture):
    """The four-layer network of FedNTD (Lee et al., 2022).

    Two padded 5x5 convolutions (32 and 64 maps), each with ReLU and 2x2 max-pooling, then 512 units and the classifier.
    2,156,490 parameters for 3x32x32 and 10 classes, 2,202,660 for 100; images from 4x4 pixels.
    """

    name: ClassVar[str] = "cnn4"

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        """
        layers = (Convolution(32, 5, padding=2), Convolution(64, 5, padding=2))
        return convolutional(self.name, shape, classes, convolutions=layers, hidden=(512,))


@dataclass(frozen=True)
class CNNLL(Architecture):
    """The CIFAR network in the code of Li & Lyu (2023), "Convergence analysis of sequential federated learning".

    Two 5x5 convolutions (64 maps each), each with ReLU and 2x2 max-pooling, then 384 and 192 units and the classifier.
    797,962 parameters for 3x32x32 and 10 classes, 815,332 for 100; images from 16x16 pixels.
    """

    name: ClassVar[str] = "cnn-ll"

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        """
        return convolutional(
            self.name, shape, classes, convolutions=(Convolution(64, 5), Convolution(64, 5)), hidden=(384, 192)
        )


@dataclass(frozen=True)
class MeanCNN(Architecture):
    """Padded 3x3 convolutions with batch norm and ReLU, and a classifier on the mean over all pixels.

    FedDCL trains grey images with a four-layer network and two different two-layer networks, whose layers are shown
    only in a figure; this is a reconstruction. Large: 32, 64, 128 and 128 maps, which is the default. Medium: 32 and
    64. Small: 16 and 32. There is 2x2 max-pooling after every second convolution. By default 242,250 parameters for
    1x28x28 and 10 classes.
    """

    name: ClassVar[str] = "mean-cnn"

    channels: tuple[int, ...] = option((32, 64, 128, 128), "output channels of each convolution", low=1)
    pool_every: int = option(2, "number of convolutions after which 2x2 max-pooling follows", low=1)

    def check(self) -> None:
        """Refuse a network without convolutions."""
        if not self.channels:
            raise ConfigError(f"{self.name} needs at least one convolution: give maps, such as [16, 32].")

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        """
        channels, height, width = image_shape(self.name, shape)
        smallest = 2 ** (len(self.channels) // self.pool_every)
        if min(height, width) < smallest:
            raise ConfigError(
                f"{self.name} needs images of at least {smallest}x{smallest} pixels, and these are {height}x{width}. "
                "Use fewer maps or a larger pool_every."
            )
        layers = [
            Convolution(maps, 3, padding=1, pool=(2, 2) if number % self.pool_every == 0 else None, norm=True)
            for number, maps in enumerate(self.channels, start=1)
        ]
        body = convolutional_body(channels, layers)
        body.add_module("mean", nn.AdaptiveAvgPool2d(1))
        body.add_module("flatten", nn.Flatten())
        return Network(body, self.channels[-1], classes)


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
        """Build the network.

        ``shape``: Channels, height and width of an image.
        """
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
    """Another reading of AlexNet-8: 11x11, 7x7 and three 3x3 convolutions, two hidden layers, and the classifier.

    Papers from SFedKD's university describe an "8-layer AlexNet" like this, with a size of about 130 MB. Kernel sizes
    and the number of layers are from there. All else is a reconstruction: maps (96, 256, 384, 384, 256), 4096 units in
    each hidden layer, dropout, and 3x3 max-pooling with stride 2 after the first, second and fifth convolution are
    those of Krizhevsky et al. (2012); stride 1 and paddings that keep the size (5, 3, 1, 1, 1) make 32x32 images
    possible. 30,600,586 parameters (122 MB) for 3x32x32 and 10 classes; images from 15x15 pixels.
    """

    name: ClassVar[str] = "alexnet8-usfc"

    dropout: float = option(0.5, "probability of dropping an input of a hidden layer, in training", low=0, high=1)

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        """
        layers = (
            Convolution(96, 11, padding=5, pool=(3, 2)),
            Convolution(256, 7, padding=3, pool=(3, 2)),
            Convolution(384, 3, padding=1, pool=None),
            Convolution(384, 3, padding=1, pool=None),
            Convolution(256, 3, padding=1, pool=(3, 2)),
        )
        return convolutional(self.name, shape, classes, convolutions=layers, hidden=(4096, 4096), dropout=self.dropout)


STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # maps and convolutions; 2x2 max-pooling ends each


@dataclass(frozen=True)
class VGG16(Architecture):
    """VGG-16 of Simonyan & Zisserman (2015), configuration D, on small images.

    Thirteen padded 3x3 convolutions with 2x2 max-pooling after the second, fourth, seventh, tenth and thirteenth, then
    two hidden layers of 4096 units, which belong to the features, and the classifier. 40,708,104 parameters for
    3x64x64 and 200 classes, 40,716,552 with batch norm; images from 32x32 pixels.
    """

    name: ClassVar[str] = "vgg16"

    batch_norm: bool = option(False, "batch norm after every convolution")
    dropout: float = option(0.5, "probability of dropping an output of a hidden layer, in training", low=0, high=1)

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        """
        layers = [
            Convolution(maps, 3, padding=1, pool=(2, 2) if number == count else None, norm=self.batch_norm)
            for maps, count in STAGES
            for number in range(1, count + 1)
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
