"""Encoded images to one tensor of pixels."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.data.splits import needed
from fedkeep.errors import DataError

_DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")


def decode(
    images: Iterable[Sequence[Any]], rows: int, where: str, channels: int | None = None, side: int | None = None
) -> Tensor:
    """Decode images into one uint8 tensor ``[rows, channels, height, width]``.

    Parameters
    ----------
    images : chunks of encoded images: bytes, paths, or dicts of ``"bytes"`` and ``"path"``.
    rows : how many there are.
    where : what the errors call them.
    channels : 1 converts to greyscale, 3 to RGB; None keeps greyscale if all are, and converts to RGB otherwise.
    side : takes the middle square of each image and resizes it to this many pixels (Lanczos); None leaves it.

    Raises
    ------
    DataError
        For images of different sizes, with more than 8 bits a channel, or that Pillow cannot read.
    MissingExtra
        Without Pillow.
    """
    pillow = needed("PIL.Image", "Decoding images")
    pixels: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    row = 0
    for chunk in images:
        for cell in chunk:
            image = _as_mode(_open(pillow, cell, row, where), channels, row, where)
            if side is not None and image.size != (side, side):
                image = _square(pillow, image, side)
            values = np.asarray(image)
            if pixels is None:
                pixels = np.empty((rows, *values.shape), dtype=np.uint8)
            elif values.shape[:2] != pixels.shape[1:3]:
                raise DataError(_sizes(cell, values.shape, pixels.shape[1:], row, where))
            if values.ndim > pixels.ndim - 1:  # the first image in colour among greyscale ones
                pixels = np.repeat(pixels[..., None], 3, axis=3)
            pixels[row] = values[..., None] if values.ndim < pixels.ndim - 1 else values
            row += 1
    if pixels is None or row != rows:
        raise DataError(f"{where}: {rows} images were announced but {row} found. Copy the data again.")
    laid_out = pixels[:, None] if pixels.ndim == 3 else np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    return torch.from_numpy(laid_out)


def _open(pillow: Any, cell: Any, row: int, where: str) -> Any:
    if isinstance(cell, dict):
        cell = cell["bytes"] if cell.get("bytes") is not None else cell.get("path")
    if cell is None:
        raise DataError(f"{where}: row {row} has no image. Remove the row.")
    try:
        image = pillow.open(io.BytesIO(cell) if isinstance(cell, bytes) else cell)
        image.load()
    except (OSError, ValueError, SyntaxError, TypeError, AttributeError) as error:  # what Pillow's readers raise
        name = f" ({cell})" if isinstance(cell, str | Path) else ""
        raise DataError(f"{where}: row {row}{name} is not an image that Pillow can read: {error}") from error
    return image


def _as_mode(image: Any, channels: int | None, row: int, where: str) -> Any:
    if image.mode in _DEEP:
        raise DataError(
            f"{where}: row {row} has more than 8 bits a channel (Pillow mode {image.mode}), which would be cut off. "
            "Convert the images to 8 bits first."
        )
    mode = {1: "L", 3: "RGB"}.get(channels or 0) or ("L" if image.mode in ("L", "1", "LA") else "RGB")
    return image if image.mode == mode else image.convert(mode)


def _square(pillow: Any, image: Any, side: int) -> Any:
    width, height = image.size
    edge = min(width, height)
    left, top = (width - edge) // 2, (height - edge) // 2
    return image.resize((side, side), pillow.Resampling.LANCZOS, box=(left, top, left + edge, top + edge))


def _sizes(cell: Any, shape: tuple[int, ...], first: tuple[int, ...], row: int, where: str) -> str:
    name = f" ({cell})" if isinstance(cell, str | Path) else ""
    return (
        f"{where}: images differ in size. Row {row}{name} is {shape[1]} x {shape[0]} pixels, the first is {first[1]} x "
        f"{first[0]}. Bring all to one size first, for example with Pillow: "
        f"Image.open(path).resize(({first[1]}, {first[0]})).save(path)"
    )
