"""Convolutional networks from a table of their layers, and their max-pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from fedkeep.errors import ConfigError
from fedkeep.models.base import Network, Shape, image_shape


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


def convolutional(
    name: str,
    shape: Shape,
    classes: int,
    *,
    convolutions: Sequence[Convolution],
    hidden: Sequence[int],
    dropout: float = 0.0,
    dropped: Literal["inputs", "outputs"] = "inputs",
) -> Network:
    """Build a network of convolutions, hidden layers with ReLU, and a classifier, sized for the images.

    ``name``: Name of the architecture, for the error message.
    ``shape``: Channels, height and width of an image.
    ``hidden``: Units of each fully connected layer before the classifier; at least one layer.
    ``dropout``: Probability of dropping an input, or an output, of a hidden layer.
    """
    channels, height, width = image_shape(name, shape)
    rows, columns = (flattened_side(convolutions, side) for side in (height, width))
    if min(rows, columns) < 1:
        smallest = next(side for side in count(1) if flattened_side(convolutions, side))
        raise ConfigError(
            f"{name} needs images of at least {smallest}x{smallest} pixels, and these are {height}x{width}. "
            "Use a model with less pooling, or mlp, which takes any size."
        )
    body = convolutional_body(channels, convolutions)
    body.add_module("flatten", nn.Flatten())
    widths = [convolutions[-1].maps * rows * columns, *hidden]
    for number, (before, after) in enumerate(pairwise(widths), start=len(convolutions) + 1):
        if dropout and dropped == "inputs":
            body.add_module(f"dropout{number}", nn.Dropout(dropout))
        body.add_module(f"full{number}", nn.Linear(before, after))
        body.add_module(f"relu{number}", nn.ReLU())
        if dropout and dropped == "outputs":
            body.add_module(f"dropout{number}", nn.Dropout(dropout))
    return Network(body, hidden[-1], classes)


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
