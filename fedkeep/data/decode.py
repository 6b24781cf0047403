"""Encoded images to one tensor of pixels."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.data.readers import Problems
from fedkeep.errors import DataError, in_one_line, require_optional

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""The formats that are read, by Pillow's names. Others run programs (EPS runs Ghostscript) or are hardly tested."""
MAX_PIXELS = 89_478_485
"""The most pixels of an image, which is also where Pillow begins to warn of decompression bombs."""

_SHOWN = 3
_PLURAL = {"has": "have", "is": "are", "names": "name", "differs": "differ"}
_ANIMATED = ("GIF", "PNG", "WEBP")  # and not phones' JPEGs, beside whose photo are smaller ones of it
_DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")  # Pillow's modes with more than 8 bits a channel
# What Pillow reads 16 bits a channel from, to keep the upper 8 in modes such as RGB. BMP's "BGR;16" is 16 bits a pixel.
_DEEP_SOURCE = re.compile(r"\w+;16[BLN]")


def decode(
    images: Iterable[Sequence[Any]],
    rows: int,
    where: str,
    channels: int | None = None,
    side: int | None = None,
    size: tuple[int, ...] = (),
    seen: Counter[str] | None = None,
) -> Tensor:
    """Decode images into one tensor; a photo is turned upright if its EXIF data say how the camera was turned.

    ``images``: Batches of encoded images: bytes, paths, or dicts of ``"bytes"`` and ``"path"``.
    ``where``: What errors call them.
    ``channels``: 1 converts to greyscale, 3 to RGB; None keeps greyscale if all images are, and converts to RGB
        otherwise.
    ``side``: The middle square of each image is resized to this many pixels (Lanczos); None leaves images as they are.
    ``size``: Height and width to which each whole image is resized (Lanczos); empty leaves images as they are.
    ``seen``: Gets the number of images of which not all is read, by what they are.
    Returns: uint8 ``[rows, channels, height, width]``.
    """
    pillow = require_optional("PIL.Image", "Decoding images", "data")
    pixels: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    refused: dict[str, list[str]] = {}  # what is wrong -> the images
    row = 0
    for batch in images:
        for encoded in batch:
            source = _source(encoded)
            place = f"row {row} ({source})" if isinstance(source, str | Path) else f"row {row}"
            row += 1
            try:
                image = _open(pillow, source)
                upright = _upright(image)
            except DataError as error:
                refused.setdefault(str(error), []).append(place)
                continue
            if seen is not None and image.format in _ANIMATED and getattr(image, "is_animated", False):
                seen["Animations, of which the first picture is read"] += 1
            image = _convert(upright, channels)
            if side is not None and image.size != (side, side):
                image = _resize_middle(pillow, image, side)
            if size and image.size != (size[1], size[0]):
                image = image.resize((size[1], size[0]), pillow.Resampling.LANCZOS)
            values = np.asarray(image)
            if pixels is None:
                with _memory_for(rows, values, where):
                    pixels = np.empty((rows, *values.shape), dtype=np.uint8)
            elif values.shape[:2] != pixels.shape[1:3]:
                shape = f"{values.shape[1]} x {values.shape[0]}"
                refused.setdefault(_size_message(pixels.shape[1:]), []).append(f"{place} of {shape} pixels")
                continue
            if values.ndim > pixels.ndim - 1:  # the first image in colour among greyscale ones
                with _memory_for(rows, values, where):
                    pixels = np.repeat(pixels[..., None], 3, axis=3)
            pixels[row - 1] = values[..., None] if values.ndim < pixels.ndim - 1 else values
    _raise_refused(refused, where)
    if pixels is None or row != rows:
        raise DataError(f"{where}: {rows} images were announced but {row} found. Copy the data again.")
    with _memory_for(rows, pixels[0], where):
        channels_first = pixels[:, None] if pixels.ndim == 3 else np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    return torch.from_numpy(channels_first)


@contextmanager
def _memory_for(rows: int, image: Any, where: str) -> Iterator[None]:
    """Raise `DataError` if there is no memory for as many images."""
    try:
        yield
    except MemoryError as error:
        height, width = image.shape[:2]
        raise DataError(
            f"{where}: {rows:,} images of {width} x {height} pixels take {rows * image.nbytes / 2**30:,.1f} GiB, more "
            "than there is memory for. Let them be resized while they are read: data.size = [64, 64] in the recipe, "
            "or --set data.size=[64,64]. The files do not change."
        ) from error


def picture(image: Any) -> Any:
    """Return a picture of Pillow, uint8 ``[height, width]`` or ``[channels, height, width]``, as `decode` reads a file.

    Raises `DataError`, which says what the picture has, if a part of it would be lost.
    """
    if refused := _why_refused(image) or _transparency(image):
        raise DataError(f"has {refused}")
    pixels = np.asarray(_convert(_upright(image), None))
    return pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels


def _raise_refused(refused: Mapping[str, Sequence[str]], where: str) -> None:
    """Raise one error with all that is wrong, and some of the images of each kind."""
    problems = Problems()
    for reason, places in refused.items():
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        verb, _, rest = reason.partition(" ")
        verb = verb if len(places) == 1 else _PLURAL[verb]
        problems.found.append(f"{where}: {', '.join(places[:_SHOWN])}{more} {verb} {rest}")
    problems.check(where)


def _source(encoded: Any) -> Any:
    """Return the bytes or the path of an image; None without either."""
    if not isinstance(encoded, dict):
        return encoded
    return encoded["bytes"] if encoded.get("bytes") is not None else encoded.get("path")


