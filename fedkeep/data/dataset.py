"""A labelled data set as tensors: everything in memory, the pixels of images as they are stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fedkeep._utils.torch_state import to_device
from fedkeep.data.columns import TableColumn
from fedkeep.errors import DataError, did_you_mean

Data = Mapping[str, Tensor]
"""Columns of one length, by name."""


def select_rows(data: Data, rows: Tensor) -> dict[str, Tensor]:
    """Return some rows of all columns; ``rows`` are numbers, or bool with one for each row."""
    return {name: column[rows.to(column.device)] for name, column in data.items()}


@dataclass(frozen=True)
class ImageFormat:
    """Shape and normalisation of a data set's images, for code that generates images.

    ``shape``: Channels, height, width.
    ``mean``, ``std``: Per channel, of pixels scaled to 0..1.
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return ``(pixels - mean) / std``; gradients flow.

        ``pixels``: Floating point ``[b, channels, height, width]``, in 0..1.
        Returns: The same shape, type and device.
        """
        mean, std = (_per_channel(tuple(each), pixels.dtype, pixels.device) for each in (self.mean, self.std))
        return (pixels - mean) / std


_KINDS = {torch.uint8: "images", torch.int64: "token ids"}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class DataSet:
    """A training and a test split, their class names and their normalisation.

    ``name``: The data set's name in tables and run folders.
    ``train``, ``test``: The columns ``"input"``, ``"label"`` (int64 ``[n]``, 0 to num_classes - 1) and any further
        integer columns ``[n]``, such as ``"writer"``. The input is what the network takes: images, uint8 ``[n,
        channels, height, width]``; token ids, int64 ``[n, length]``; or numbers that are scaled already, float32 of any
        shape ``[n, ...]``.
    ``label_names``: The class names; their number is the number of classes. A site may have one alone; a run needs two.
    ``mean``, ``std``: Of images, per channel, of pixels scaled to 0..1, which `normalise` uses. Empty for all other
        inputs.
    ``note``: What a reader of results has to know about this copy; may be empty.
    ``values``: What the numbers of a further column stand for, such as the names of the clients.
    ``columns``: How a table's columns became features, float32 ``[n, features]``; empty for other inputs.
    ``test_held_out``: Whether test examples were taken out of the training examples, whose rows then have other
        numbers.
    """

    name: str
    train: Data
    test: Data
    label_names: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    note: str = ""
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: tuple[TableColumn, ...] = ()
    test_held_out: bool | Literal["partly", "nothing"] = False

    def __post_init__(self) -> None:
        if not self.label_names:
            raise DataError(f"{self.name}: there are no classes. Give the name of each in label_names.")
        repeated = [name for name, count in Counter(self.label_names).items() if count > 1]
        if repeated:
            raise DataError(
                f"{self.name}: two classes have the same name: {', '.join(map(repr, repeated))}. Rename one."
            )
        for split, data in (("train", self.train), ("test", self.test)):
            _check_columns(f"{self.name}, {split}", data, len(self.label_names))
        if self.train.keys() != self.test.keys():
            raise DataError(
                f"{self.name}: train has the columns {', '.join(sorted(self.train))} but test has "
                f"{', '.join(sorted(self.test))}; both need the same."
            )
        test = self.test["input"]
        if tuple(test.shape[1:]) != self.shape or test.dtype != self.train["input"].dtype:
            raise DataError(
                f"{self.name}: inputs of train are {describe_input(self.train['input'])}, but those of test are "
                f"{describe_input(test)}; bring both splits to one size and type."
            )
        self._check_normalisation()

    def _check_normalisation(self) -> None:
        if self.features and (self.shape != (len(self.features),) or not self.train["input"].is_floating_point()):
            raise DataError(
                f"{self.name}: {len(self.features)} features are named, but inputs are "
                f"{describe_input(self.train['input'])}."
            )
        channels = self.shape[0] if self.has_images else 0
        if len(self.mean) != channels or len(self.std) != channels:
            raise DataError(
                f"{self.name}: inputs have {channels} channel(s) but there are {len(self.mean)} means and "
                f"{len(self.std)} standard deviations; give one of each per channel of an image, and none for other "
                "inputs."
            )
        if channels and (not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0):
            raise DataError(
                f"{self.name}: means must be finite and standard deviations above 0, not {self.mean} and {self.std}."
            )

    @property
    def features(self) -> tuple[str, ...]:
        """The names of a table's features, such as ``"age"`` or ``"sex=f"``; empty for other inputs."""
        return tuple(feature for column in self.columns for feature in column.features)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.label_names)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input; of an image: channels, height, width."""
        return tuple(self.train["input"].shape[1:])

    @property
    def kind(self) -> str:
        """What the inputs are: ``"images"`` with their pixels as they are stored, ``"token ids"`` or ``"numbers"``."""
        return _KINDS.get(self.train["input"].dtype, "numbers")

    @property
    def has_images(self) -> bool:
        """Whether the inputs are images with their pixels as they are stored."""
        return self.kind == "images"

    @property
    def image_format(self) -> ImageFormat | None:
        """Shape and normalisation of its images; None without images."""
        if not self.has_images:
            return None
        channels, height, width = self.shape
        return ImageFormat((channels, height, width), self.mean, self.std)

    def normalise(self, images: Tensor) -> Tensor:
        """Return inputs as a network takes them: of images ``(x / 255 - mean) / std``.

        ``images``: uint8 ``[b, channels, height, width]``, on any device. Other inputs are returned as they are.
        Returns: float32, of the same shape and on the same device.
        """
        if images.dtype != torch.uint8:
            return images
        mean, std = (_per_channel(tuple(each), torch.float32, images.device) for each in (self.mean, self.std))
        return images.to(torch.float32).div_(255).sub_(mean).div_(std)

    def to(self, device: torch.device | str) -> DataSet:
        """Return the data set with its tensors on a device; itself if they are there already."""
        target = torch.device(device)
        # "cuda" names the current device; without the index it would never equal the tensors' own.
        if target.type == "cuda" and target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
        if all(column.device == target for data in (self.train, self.test) for column in data.values()):
            return self
        train, test = ({name: column.to(target) for name, column in data.items()} for data in (self.train, self.test))
        return replace(self, train=train, test=test)


@lru_cache(maxsize=32)  # augmented images are normalised in every step
def _per_channel(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return to_device(torch.tensor(numbers, dtype=dtype).view(-1, 1, 1), device)


def format_shape(shape: tuple[int, ...]) -> str:
    """Return the shape of one input in words, such as ``"3 x 32 x 32"`` (channels, height, width)."""
    return " x ".join(map(str, shape)) or "one number"


def describe_input(inputs: Tensor) -> str:
    """Return the kind and the shape of inputs in words, such as ``"images of 3 x 32 x 32"``."""
    return f"{_KINDS.get(inputs.dtype, 'numbers')} of {format_shape(tuple(inputs.shape[1:]))}"


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel, of pixels scaled to 0..1.

    They are exact, from a histogram of the pixel values. A constant channel gets the deviation 1, so that one can
    divide by it.

    ``images``: uint8 ``[n, channels, height, width]``.
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


def _check_columns(where: str, data: Data, num_classes: int) -> None:
    for required in ("input", "label"):
        if required not in data:
            raise DataError(f"{where}: the column {required!r} is missing.{did_you_mean(required, data)}")
    inputs, labels = data["input"], data["label"]
    _check_input(where, inputs)
    for name, column in data.items():
        if len(column) != len(inputs):
            raise DataError(f"{where}: column {name!r} has {len(column)} rows but there are {len(inputs)} inputs.")
        if name != "input" and (column.ndim != 1 or column.dtype not in _INTEGERS):
            raise DataError(
                f"{where}: column {name!r} must hold one integer a row, not {column.dtype} {list(column.shape)}."
            )
    if labels.dtype != torch.int64:
        raise DataError(f"{where}: labels must be int64, not {labels.dtype}; convert them with .long().")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise DataError(f"{where}: labels lie in {low}..{high}, but {num_classes} classes allow 0..{num_classes - 1}.")


def _check_input(where: str, inputs: Tensor) -> None:
    images, tokens = inputs.dtype == torch.uint8, inputs.dtype == torch.int64
    if (images and inputs.ndim != 4) or (tokens and inputs.ndim != 2):
        raise DataError(
            f"{where}: uint8 inputs are images [n, channels, height, width] and int64 inputs are token ids "
            f"[n, length], not {list(inputs.shape)}. Give other numbers as float32."
        )
    if not (images or tokens or inputs.dtype == torch.float32) or inputs.ndim < 2:
        raise DataError(
            f"{where}: inputs must be uint8 images [n, channels, height, width], int64 token ids [n, length] or "
            f"float32 [n, ...], not {inputs.dtype} {list(inputs.shape)}."
        )
    if not all(inputs.shape):
        raise DataError(f"{where}: there are no inputs (shape {list(inputs.shape)}).")
    if tokens and int(inputs.min()) < 0:
        raise DataError(f"{where}: token ids count from 0, and the smallest here is {int(inputs.min())}.")
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        raise DataError(f"{where}: some inputs are NaN or infinite; clean the data first.")
