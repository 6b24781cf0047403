"""ResNet-18, 34 and 50 in the form for small images, with batch norm or group norm, and ResNet-32 for CIFAR."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn.functional import pad

from fedkeep.errors import ConfigError
from fedkeep.models.base import Architecture, Network, Shape, image_shape
from fedkeep.options import option

Norm = Literal["batch", "group"]

MAPS = (64, 128, 256, 512)
GROUPS = 32  # groups of group norm: its authors' default, which divides every number of maps here
SMALLEST = 8  # pixels: three stages halve the side, and from less the last convolutions would read mostly padding


class Residual(nn.Module):
    """A residual block: relu(branch(x) + shortcut(x)).

    ``maps``: Channels of the input, then of each convolution's output.
    ``kernels``: Kernel side of each convolution, in pixels; paddings keep the size where the stride is 1.
    ``strides``: Stride of each convolution, in pixels.
    ``norm``: What follows every convolution.
    ``pads``: Whether the shortcut of a block that changes the shape is a `PaddedShortcut` instead of a 1x1 convolution.
    """

    def __init__(
        self, maps: Sequence[int], kernels: Sequence[int], strides: Sequence[int], norm: Norm, pads: bool = False
    ) -> None:
        super().__init__()
        self.branch = nn.Sequential()
        steps = enumerate(zip(pairwise(maps), kernels, strides, strict=True), start=1)
        for number, ((before, after), kernel, stride) in steps:
            if number > 1:
                self.branch.add_module(f"relu{number - 1}", nn.ReLU())  # none after the last: ReLU follows the sum
            self.branch.add_module(f"conv{number}", convolution(before, after, kernel, stride))
            self.branch.add_module(f"norm{number}", normalisation(after, norm))
        self.shortcut: nn.Module = nn.Identity()
        stride = prod(strides)
        if stride > 1 or maps[0] != maps[-1]:
            self.shortcut = PaddedShortcut(maps[-1], stride) if pads else projection(maps[0], maps[-1], stride, norm)
        self.relu = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        """Apply the block.

        ``images``: Maps, [b, channels, height, width].
        Returns: Maps, [b, maps, height / stride, width / stride], with sides rounded up.
        """
        outputs: Tensor = self.relu(self.branch(images) + self.shortcut(images))
        return outputs


class PaddedShortcut(nn.Module):
    """A shortcut without weights: every ``stride``-th pixel, and zeros for additional maps.

    ``maps``: Number of output channels.
    ``stride``: Stride, in pixels.
    """

    def __init__(self, maps: int, stride: int) -> None:
        super().__init__()
        self.maps, self.stride = maps, stride

    def forward(self, images: Tensor) -> Tensor:
        """Apply the shortcut.

        ``images``: Maps, [b, channels, height, width].
        Returns: Maps, [b, maps, height / stride, width / stride], with sides rounded up.
        """
        images = images[..., :: self.stride, :: self.stride]
        return pad(images, (0, 0, 0, 0, 0, self.maps - images.shape[-3]))


@dataclass(frozen=True)
class ResNet(Architecture):
    """Base class of the residual networks of He et al. (2016), "Deep residual learning for image recognition".

    This is the form for small images, ResNet18_cifar10 and ResNet50_cifar10 in the code of MOON (Li et al., 2021): one
    3x3 convolution with stride 1 and no pooling, then four stages of 64, 128, 256 and 512 maps. Every stage but the
    first halves the side in its first block, where the shortcut is a 1x1 convolution. The classifier reads the mean
    over all pixels. Convolutions have no bias. MOON's code uses He's initialisation; here, as in the whole package,
    initial weights are PyTorch's default.

    Batch norm's running statistics are averaged like weights, and may fit no client if clients differ: a known weakness
    in federated learning (Hsieh et al., 2020, "The non-IID data quagmire of decentralized machine learning"). Group
    norm (Wu & He, 2018), which FedGKD uses, has no such statistics. Here it has the 32 groups of its authors for any
    number of maps; FedGKD's code fixes the number of maps in a group instead.

    ``bottleneck``: Whether a block is 1x1, 3x3, 1x1 with four times the maps at its end, instead of 3x3, 3x3.
    """

    maps: ClassVar[tuple[int, ...]] = MAPS
    blocks: ClassVar[tuple[int, ...]]
    bottleneck: ClassVar[bool]

    norm: Norm = option("batch", "batch norm, with running statistics, or group norm, without")

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        """
        channels, height, width = image_shape(self.name, shape)
        if min(height, width) < SMALLEST:
            raise ConfigError(
                f"{self.name} needs images of at least {SMALLEST}x{SMALLEST} pixels, and these are {height}x{width}. "
                "Use a model that halves them less often, or mlp, which takes any size."
            )
        body = nn.Sequential()
        body.add_module("conv", convolution(channels, self.maps[0], 3, 1))
        body.add_module("norm", normalisation(self.maps[0], self.norm))
        body.add_module("relu", nn.ReLU())
        before = self.maps[0]
        for number, (maps, blocks) in enumerate(zip(self.maps, self.blocks, strict=True), start=1):
            stage = nn.Sequential()
            for index in range(blocks):
                block = self._block(before, maps, 2 if number > 1 and index == 0 else 1)
                stage.append(block)
                before = 4 * maps if self.bottleneck else maps
            body.add_module(f"stage{number}", stage)
        body.add_module("pool", nn.AdaptiveAvgPool2d(1))
        body.add_module("flatten", nn.Flatten())
        return Network(body, before, classes)

    def _block(self, before: int, maps: int, stride: int) -> Residual:
        """Build a block from ``before`` channels to ``maps``, or to four times as many."""
        if self.bottleneck:
            return Residual((before, maps, maps, 4 * maps), (1, 3, 1), (1, stride, 1), self.norm)
        return Residual((before, maps, maps), (3, 3), (stride, 1), self.norm)


