"""The network of a pixel-space generator: a UNet that is conditioned on the timestep and a class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from fedkeep.errors import ConfigError
from fedkeep.generation.diffusion._libraries import diffusers
from fedkeep.models import Shape
from fedkeep.options import Options, option

_GROUP_SIZE = 8  # groups of group norm, and channels of an attention head


@dataclass(frozen=True)
class UNet(Options):
    """A small UNet of `diffusers` for images of 28 or 32 pixels.

    FedDCL's generator of grey images is a UNet of 7.2 M parameters: what it computes from a class code multiplies two
    of its feature maps, and the timestep's embedding is added. Here both together scale and shift every map (Dhariwal &
    Nichol, 2021).
    """

    widths: tuple[int, ...] = option(
        (16, 48, 96), "channels at each resolution, each half as fine as the last; multiples of 8", low=8
    )
    blocks: int = option(1, "residual blocks at each resolution", low=1)
    patch: int = option(
        1, "side of the squares of pixels that are folded into channels; 2 is a quarter of the work", low=1
    )
    attention: int = option(1, "at how many of the coarsest resolutions pixels attend to each other", low=0)

    def check(self) -> None:
        """Raise `ConfigError` for options that contradict each other."""
        wrong = [width for width in self.widths if width % _GROUP_SIZE]
        if wrong or not self.widths:
            raise ConfigError(f"UNet.widths must be multiples of {_GROUP_SIZE}, at least one, not {list(self.widths)}.")
        if self.attention > len(self.widths):
            raise ConfigError(f"UNet.attention is {self.attention}, but there are {len(self.widths)} resolutions.")

    @property
    def conditioning_shape(self) -> tuple[int, int]:
        """What a class is: one vector beside the timestep's, of this length."""
        return (1, 4 * self.widths[0])

    def build(self, shape: Shape, classes: int) -> ClassUNet:
        """Return the network with initial weights from PyTorch's default generator.

        ``shape``: Channels, height and width of the images.
        ``classes``: Rows of the class table, without the null row.
        """
        channels, height, width = shape
        halvings = len(self.widths) - 1
        divisor = self.patch * 2**halvings
        if height != width or height % divisor:
            raise ConfigError(
                f"images of {height} x {width} pixels cannot be halved {halvings} times in squares of {self.patch}: "
                f"they must be square, and {divisor} must divide their side. Give UNet.widths fewer entries; 28 pixels "
                "take up to 3, and 2 with squares of 2."
            )
        return ClassUNet(self._unet(channels * self.patch**2, height // self.patch), classes, self)

    def _unet(self, channels: int, side: int) -> nn.Module:
        num_plain = len(self.widths) - self.attention
        config: dict[str, Any] = {
            "sample_size": side,
            "in_channels": channels,
            "out_channels": channels,
            "block_out_channels": self.widths,
            "layers_per_block": self.blocks,
            "norm_num_groups": _GROUP_SIZE,
            "resnet_time_scale_shift": "scale_shift",  # a shift before group norm is lost in groups of one channel
            "attention_head_dim": _GROUP_SIZE,
            "class_embed_type": "identity",
            "down_block_types": ("DownBlock2D",) * num_plain + ("AttnDownBlock2D",) * self.attention,
            "up_block_types": ("AttnUpBlock2D",) * self.attention + ("UpBlock2D",) * num_plain,
        }
        unet: nn.Module = diffusers().UNet2DModel(**config)
        return unet


class ClassUNet(nn.Module):
    """A UNet and the table of the classes that it was trained on.

    ``classes``: Rows of the class table, without the null row.
    ``table``: [classes + 1, 1, width], the conditioning of each class; the last row is the null conditioning.
    """

    def __init__(self, unet: nn.Module, classes: int, options: UNet) -> None:
        super().__init__()
        self.unet = unet
        self.table = nn.Parameter(torch.randn(classes + 1, *options.conditioning_shape))
        self.patch = options.patch

    def forward(self, noisy: Tensor, timesteps: Tensor, conditioning: Tensor) -> Tensor:
        """Return the noise in noisy images.

        ``noisy``: [b, channels, side, side].
        ``timesteps``: int64 [b].
        ``conditioning``: [b, 1, width].
        """
        patches = pixel_unshuffle(noisy, self.patch)
        return pixel_shuffle(self.unet(patches, timesteps, class_labels=conditioning.squeeze(1)).sample, self.patch)
