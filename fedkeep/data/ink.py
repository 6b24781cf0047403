"""FEMNIST's letters made to look like EMNIST's."""

from __future__ import annotations

import string

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from fedkeep.data.combine import choose
from fedkeep.data.dataset import DataSet, channel_statistics

LETTERS = string.ascii_uppercase[10:] + string.ascii_lowercase[10:]
_INK = 32  # darker than paper and scanning noise
_GLYPH = 22  # pixels of the longer side, as EMNIST's letters have
_GAIN = 1.2  # enlarged strokes fade; so they are as bright as EMNIST's on average


def letters(femnist: DataSet) -> DataSet:
    """Return FEMNIST's letters from K and k on, which MNIST and EMNIST's first ten letters lack, as EMNIST has them."""
    chosen = choose(femnist, [name for name in LETTERS if name in femnist.label_names])
    train, test = ({"image": as_emnist(half["image"]), "label": half["label"]} for half in (chosen.train, chosen.test))
    mean, std = channel_statistics(train["image"])
    note = f"Letters of {femnist.name}, scaled and centred as EMNIST's."
    return DataSet("femnist-letters", train, test, chosen.label_names, mean, std, note)


def as_emnist(images: Tensor) -> Tensor:
    """Return dark letters on white as bright ones on black, as large, as bright and as centred as EMNIST's.

    LEAF keeps FEMNIST inverted, with letters of about 10 pixels; EMNIST scales each letter's box to fill the image.

    Parameters
    ----------
    images : uint8 [n, 1, side, side], side at least 22. An image without ink becomes black.
    """
    return torch.stack([_letter(image) for image in 255 - images])


def _letter(image: Tensor) -> Tensor:
    side = image.shape[-1]
    ink = image[0] > _INK
    if not bool(ink.any()):
        return torch.zeros_like(image)
    rows, columns = (ink.any(dim=1 - axis).nonzero().flatten() for axis in (0, 1))
    box = image[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].float()
    height, width = box.shape[-2:]
    scale = _GLYPH / max(height, width)
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    glyph = interpolate(box.unsqueeze(0), size=size, mode="bilinear", antialias=True)
    top, left = (side - size[0]) // 2, (side - size[1]) // 2
    whole = pad(glyph, (left, side - size[1] - left, top, side - size[0] - top))
    return (_GAIN * whole[0]).round().clamp(0, 255).to(torch.uint8)
