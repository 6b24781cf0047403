"""FEMNIST's letters scaled, centred and inverted as EMNIST's are."""

from __future__ import annotations

import string

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from fedkeep.data.combine import select_classes
from fedkeep.data.dataset import DataSet, channel_statistics

LETTERS = string.ascii_uppercase[10:] + string.ascii_lowercase[10:]
_INK_THRESHOLD = 32  # strokes are darker than this above the paper and its scanning noise
_LETTER_SIZE = 22  # pixels of the longer side in EMNIST
_BRIGHTNESS = 1.2  # enlarged strokes are paler; with this factor they are as bright as EMNIST's on average


def emnist_style_letters(femnist: DataSet) -> DataSet:
    """Return FEMNIST's letters from K and k on, which MNIST and EMNIST's letters A to J lack, in EMNIST's style."""
    chosen = select_classes(femnist, [name for name in LETTERS if name in femnist.label_names])
    train, test = (
        {"input": to_emnist_style(data["input"]), "label": data["label"]} for data in (chosen.train, chosen.test)
    )
    mean, std = channel_statistics(train["input"])
    note = f"Letters of {femnist.name}, scaled and centred as EMNIST's."
    return DataSet("femnist-letters", train, test, chosen.label_names, mean, std, note)


def to_emnist_style(images: Tensor) -> Tensor:
    """Return dark letters on white as bright letters on black, as large, as bright and as centred as EMNIST's.

    LEAF's FEMNIST is inverted, with letters of about 10 pixels; EMNIST scales each letter to fill the image.

    ``images``: uint8 ``[n, 1, side, side]``, side at least 22.
    Returns: The same shape and type. An image without ink becomes black.
    """
    return torch.stack([_rescale_letter(image) for image in 255 - images])


def _rescale_letter(image: Tensor) -> Tensor:
    side = image.shape[-1]
    ink = image[0] > _INK_THRESHOLD
    if not bool(ink.any()):
        return torch.zeros_like(image)
    rows, columns = (ink.any(dim=1 - axis).nonzero().flatten() for axis in (0, 1))
    box = image[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].float()
    height, width = box.shape[-2:]
    scale = _LETTER_SIZE / max(height, width)
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    letter = interpolate(box.unsqueeze(0), size=size, mode="bilinear", antialias=True)
    top, left = (side - size[0]) // 2, (side - size[1]) // 2
    whole = pad(letter, (left, side - size[1] - left, top, side - size[0] - top))
    return (_BRIGHTNESS * whole[0]).round().clamp(0, 255).to(torch.uint8)