def _open(pillow: Any, source: Any) -> Any:
    """Return the image with its pixels loaded."""
    if source is None:
        raise DataError("has no image. Remove the row.")
    # A pipe or a device would be read for ever.
    if isinstance(source, str | Path) and not isfile(source):
        raise DataError(f"names the image {str(source)[:200]!r}, which is no file.")
    try:
        image = pillow.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise pillow.DecompressionBombError(f"{image.width} x {image.height} pixels are more than {MAX_PIXELS}")
        refused = _why_refused(image)
        if not refused:
            _load(image)
            refused = _transparency(image)
    except Exception as error:  # damaged files make Pillow's readers raise almost anything
        said = re.sub(r" (<.*>|'.*'|\".*\")$", "", in_one_line(error, 200)) or type(error).__name__  # whose file it is
        raise DataError(f"is not an image that Pillow can read: {said}. {_advice(source)}") from error
    if refused:
        raise DataError(f"has {refused}")
    return image


def _load(image: Any) -> None:
    """Load the pixels; what a program has set for truncated files would be in the cache of all programs."""
    files = require_optional("PIL.ImageFile", "Decoding images", "data")
    before, files.LOAD_TRUNCATED_IMAGES = files.LOAD_TRUNCATED_IMAGES, False
    try:
        image.load()
    finally:
        files.LOAD_TRUNCATED_IMAGES = before


def _why_refused(image: Any) -> str:
    """Return what an image has of which a part would be lost, and what to do; empty if nothing would.

    Its pixels must not be loaded yet: then nothing tells any more how they are stored.
    """
    if found := _deep_pixels(image):
        return f"more than 8 bits a channel ({found}), which would be cut off. Convert the images to 8 bits first."
    stored, read = (image.tag_v2.get(277, 1), len(image.getbands())) if image.format == "TIFF" else (1, 1)
    if stored > read:
        return f"{stored} channels, of which only {read} would be used. Remove the others, or give arrays (.npz)."
    if image.format == "TIFF" and any(kind == 2 for kind in image.tag_v2.get(339, ())):
        return "numbers below 0 (signed pixels), which would become bright. Convert the images to 0 to 255."
    if image.format == "TIFF" and image.n_frames > 1:  # of an animation, the first image stands for all
        return f"{image.n_frames} pages, of which only the first would be used. Save each page as an image of its own."
    return ""


def _transparency(image: Any) -> str:
    """Return that an image has transparent pixels; empty if it has none, whatever its mode.

    What is drawn with transparency has any colour behind it, and black or white in black or white would be nothing.
    """
    if not image.has_transparency_data or image.convert("RGBA").getchannel("A").getextrema()[0] == 255:
        return ""
    return (
        "transparent pixels, which a network does not see. Put the images on a background that they do not have "
        "themselves, such as white: magick mogrify -background white -alpha remove FILES."
    )


def _advice(source: Any) -> str:
    """Return what to do about a file that is no image."""
    beginning = source[:64] if isinstance(source, bytes) else b""
    if not isinstance(source, bytes):
        with suppress(OSError), Path(source).open("rb") as file:
            beginning = file.read(64)
    if beginning.startswith(b"version https://git-lfs") or beginning.lstrip(b"/").startswith(b"annex/objects/"):
        return "It stands for an image that is elsewhere: fetch it with git lfs pull, or git annex get."
    return f"Formats: {', '.join(FORMATS)}. Replace or remove it."


def _deep_pixels(image: Any) -> str:
    """Return what shows that an image has more than 8 bits a channel; empty if nothing does."""
    if image.mode in _DEEP_MODES:
        return f"Pillow mode {image.mode}"
    for *_, arguments in getattr(image, "tile", ()):  # which only a picture of a file has
        if found := _DEEP_SOURCE.search(str(arguments)):
            return f"stored as {found[0]}"
        if image.format == "PPM" and isinstance(arguments, tuple) and arguments[-1] > 255:
            return f"values up to {arguments[-1]}"
    return ""


def _upright(image: Any) -> Any:
    """Return a photo as it is to be seen: a camera that was turned says so beside the pixels."""
    operations = require_optional("PIL.ImageOps", "Decoding images", "data")
    try:
        return operations.exif_transpose(image)
    except Exception as error:  # damaged EXIF makes Pillow raise almost anything
        raise DataError(f"has damaged EXIF data ({in_one_line(error, 200)}). Save it anew.") from error


def _convert(image: Any, channels: int | None) -> Any:
    """Return the image in greyscale or RGB; see `decode`."""
    mode = {1: "L", 3: "RGB"}.get(channels or 0) or ("L" if image.mode in ("L", "1", "LA") else "RGB")
    return image if image.mode == mode else image.convert(mode)


def _resize_middle(pillow: Any, image: Any, side: int) -> Any:
    width, height = image.size
    edge = min(width, height)
    left, top = (width - edge) // 2, (height - edge) // 2
    return image.resize((side, side), pillow.Resampling.LANCZOS, box=(left, top, left + edge, top + edge))


def _size_message(first: tuple[int, ...]) -> str:
    return (
        f"differs in size from the first image, of {first[1]} x {first[0]} pixels. Let all be resized while they are "
        f"read, to one height and width: data.size = [{first[0]}, {first[1]}] in the recipe, or --set "
        f"data.size=[{first[0]},{first[1]}]. The files do not change."
    )
