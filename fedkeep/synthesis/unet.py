"""The network of a pixel-space generator: a UNet that is told the time and a class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from fedkeep.errors import ConfigError
from fedkeep.models import Shape
from fedkeep.options import Options, option
from fedkeep.synthesis.libraries import diffusers

_EIGHT = 8  # groups of channels that are normalised together, and channels of a head in attention


@dataclass(frozen=True)
class UNet(Options):
    """A small UNet of `diffusers` for images of 28 or 32 pixels.

    FedDCL's grey generator is a UNet of 7.2 M parameters: what a class code says multiplies two of its maps, and what
    the time says is added. Here both together scale and shift every map (Dhariwal & Nichol, 2021), or the class is
    attended to instead (``tokens``).
    """

    widths: tuple[int, ...] = option(
        (16, 48, 96), "channels at each resolution, the next half as fine; multiples of 8", low=8
    )
    blocks: int = option(1, "residual blocks at each resolution", low=1)
    patch: int = option(
        1, "side of the squares of pixels that enter as one with more channels; 2 is about four times as quick", low=1
    )
    attention: int = option(1, "at how many of the coarsest resolutions pixels attend to each other", low=0)
    condition: Literal["code", "tokens"] = option(
        "code", "a class is one vector beside the time's, or tokens that the coarsest resolutions attend to"
    )
    tokens: int = option(1, "tokens of a class", low=1)
    token_width: int = option(64, "length of a token", low=1)

    def check(self) -> None:
        """Raise `ConfigError` for options that contradict each other."""
        wrong = [width for width in self.widths if width % _EIGHT]
        if wrong or not self.widths:
            raise ConfigError(f"UNet.widths must be multiples of {_EIGHT}, at least one, not {list(self.widths)}.")
        if self.attention > len(self.widths):
            raise ConfigError(f"UNet.attention is {self.attention}, but there are {len(self.widths)} resolutions.")
        if self.condition == "tokens" and not self.attention:
            raise ConfigError("UNet.condition is tokens, which need attention: set UNet.attention to 1 or more.")

    @property
    def condition_shape(self) -> tuple[int, int]:
        """Tokens and their length, as the network is told a class; a code counts as one token."""
        return (1, 4 * self.widths[0]) if self.condition == "code" else (self.tokens, self.token_width)

    def build(self, shape: Shape, classes: int) -> ClassUNet:
        """Return the network with initial weights from PyTorch's default generator.

        Raises
        ------
        ConfigError
            If a side cannot be cut or halved so often.
        MissingExtra
            Without `diffusers`.
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
        plain = len(self.widths) - self.attention
        common: dict[str, Any] = {
            "sample_size": side,
            "in_channels": channels,
            "out_channels": channels,
            "block_out_channels": self.widths,
            "layers_per_block": self.blocks,
            "norm_num_groups": _EIGHT,
            "resnet_time_scale_shift": "scale_shift",  # a shift before group norm is lost in groups of one channel
            "attention_head_dim": _EIGHT,
        }
        if self.condition == "code":
            make, down, up = diffusers().UNet2DModel, "AttnDownBlock2D", "AttnUpBlock2D"
            common["class_embed_type"] = "identity"
        else:
            make, down, up = diffusers().UNet2DConditionModel, "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
            common["cross_attention_dim"] = self.token_width
        common["down_block_types"] = ("DownBlock2D",) * plain + (down,) * self.attention
        common["up_block_types"] = (up,) * self.attention + ("UpBlock2D",) * plain
        unet: nn.Module = make(**common)
        return unet


class ClassUNet(nn.Module):
    """A UNet and the table of the classes that it learned.

    Attributes
    ----------
    table : [classes + 1, tokens, width], what the network is told for each class; the last row says nothing.
    """

    def __init__(self, unet: nn.Module, classes: int, options: UNet) -> None:
        super().__init__()
        self.unet = unet
        self.table = nn.Parameter(torch.randn(classes + 1, *options.condition_shape))
        self.told = "class_labels" if options.condition == "code" else "encoder_hidden_states"
        self.patch = options.patch

    def forward(self, noisy: Tensor, times: Tensor, conditions: Tensor) -> Tensor:
        """Return the noise in noisy images [b, channels, side, side] at times [b], told [b, tokens, width]."""
        if self.told == "class_labels":
            conditions = conditions.squeeze(1)
        patches = pixel_unshuffle(noisy, self.patch)
        return pixel_shuffle(self.unet(patches, times, **{self.told: conditions}).sample, self.patch)
