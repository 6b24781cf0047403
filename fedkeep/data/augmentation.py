"""Data augmentation: random changes to training images, a whole batch at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedkeep._utils.torch_state import to_device
from fedkeep.errors import ConfigError, ValueRefused
from fedkeep.options import Options, option


@dataclass(frozen=True)
class Augmentation(Options):
    """Crop, flip, rotate, brighten and cut out at random; everything is off by default.

    Crop, flip and rotation move pixels before normalisation, in this order, so that pixels from outside an image are
    black; all three together are one lookup with nearest-pixel sampling. Brightness multiplies all pixels of an image
    by one number, clips them at white and truncates them to integers, as Pillow does; generated images keep their
    brightness, as in the code of TARGET, LANDER and DDDR. Cutout clears a square after normalisation, so that it holds
    the mean. Each image of a batch has its own random numbers.

    Sources: random crop and flip as in He et al. (2016), section 4.2; cutout as in DeVries & Taylor (2017), section
    3: the square's centre is uniform over the pixels, and the square is clipped where it leaves the image.
    """

    crop_padding: int = option(0, "Pixels of padding on each side before a crop of the original size; 0 is off.", low=0)
    padding_mode: Literal["zero", "reflect"] = option("zero", "What the padding of the crop holds.")
    horizontal_flip: bool = option(False, "Mirror left and right with probability one half.")
    rotation: float = option(0.0, "Rotate by up to this many degrees either way; 0 is off.", low=0, high=180)
    brightness: float = option(0.0, "Multiply pixels by 1 plus up to this much either way; 0 is off.", low=0, high=1)
    cutout: int = option(0, "Side of the square that is cleared, in pixels; 0 is off.", low=0)

    def __bool__(self) -> bool:
        """Whether any augmentation is on. If so, a frozen model's outputs on an image cannot be cached."""
        return bool(self.crop_padding or self.horizontal_flip or self.rotation or self.brightness or self.cutout)

    def __call__(
        self,
        images: Tensor,
        normalise: Callable[[Tensor], Tensor],
        rng: torch.Generator,
        generated: Tensor | None = None,
    ) -> Tensor:
        """Return the batch augmented and normalised.

        ``images``: uint8 ``[b, channels, height, width]``, on any device; not changed.
        ``normalise``: Turns uint8 pixels into the network's input, such as ``DataSet.normalise``.
        ``rng``: The source of randomness. A CPU generator gives the same numbers whatever device the images are on.
        ``generated``: bool ``[b]``, true for generated images; by default there are none.
        Returns: float32 ``[b, channels, height, width]``.
        """
        if not self:
            return normalise(images)
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueRefused(
                "Augmentation takes uint8 images [b, channels, height, width] before normalisation, not "
                f"{images.dtype} {list(images.shape)}."
            )
        if self.crop_padding or self.horizontal_flip or self.rotation:
            images = self.move_pixels(images, rng)
        if self.brightness:
            images = self._change_brightness(images, rng, generated)
        result = normalise(images)
        return self._cut_out(result, rng) if self.cutout else result

    def move_pixels(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Return the batch rotated, flipped and cropped, not normalised; gradients flow.

        ``images``: ``[b, channels, height, width]``, of any type.
        ``rng``: The source of randomness; see `__call__`.
        Returns: The same shape, type and device.
        """
        # Each pixel is looked up where it was before rotation, flip and crop, from the last to the first.
        batch, _, height, width = images.shape
        if self.padding_mode == "reflect":
            self.check_image_size(height, width)
        device = images.device
        y = torch.arange(height, device=device).view(1, height, 1)
        x = torch.arange(width, device=device).view(1, 1, width)
        inside = torch.ones((), dtype=torch.bool, device=device)
        crops = (
            _random_integers(2 * self.crop_padding + 1, (2, batch, 1, 1), rng, device) if self.crop_padding else None
        )
        flips = _random_integers(2, (batch, 1, 1), rng, device).bool() if self.horizontal_flip else None
        if self.rotation:
            share = _random_shares((batch, 1, 1), rng, device)
            y, x = rotation_source(y, x, (2 * share - 1) * self.rotation, height, width)
            inside = _is_inside(y, x, height, width)
            y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        if flips is not None:
            x = torch.where(flips, width - 1 - x, x)
        if crops is not None:
            y, x = y + crops[0] - self.crop_padding, x + crops[1] - self.crop_padding
            if self.padding_mode == "reflect":
                y, x = _reflect(y, height), _reflect(x, width)
            else:
                inside = inside & _is_inside(y, x, height, width)
                y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        moved = _gather_pixels(images, y, x)
        return moved if inside.ndim == 0 else moved.mul_(inside.unsqueeze(1))

    def check_image_size(self, height: int, width: int) -> None:
        """Raise `ConfigError` if the padding of the crop is as large as an image.

        Some crops would hold nothing but padding, and an image cannot be reflected by its whole size.
        """
        if self.crop_padding >= min(height, width):
            raise ConfigError(
                f"augmentation.crop_padding = {self.crop_padding} needs images larger than that, not {height} x "
                f"{width} pixels. Lower crop."
            )

    def _change_brightness(self, images: Tensor, rng: torch.Generator, generated: Tensor | None) -> Tensor:
        factor = 1 + (2 * _random_shares((len(images), 1, 1, 1), rng, images.device) - 1) * self.brightness
        if generated is not None:
            factor = factor.masked_fill(generated.view(-1, 1, 1, 1), 1.0)
        return (images * factor).clamp_(max=255).to(torch.uint8)

    def _cut_out(self, images: Tensor, rng: torch.Generator) -> Tensor:
        batch, _, height, width = images.shape
        device = images.device
        top = _random_integers(height, (batch, 1, 1), rng, device) - self.cutout // 2
        left = _random_integers(width, (batch, 1, 1), rng, device) - self.cutout // 2
        y = torch.arange(height, device=device).view(1, height, 1)
        x = torch.arange(width, device=device).view(1, 1, width)
        hole = (y >= top) & (y < top + self.cutout) & (x >= left) & (x < left + self.cutout)
        return images.masked_fill(hole.unsqueeze(1), 0.0)


def rotation_source(y: Tensor, x: Tensor, degrees: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return from which pixel of an image each pixel ``(y, x)`` of its rotation comes.

    The rotation is counter-clockwise about the image's centre, as ``PIL.Image.rotate`` with nearest sampling.

    ``y``, ``x``: int64, broadcastable to ``[b, height, width]``.
    ``degrees``: Floating point ``[b, 1, 1]``.
    ``height``, ``width``: The image's size in pixels.
    Returns: int64 ``[b, height, width]``; may lie outside the image.
    """
    angle = torch.deg2rad(degrees.double())  # double: a right angle must land on whole pixels
    cosine, sine = angle.cos(), angle.sin()
    middle_y, middle_x = (height - 1) / 2, (width - 1) / 2
    down, right = y - middle_y, x - middle_x
    source_x = cosine * right - sine * down + middle_x
    source_y = sine * right + cosine * down + middle_y
    return (source_y + 0.5).floor().long(), (source_x + 0.5).floor().long()


def _random_integers(high: int, shape: tuple[int, ...], rng: torch.Generator, device: torch.device) -> Tensor:
    """Return int64 of this shape, uniform in 0..high - 1."""
    return _to_device(torch.randint(high, shape, generator=rng, device=rng.device), device)


def _random_shares(shape: tuple[int, ...], rng: torch.Generator, device: torch.device) -> Tensor:
    """Return float32 of this shape, uniform in [0, 1)."""
    return _to_device(torch.rand(shape, generator=rng, device=rng.device), device)


def _to_device(drawn: Tensor, device: torch.device) -> Tensor:
    return to_device(drawn, device) if drawn.device.type == "cpu" else drawn.to(device)


def _reflect(position: Tensor, size: int) -> Tensor:
    return size - 1 - (size - 1 - position.abs()).abs()


def _is_inside(y: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    return (y >= 0) & (y < height) & (x >= 0) & (x < width)


def _gather_pixels(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return ``images[i, :, y, x]`` for every image i of the batch."""
    batch, channels, height, width = images.shape
    index = (y * width + x).expand(batch, height, width).reshape(batch, 1, height * width).expand(-1, channels, -1)
    return images.flatten(2).gather(2, index).view(batch, channels, height, width)
