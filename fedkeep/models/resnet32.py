"""ResNet-32, the small residual network for CIFAR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedkeep.errors import ConfigError
from fedkeep.models.resnet import GROUPS, Residual, ResNet
from fedkeep.options import option


@dataclass(frozen=True)
class ResNet32(ResNet):
    """ResNet-32 of He et al. (2016), section 4.2: three stages of 16, 32 and 64 maps, five blocks each (see `ResNet`).

    Its shortcuts have no weights: where a block halves the side and doubles the maps, every second pixel is carried,
    and maps of zeros are put behind. 464,154 parameters for 3x32x32 and 10 classes, 470,004 for 100; with 1x1
    convolutions as shortcuts, which fusion by optimal transport needs, 2,752 more. Images from 8x8 pixels.
    """

    name: ClassVar[str] = "resnet32"
    maps: ClassVar[tuple[int, ...]] = (16, 32, 64)
    blocks: ClassVar[tuple[int, ...]] = (5, 5, 5)
    bottleneck: ClassVar[bool] = False

    shortcut: Literal["padding", "projection"] = option(
        "padding", "what carries the input where its maps double: maps of zeros, or a 1x1 convolution"
    )

    def check(self) -> None:
        """Refuse group norm, whose groups would be of less than one map."""
        if self.norm == "group":
            raise ConfigError(
                f"group norm has {GROUPS} groups here, and the first stage of {self.name} has {self.maps[0]} maps. "
                "Use norm=batch, or another ResNet."
            )

    def _block(self, before: int, maps: int, stride: int) -> Residual:
        return Residual((before, maps, maps), (3, 3), (stride, 1), self.norm, pads=self.shortcut == "padding")
