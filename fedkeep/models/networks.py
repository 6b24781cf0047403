"""The papers' networks: fully connected, convolutional, residual, and those that read token ids."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import prod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad

from fedkeep.errors import ConfigError
from fedkeep.models.base import Architecture, Network, Shape, image_shape
from fedkeep.options import option


class MaxPool2(nn.Module):
    """Max-pooling of 2x2 windows with stride 2; a last odd row or column is dropped.

    With the contiguous layout, PyTorch's CPU kernel visits the windows one by one, which takes most of a small
    network's forward pass. Where no gradient is needed (teachers, evaluation), this computes the maximum of strided
    views instead: the same numbers, vectorised. With channels last, as in training, PyTorch's kernel is vectorised
    itself.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Pool images.

        ``images``: Maps, [..., height, width].
        Returns: Maps, [..., height // 2, width // 2].
        """
        if images.is_cuda or torch.is_grad_enabled() or not images.is_contiguous():
            return max_pool2d(images, 2)
        height, width = images.shape[-2] // 2 * 2, images.shape[-1] // 2 * 2
        rows = torch.maximum(images[..., 0:height:2, :width], images[..., 1:height:2, :width])
        return torch.maximum(rows[..., 0::2], rows[..., 1::2])


@dataclass(frozen=True)
class Convolution:
    """A square convolution with ReLU, and the max-pooling after it.

    ``maps``: Number of output channels.
    ``kernel``: Side of the kernel, in pixels.
    ``stride``: Stride, in pixels.
    ``padding``: Padding, in pixels.
    ``pool``: Window and stride of the max-pooling, in pixels; None for no pooling.
    ``norm``: Whether batch norm follows the convolution.
    """

    maps: int
    kernel: int
    stride: int = 1
    padding: int = 0
    pool: tuple[int, int] | None = (2, 2)
    norm: bool = False

    def shrink(self, side: int) -> int:
        """Return the side of the output.

        ``side``: Side of the input, in pixels.
        Returns: Side of the output, in pixels; 0 if nothing is left.
        """
        if side < 1:
            return 0  # padding alone gives no output
        side = _windows(side + 2 * self.padding, self.kernel, self.stride)
        return side if self.pool is None else _windows(side, *self.pool)


def convolutional_body(channels: int, convolutions: Sequence[Convolution]) -> nn.Sequential:
    """Build the convolutions of a network, with their norms, poolings and ReLUs."""
    body, before = nn.Sequential(), channels
    for number, layer in enumerate(convolutions, start=1):
        body.add_module(f"conv{number}", nn.Conv2d(before, layer.maps, layer.kernel, layer.stride, layer.padding))
        if layer.norm:
            body.add_module(f"norm{number}", nn.BatchNorm2d(layer.maps))
        # Pooling before ReLU gives the same outputs and gradients, and ReLU has fewer numbers to process.
        if layer.pool is not None:
            body.add_module(f"pool{number}", MaxPool2() if layer.pool == (2, 2) else nn.MaxPool2d(*layer.pool))
        body.add_module(f"relu{number}", nn.ReLU())
        before = layer.maps
    return body


def flattened_side(convolutions: Sequence[Convolution], side: int) -> int:
    """Return the side of the last feature map.

    ``side``: Side of the image, in pixels.
    Returns: Side of the map, in pixels; 0 if nothing is left.
    """
    for layer in convolutions:
        side = layer.shrink(side)
    return side


def _windows(side: int, kernel: int, stride: int) -> int:
    """Return how many windows of ``kernel`` pixels with a stride of ``stride`` pixels fit into a side."""
    return (side - kernel) // stride + 1 if side >= kernel else 0


@dataclass(frozen=True)
class Convolutional(Architecture):
    """Base class of networks of convolutions, hidden layers with ReLU, and a classifier, sized for the images.

    ``hidden``: Units of each fully connected layer before the classifier.
    ``dropped``: What of a hidden layer is dropped with the probability ``dropout``, if there is this option.
    """

    convolutions: ClassVar[tuple[Convolution, ...]]
    hidden: ClassVar[tuple[int, ...]]
    dropped: ClassVar[Literal["inputs", "outputs"]] = "inputs"

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        """
        smallest = next(side for side in count(1) if flattened_side(self.convolutions, side))
        advice = "Use a model with less pooling, or mlp, which takes any size."
        channels, height, width = image_shape(self.name, shape, smallest, advice)
        body = convolutional_body(channels, self.convolutions)
        body.add_module("flatten", nn.Flatten())
        pixels = flattened_side(self.convolutions, height) * flattened_side(self.convolutions, width)
        widths = [self.convolutions[-1].maps * pixels, *self.hidden]
        dropout: float = getattr(self, "dropout", 0.0)
        for number, (before, after) in enumerate(pairwise(widths), start=len(self.convolutions) + 1):
            if dropout and self.dropped == "inputs":
                body.add_module(f"dropout{number}", nn.Dropout(dropout))
            body.add_module(f"full{number}", nn.Linear(before, after))
            body.add_module(f"relu{number}", nn.ReLU())
            if dropout and self.dropped == "outputs":
                body.add_module(f"dropout{number}", nn.Dropout(dropout))
        return Network(body, self.hidden[-1], classes)


@dataclass(frozen=True)
class LeNet5(Convolutional):
    """LeNet-5 as in the code of Li & Lyu (2023), "Convergence analysis of sequential federated learning".

    Two 5x5 convolutions (6 and 16 maps), each with ReLU and 2x2 max-pooling, then 120 and 84 units and the classifier.
    44,426 parameters for 1x28x28 and 10 classes; images from 16x16 pixels.
    """

    name: ClassVar[str] = "lenet5"
    convolutions = (Convolution(6, 5), Convolution(16, 5))
    hidden = (120, 84)


@dataclass(frozen=True)
class SimpleCNN(LeNet5):
    """The "SimpleCNN" of FedCAD on CIFAR-10: LeNet-5's layers on colour images.

    Two 5x5 convolutions (6 and 16 maps), each with ReLU and 2x2 max-pooling, then 120 and 84 units and the classifier.
    62,006 parameters for 3x32x32 and 10 classes; images from 16x16 pixels.
    """

    name: ClassVar[str] = "simple-cnn"


@dataclass(frozen=True)
class CNN4(Convolutional):
    """The four-layer network of FedNTD (Lee et al., 2022).

    Two padded 5x5 convolutions (32 and 64 maps), each with ReLU and 2x2 max-pooling, then 512 units and the classifier.
    2,156,490 parameters for 3x32x32 and 10 classes, 2,202,660 for 100; images from 4x4 pixels.
    """

    name: ClassVar[str] = "cnn4"
    convolutions = (Convolution(32, 5, padding=2), Convolution(64, 5, padding=2))
    hidden = (512,)


@dataclass(frozen=True)
class CNNLL(Convolutional):
    """The CIFAR network in the code of Li & Lyu (2023), "Convergence analysis of sequential federated learning".

    Two 5x5 convolutions (64 maps each), each with ReLU and 2x2 max-pooling, then 384 and 192 units and the classifier.
    797,962 parameters for 3x32x32 and 10 classes, 815,332 for 100; images from 16x16 pixels.
    """

    name: ClassVar[str] = "cnn-ll"
    convolutions = (Convolution(64, 5), Convolution(64, 5))
    hidden = (384, 192)


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
        smallest = 2 ** (len(self.channels) // self.pool_every)
        channels, _, _ = image_shape(self.name, shape, smallest, "Use fewer maps or a larger pool_every.")
        layers = [
            Convolution(maps, 3, padding=1, pool=(2, 2) if number % self.pool_every == 0 else None, norm=True)
            for number, maps in enumerate(self.channels, start=1)
        ]
        body = convolutional_body(channels, layers)
        body.add_module("mean", nn.AdaptiveAvgPool2d(1))
        body.add_module("flatten", nn.Flatten())
        return Network(body, self.channels[-1], classes)


@dataclass(frozen=True)
class AlexNet8(Convolutional):
    """AlexNet for 32x32 images: five 3x3 convolutions, two hidden layers of 4096 units, and the classifier.

    SFedKD names an "AlexNet-8" and does not give its layers; this is a reconstruction after the form that is common
    for CIFAR. The convolutions have 64, 192, 384, 256 and 256 maps, padding 1, the first stride 2, and 2x2 max-pooling
    after the first, second and fifth. 23,272,266 parameters for 3x32x32 and 10 classes; images from 15x15 pixels.
    """

    name: ClassVar[str] = "alexnet8"
    convolutions = (
        Convolution(64, 3, stride=2, padding=1),
        Convolution(192, 3, padding=1),
        Convolution(384, 3, padding=1, pool=None),
        Convolution(256, 3, padding=1, pool=None),
        Convolution(256, 3, padding=1),
    )
    hidden = (4096, 4096)

    dropout: float = option(0.5, "probability of dropping an input of a hidden layer, in training", low=0, high=1)


@dataclass(frozen=True)
class AlexNet8USFC(AlexNet8):
    """Another reading of AlexNet-8: 11x11, 7x7 and three 3x3 convolutions, two hidden layers, and the classifier.

    Papers from SFedKD's university describe an "8-layer AlexNet" like this, with a size of about 130 MB. Kernel sizes
    and the number of layers are from there. All else is a reconstruction: maps (96, 256, 384, 384, 256), 4096 units in
    each hidden layer, dropout, and 3x3 max-pooling with stride 2 after the first, second and fifth convolution are
    those of Krizhevsky et al. (2012); stride 1 and paddings that keep the size (5, 3, 1, 1, 1) make 32x32 images
    possible. 30,600,586 parameters (122 MB) for 3x32x32 and 10 classes; images from 15x15 pixels.
    """

    name: ClassVar[str] = "alexnet8-usfc"
    convolutions = (
        Convolution(96, 11, padding=5, pool=(3, 2)),
        Convolution(256, 7, padding=3, pool=(3, 2)),
        Convolution(384, 3, padding=1, pool=None),
        Convolution(384, 3, padding=1, pool=None),
        Convolution(256, 3, padding=1, pool=(3, 2)),
    )


STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # maps and convolutions; 2x2 max-pooling ends each


@dataclass(frozen=True)
class VGG16(Convolutional):
    """VGG-16 of Simonyan & Zisserman (2015), configuration D, on small images.

    Thirteen padded 3x3 convolutions with 2x2 max-pooling after the second, fourth, seventh, tenth and thirteenth, then
    two hidden layers of 4096 units, which belong to the features, and the classifier. 40,708,104 parameters for
    3x64x64 and 200 classes, 40,716,552 with batch norm; images from 32x32 pixels.
    """

    name: ClassVar[str] = "vgg16"
    hidden = (4096, 4096)
    dropped = "outputs"

    batch_norm: bool = option(False, "batch norm after every convolution")
    dropout: float = option(0.5, "probability of dropping an output of a hidden layer, in training", low=0, high=1)

    @property
    def convolutions(self) -> tuple[Convolution, ...]:  # type: ignore[override]
        """Five stages of 64 to 512 maps, each with 2x2 max-pooling at its end."""
        return tuple(
            Convolution(maps, 3, padding=1, pool=(2, 2) if number == count else None, norm=self.batch_norm)
            for maps, count in STAGES
            for number in range(1, count + 1)
        )


def fully_connected(name: str, first: nn.Module, widths: Sequence[int], classes: int) -> Network:
    """Build fully connected layers with ReLU behind a first module, and the classifier."""
    body = nn.Sequential(OrderedDict({name: first}))
    for number, (before, after) in enumerate(pairwise(widths), start=1):
        body.add_module(f"full{number}", nn.Linear(before, after))
        body.add_module(f"relu{number}", nn.ReLU())
    return Network(body, widths[-1], classes)


@dataclass(frozen=True)
class MLP(Architecture):
    """Fully connected layers with ReLU on the flattened input, and the classifier.

    Without hidden layers the features are the inputs, which is softmax regression.
    """

    name: ClassVar[str] = "mlp"

    hidden: tuple[int, ...] = option((64,), "units of each hidden layer", low=1)

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        """
        return fully_connected("flatten", nn.Flatten(), (prod(shape), *self.hidden), classes)


class MeanOfEmbeddings(nn.Module):
    """The mean of the vectors of a text's tokens, without those that fill it up."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)  # without padding_idx, which vmap does not respect
        with torch.no_grad():
            self.embedding.weight[0] = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the means.

        ``tokens``: Token ids, int64 [b, length].
        Returns: float32 [b, width]; zeros for a text without tokens.
        """
        is_word = (tokens != 0).unsqueeze(-1)
        # What fills a text up counts for nothing, whatever its vector is (noise is added to it).
        vectors: Tensor = self.embedding(tokens) * is_word
        return vectors.sum(-2) / is_word.sum(-2).clamp(min=1)


@dataclass(frozen=True)
class EmbeddingBag(Architecture):
    """The mean of word vectors, fully connected layers with ReLU, and the classifier.

    Without hidden layers it is the model of fastText (Joulin et al., 2017).
    """

    name: ClassVar[str] = "embedding-bag"
    reads_token_ids: ClassVar[bool] = True

    vocabulary: int = option(10_000, "number of token ids; as data.vocabulary", low=2)
    width: int = option(32, "length of a word's vector", low=1)
    hidden: tuple[int, ...] = option((32,), "units of each hidden layer", low=1)

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: The number of token ids of a text.
        """
        if len(shape) != 1:
            raise ConfigError(
                f"{self.name} reads token ids, one row a text, and these inputs have the shape {list(shape)}. Use a "
                "model for images, or read a column of text with data.text."
            )
        first = MeanOfEmbeddings(self.vocabulary, self.width)
        return fully_connected("mean", first, (self.width, *self.hidden), classes)


Norm = Literal["batch", "group"]

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

    maps: ClassVar[tuple[int, ...]] = (64, 128, 256, 512)
    blocks: ClassVar[tuple[int, ...]]
    bottleneck: ClassVar[bool] = False

    norm: Norm = option("batch", "batch norm, with running statistics, or group norm, without")

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        """
        advice = "Use a model that halves them less often, or mlp, which takes any size."
        channels, _, _ = image_shape(self.name, shape, SMALLEST, advice)
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


@dataclass(frozen=True)
class ResNet34(ResNet):
    """ResNet-34 for small images: 3, 4, 6 and 3 blocks of two 3x3 convolutions in the stages (see `ResNet`).

    21,282,122 parameters for 3x32x32 and 10 classes, 21,328,292 for 100; images from 8x8 pixels.
    """

    name: ClassVar[str] = "resnet34"
    blocks: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)


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
