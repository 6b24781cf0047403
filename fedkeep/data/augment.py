"""Random changes to training images, on whole batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedkeep._utils.devices import to_device
from fedkeep.errors import ConfigError, ValueRefused
from fedkeep.options import Options, option


@dataclass(frozen=True)
class Augmentation(Options):
    """Crop, flip, rotate, brighten and cut out at random; everything is off by default.

    Crop, flip and rotation move pixels before normalisation, in this order, so that what comes in from outside an
    image is black; all three together are one lookup with nearest-pixel sampling. Brightness multiplies all pixels of
    an image by one number, and cuts off what is brighter than white and behind the point, as Pillow does; images that
    were made stay as bright as they are, as in the code of TARGET, LANDER and DDDR. Cutout clears a square after
    normalisation, so that it holds the mean. Every image of a batch is drawn for by itself.

    Sources: random crop and flip as in He et al. (2016), section 4.2; cutout as in DeVries & Taylor (2017), section
    3: the square's centre is uniform over the pixels, and the square is clipped where it leaves the image.
    """

    crop: int = option(0, "Pixels of padding on each side before a crop of the original size; 0 is off.", low=0)
    crop_mode: Literal["zero", "reflect"] = option("zero", "What the padding of the crop holds.")
    flip: bool = option(False, "Mirror left and right with probability one half.")
    rotation: float = option(0.0, "Rotate by up to this many degrees either way; 0 is off.", low=0, high=180)
    brightness: float = option(0.0, "Multiply pixels by 1 plus up to this much either way; 0 is off.", low=0, high=1)
    cutout: int = option(0, "Side of the square that is cleared, in pixels; 0 is off.", low=0)

    def __bool__(self) -> bool:
        """Whether anything is on: random, so that what a frozen model says about an image cannot be kept."""
        return bool(self.crop or self.flip or self.rotation or self.brightness or self.cutout)

    def __call__(
        self,
        images: Tensor,
        normalise: Callable[[Tensor], Tensor],
        generator: torch.Generator,
        made: Tensor | None = None,
    ) -> Tensor:
        """Return the batch augmented and normalised.

        Parameters
        ----------
        images : uint8 ``[b, channels, height, width]``, on any device; left as it is.
        normalise : turns uint8 pixels into what the network takes, such as ``DataSet.normalise``.
        generator : where the draws come from. On the CPU it gives the same draws whatever device the images are on.
        made : bool ``[b]``, which of them were made by a generator; none by default.

        Returns
        -------
        float32 ``[b, channels, height, width]``.

        Raises
        ------
        ValueRefused
            For images that are not uint8 ``[b, channels, height, width]``.
        ConfigError
            For a reflected crop that does not fit; see `check_fits`.
        """
        if not self:
            return normalise(images)
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueRefused(
                "Augmentation takes uint8 images [b, channels, height, width] before normalisation, not "
                f"{images.dtype} {list(images.shape)}."
            )
        if self.crop or self.flip or self.rotation:
            images = self.move(images, generator)
        if self.brightness:
            images = self._brighten(images, generator, made)
        result = normalise(images)
        return self._cut(result, generator) if self.cutout else result

    def move(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the batch rotated, flipped and cropped, not normalised: pixels of any type, gradients flow.

        Parameters
        ----------
        images : ``[b, channels, height, width]``. generator : see `__call__`.
        """
        # Each pixel is looked up where it was before rotation, flip and crop, from the last to the first.
        batch, _, height, width = images.shape
        if self.crop_mode == "reflect":
            self.check_fits(height, width)
        device = images.device
        y = torch.arange(height, device=device).view(1, height, 1)
        x = torch.arange(width, device=device).view(1, 1, width)
        inside = torch.ones((), dtype=torch.bool, device=device)
        crops = _integers(2 * self.crop + 1, (2, batch, 1, 1), generator, device) if self.crop else None
        flips = _integers(2, (batch, 1, 1), generator, device).bool() if self.flip else None
        if self.rotation:
            share = _shares((batch, 1, 1), generator, device)
            y, x = rotated(y, x, (2 * share - 1) * self.rotation, height, width)
            inside = _within(y, x, height, width)
            y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        if flips is not None:
            x = torch.where(flips, width - 1 - x, x)
        if crops is not None:
            y, x = y + crops[0] - self.crop, x + crops[1] - self.crop
            if self.crop_mode == "reflect":
                y, x = _reflected(y, height), _reflected(x, width)
            else:
                inside = inside & _within(y, x, height, width)
                y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        moved = _look_up(images, y, x)
        return moved if inside.ndim == 0 else moved.mul_(inside.unsqueeze(1))

    def check_fits(self, height: int, width: int) -> None:
        """Raise `ConfigError` for a crop with as much padding as images are high or wide.

        Some would hold nothing but padding, and none could be reflected.
        """
        if self.crop >= min(height, width):
            raise ConfigError(
                f"augmentation.crop = {self.crop} needs images larger than that, not {height} x {width} pixels. "
                "Lower crop."
            )

    def _brighten(self, images: Tensor, generator: torch.Generator, made: Tensor | None) -> Tensor:
        factor = 1 + (2 * _shares((len(images), 1, 1, 1), generator, images.device) - 1) * self.brightness
        if made is not None:
            factor = factor.masked_fill(made.view(-1, 1, 1, 1), 1.0)
        return (images * factor).clamp_(max=255).to(torch.uint8)

    def _cut(self, images: Tensor, generator: torch.Generator) -> Tensor:
        batch, _, height, width = images.shape
        device = images.device
        top = _integers(height, (batch, 1, 1), generator, device) - self.cutout // 2
        left = _integers(width, (batch, 1, 1), generator, device) - self.cutout // 2
        y = torch.arange(height, device=device).view(1, height, 1)
        x = torch.arange(width, device=device).view(1, 1, width)
        hole = (y >= top) & (y < top + self.cutout) & (x >= left) & (x < left + self.cutout)
        return images.masked_fill(hole.unsqueeze(1), 0.0)