@dataclass(frozen=True)
class ResNet18(ResNet):
    """ResNet-18 for small images: two blocks of two 3x3 convolutions in each stage (see `ResNet`).

    11,173,962 parameters for 3x32x32 and 10 classes, 11,220,132 for 100; images from 8x8 pixels.
    """

    name: ClassVar[str] = "resnet18"
    blocks: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)
    bottleneck: ClassVar[bool] = False


@dataclass(frozen=True)
class ResNet34(ResNet):
    """ResNet-34 for small images: 3, 4, 6 and 3 blocks of two 3x3 convolutions in the stages (see `ResNet`).

    21,282,122 parameters for 3x32x32 and 10 classes, 21,328,292 for 100; images from 8x8 pixels.
    """

    name: ClassVar[str] = "resnet34"
    blocks: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)
    bottleneck: ClassVar[bool] = False


@dataclass(frozen=True)
class ResNet50(ResNet):
    """ResNet-50 for small images: 3, 4, 6 and 3 bottlenecks in the stages (see `ResNet`).

    A bottleneck is a 1x1, a 3x3 and a 1x1 convolution, the last with four times the maps; the 3x3 one has the stride,
    as in MOON's code, where the paper strides the first. 23,520,842 parameters for 3x32x32 and 10 classes, 23,705,252
    for 100; images from 8x8 pixels.
    """

    name: ClassVar[str] = "resnet50"
    blocks: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)
    bottleneck: ClassVar[bool] = True


@dataclass(frozen=True)
class ResNet32(ResNet):
    """ResNet-32 of He et al. (2016), section 4.2: three stages of 16, 32 and 64 maps, five blocks each (see `ResNet`).

    Its shortcuts have no weights: where a block halves the side and doubles the maps, they take every second pixel and
    add maps of zeros. 464,154 parameters for 3x32x32 and 10 classes, 470,004 for 100; with 1x1 convolutions as
    shortcuts, which fusion by optimal transport needs, 2,752 more. Images from 8x8 pixels.
    """

    name: ClassVar[str] = "resnet32"
    maps: ClassVar[tuple[int, ...]] = (16, 32, 64)
    blocks: ClassVar[tuple[int, ...]] = (5, 5, 5)
    bottleneck: ClassVar[bool] = False

    shortcut: Literal["padding", "projection"] = option(
        "padding", "shortcut where the number of maps doubles: maps of zeros, or a 1x1 convolution"
    )

    def check(self) -> None:
        """Refuse group norm, whose groups would contain less than one map."""
        if self.norm == "group":
            raise ConfigError(
                f"group norm has {GROUPS} groups here, and the first stage of {self.name} has {self.maps[0]} maps. "
                "Use norm=batch, or another ResNet."
            )

    def _block(self, before: int, maps: int, stride: int) -> Residual:
        return Residual((before, maps, maps), (3, 3), (stride, 1), self.norm, pads=self.shortcut == "padding")


def convolution(before: int, after: int, kernel: int, stride: int) -> nn.Conv2d:
    """Build a convolution without bias, since a norm follows; it keeps the size if the stride is 1.

    ``before``: Number of input channels.
    ``after``: Number of output channels.
    ``kernel``: Side of the kernel, in pixels.
    ``stride``: Stride, in pixels.
    """
    return nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)


def projection(before: int, after: int, stride: int, norm: Norm) -> nn.Sequential:
    """Build a shortcut with weights: a 1x1 convolution and its norm.

    ``before``: Number of input channels.
    ``after``: Number of output channels.
    ``stride``: Stride, in pixels.
    """
    return nn.Sequential(OrderedDict(conv=convolution(before, after, 1, stride), norm=normalisation(after, norm)))


def normalisation(maps: int, norm: Norm) -> nn.Module:
    """Build a norm."""
    return nn.BatchNorm2d(maps) if norm == "batch" else nn.GroupNorm(GROUPS, maps)
