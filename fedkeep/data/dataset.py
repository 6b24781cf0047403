"""A labelled image data set as tensors: everything in memory, pixels as they are stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fedkeep._utils.devices import to_device
from fedkeep.errors import DataError, did_you_mean

Data = Mapping[str, Tensor]
"""Columns of one length, by name."""


@dataclass(frozen=True)
class ImageFormat:
    """What the images of a data set are like, for those who make some.

    Attributes
    ----------
    shape : channels, height, width.
    mean, std : per channel, of pixels scaled to 0..1.
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return ``(pixels - mean) / std`` of pixels in 0..1, ``[b, channels, height, width]``; gradients flow."""
        mean, std = (_of_channels(tuple(each), pixels.dtype, pixels.device) for each in (self.mean, self.std))
        return (pixels - mean) / std


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class DataSet:
    """Hold a train and a test split, their class names and their normalisation.

    Parameters
    ----------
    name : what the data set is called in tables and run folders.
    train, test : columns ``"image"`` (uint8 ``[n, channels, height, width]``), ``"label"`` (int64 ``[n]``, 0 to
        classes - 1) and any further integer columns ``[n]``, such as ``"writer"``. Float32 images are accepted; they
        count as normalised already.
    label_names : the class names; their number is the number of classes.
    mean, std : per channel, of pixels scaled to 0..1.
    note : what a reader of results has to know about this copy; empty if nothing.

    Raises
    ------
    DataError
        Where columns, types, shapes, labels, names or constants do not fit together.
    """

    name: str
    train: Data
    test: Data
    label_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str = ""

    def __post_init__(self) -> None:
        if len(self.label_names) < 2:
            raise DataError(f"{self.name}: a classification needs at least 2 classes, not {len(self.label_names)}.")
        twice = [name for name, count in Counter(self.label_names).items() if count > 1]
        if twice:
            raise DataError(f"{self.name}: two classes have the same name: {', '.join(map(repr, twice))}. Rename one.")
        for split, data in (("train", self.train), ("test", self.test)):
            _check(f"{self.name}, {split}", data, len(self.label_names))
        if self.train.keys() != self.test.keys():
            raise DataError(
                f"{self.name}: train has the columns {', '.join(sorted(self.train))} but test has "
                f"{', '.join(sorted(self.test))}; both need the same."
            )
        theirs = tuple(self.test["image"].shape[1:])
        if theirs != self.shape:
            raise DataError(
                f"{self.name}: train images are {describe(self.shape)} but test images {describe(theirs)}; "
                "bring both splits to one size."
            )
        self._check_normalisation()

    def _check_normalisation(self) -> None:
        channels = self.shape[0]
        if len(self.mean) != channels or len(self.std) != channels:
            raise DataError(
                f"{self.name}: images have {channels} channel(s) but there are {len(self.mean)} means and "
                f"{len(self.std)} standard deviations; give one of each per channel."
            )
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise DataError(
                f"{self.name}: means must be finite and standard deviations above 0, not {self.mean} and {self.std}."
            )

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.label_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one image: channels, height, width."""
        _, channels, height, width = self.train["image"].shape
        return channels, height, width

    @property
    def format(self) -> ImageFormat:
        """What its images are like."""
        return ImageFormat(self.shape, self.mean, self.std)

    def normalise(self, images: Tensor) -> Tensor:
        """Return pixels as a network takes them: ``(x / 255 - mean) / std``.

        Parameters
        ----------
        images : uint8 ``[b, channels, height, width]``, on any device. Float input is taken as normalised already and
            returned as it is.

        Returns
        -------
        float32, of the same shape and on the same device.
        """
        if images.is_floating_point():
            return images
        mean, std = (_of_channels(tuple(each), torch.float32, images.device) for each in (self.mean, self.std))
        return images.to(torch.float32).div_(255).sub_(mean).div_(std)

    def to(self, device: torch.device | str) -> DataSet:
        """Return the data set with its tensors on `device`; itself where they are there already."""
        target = torch.device(device)
        # "cuda" names the current device; without the index it would never equal the tensors' own.
        if target.type == "cuda" and target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
        if all(column.device == target for data in (self.train, self.test) for column in data.values()):
            return self
        move = {split: {k: v.to(target) for k, v in getattr(self, split).items()} for split in ("train", "test")}
        return replace(self, train=move["train"], test=move["test"])


@lru_cache(maxsize=32)  # augmented images are normalised in every step
def _of_channels(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return to_device(torch.tensor(numbers, dtype=dtype).view(-1, 1, 1), device)


def describe(shape: tuple[int, ...]) -> str:
    """Return an image shape in words, such as ``"3 x 32 x 32"`` (channels, height, width)."""
    return " x ".join(map(str, shape))


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel, of pixels scaled to 0..1.

    Exact, from a histogram of the pixel values. A constant channel gets the deviation 1, so that it can be divided by.

    Parameters
    ----------
    images : uint8 ``[n, channels, height, width]``.
    """
    means, deviations = [], []
    values = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(images.shape[1]):
        counts = torch.zeros(256, dtype=torch.int64)
        for chunk in torch.split(images[:, channel], 4096):  # bincount makes an int64 copy of what it counts
            counts += torch.bincount(chunk.flatten(), minlength=256)
        share = counts.double() / counts.sum()
        mean = float((share * values).sum())
        deviation = math.sqrt(float((share * (values - mean) ** 2).sum()))
        means.append(mean)
        deviations.append(deviation if deviation > 1e-9 else 1.0)
    return tuple(means), tuple(deviations)


def _check(where: str, data: Data, classes: int) -> None:
    for needed in ("image", "label"):
        if needed not in data:
            raise DataError(f"{where}: the column {needed!r} is missing.{did_you_mean(needed, data)}")
    images, labels = data["image"], data["label"]
    if images.ndim != 4 or images.dtype not in (torch.uint8, torch.float32):
        raise DataError(
            f"{where}: images must be uint8 [n, channels, height, width], not {images.dtype} {list(images.shape)}."
        )
    if not all(images.shape):
        raise DataError(f"{where}: there are no images (shape {list(images.shape)}).")
    for name, column in data.items():
        if len(column) != len(images):
            raise DataError(f"{where}: column {name!r} has {len(column)} rows but there are {len(images)} images.")
        if name != "image" and (column.ndim != 1 or column.dtype not in _INTEGERS):
            raise DataError(
                f"{where}: column {name!r} must hold one integer a row, not {column.dtype} {list(column.shape)}."
            )
    if images.is_floating_point() and not bool(torch.isfinite(images).all()):
        raise DataError(f"{where}: some pixels are NaN or infinite; clean the images first.")
    if labels.dtype != torch.int64:
        raise DataError(f"{where}: labels must be int64, not {labels.dtype}; convert them with .long().")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(f"{where}: labels lie in {low}..{high}, but {classes} classes allow 0..{classes - 1} only.")