def rotated(y: Tensor, x: Tensor, degrees: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return where the pixels ``(y, x)`` of a rotated image come from, as the nearest whole pixels.

    The rotation is counter-clockwise about the image's centre, as ``PIL.Image.rotate`` with nearest sampling. Places
    outside the image are returned as they are.

    Parameters
    ----------
    y, x : int64, broadcastable to ``[b, height, width]``.
    degrees : float ``[b, 1, 1]``.
    height, width : the image's size in pixels.
    """
    angle = torch.deg2rad(degrees.double())  # double: a right angle must land on whole pixels
    cosine, sine = angle.cos(), angle.sin()
    middle_y, middle_x = (height - 1) / 2, (width - 1) / 2
    down, right = y - middle_y, x - middle_x
    source_x = cosine * right - sine * down + middle_x
    source_y = sine * right + cosine * down + middle_y
    return (source_y + 0.5).floor().long(), (source_x + 0.5).floor().long()


def _integers(high: int, shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    return _moved(torch.randint(high, shape, generator=generator, device=generator.device), device)


def _shares(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    return _moved(torch.rand(shape, generator=generator, device=generator.device), device)


def _moved(drawn: Tensor, device: torch.device) -> Tensor:
    return to_device(drawn, device) if drawn.device.type == "cpu" else drawn.to(device)


def _reflected(position: Tensor, size: int) -> Tensor:
    return size - 1 - (size - 1 - position.abs()).abs()


def _within(y: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    return (y >= 0) & (y < height) & (x >= 0) & (x < width)


def _look_up(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return ``images[i, :, y, x]`` for every image i of the batch."""
    batch, channels, height, width = images.shape
    places = (y * width + x).expand(batch, height, width).reshape(batch, 1, -1).expand(-1, channels, -1)
    return images.flatten(2).gather(2, places).view(batch, channels, height, width)
