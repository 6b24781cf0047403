"""Data sets made of others: several as one, or some classes of one, such as FEMNIST's digits and letters."""

import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from fedkeep.data.dataset import Data, DataSet, channel_statistics, format_shape
from fedkeep.data.schema import GROUP
from fedkeep.errors import DataError


def concatenate(datasets: Sequence[DataSet]) -> DataSet:
    """Return several data sets as one, their classes one after the other.

    A class is called by its data set and its name, such as ``"mnist: 7"``. Columns other than images and labels are
    dropped. The normalisation is computed from all training images.
    """
    first = datasets[0]
    for dataset in datasets:
        if dataset.shape != first.shape:
            raise DataError(
                f"{dataset.name} cannot be joined to {first.name}: its images are {format_shape(dataset.shape)}, not "
                f"{format_shape(first.shape)} (channels, height, width)."
            )
        if not dataset.has_images:
            raise DataError(f"{dataset.name} cannot be joined to others: its inputs are not uint8 images.")
        if GROUP in dataset.train:
            raise DataError(f"{dataset.name} cannot be joined to others: data.group is of one data set alone.")
    offsets = [sum(dataset.num_classes for dataset in datasets[:number]) for number in range(len(datasets))]

    def stack(parts: Sequence[Data]) -> Data:
        labels = [part["label"] + offset for part, offset in zip(parts, offsets, strict=True)]
        return {"input": torch.cat([part["input"] for part in parts]), "label": torch.cat(labels)}

    train, test = stack([dataset.train for dataset in datasets]), stack([dataset.test for dataset in datasets])
    names = tuple(f"{dataset.name}: {name}" for dataset in datasets for name in dataset.label_names)
    notes = " ".join(f"{dataset.name}: {dataset.note}" for dataset in datasets if dataset.note)
    joined_name = "+".join(dataset.name for dataset in datasets)
    each = [dataset.test_held_out for dataset in datasets]
    held_out: bool | Literal["partly"] = all(one is True for one in each) or ("partly" if any(each) else False)
    normalisation = channel_statistics(train["input"])
    return DataSet(joined_name, train, test, names, *normalisation, notes, test_held_out=held_out)


def select_classes(dataset: DataSet, label_names: Sequence[str]) -> DataSet:
    """Return some classes of a data set, numbered in the order given."""
    missing = [name for name in label_names if name not in dataset.label_names]
    if missing:
        raise DataError(f"{dataset.name} has no class {', '.join(map(repr, missing))} in this copy.")
    new = torch.full((dataset.num_classes,), -1)
    new[[dataset.label_names.index(name) for name in label_names]] = torch.arange(len(label_names))

    def select(data: Data) -> Data:
        labels = new[data["label"]]
        return {name: column[labels >= 0] for name, column in ({**data, "label": labels}).items()}

    return replace(dataset, train=select(dataset.train), test=select(dataset.test), label_names=tuple(label_names))


def shared_classes(label_names: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """Return the classes that occur in both lists, as a mapping from the first list's name to the second's.

    Names are compared without that of their data set and in any case of letters; ``_`` is a space.
    """
    by_plain_name = {_plain(name): name for name in others}
    return {name: by_plain_name[_plain(name)] for name in label_names if _plain(name) in by_plain_name}


def _plain(label_name: str) -> str:
    return label_name.rpartition(": ")[2].replace("_", " ").casefold()


def femnist_digits(femnist: DataSet) -> DataSet:
    """Return FEMNIST's digits: 10 classes."""
    return replace(select_classes(femnist, string.digits), name="femnist-digits")


def femnist_alphabet(femnist: DataSet) -> DataSet:
    """Return FEMNIST's letters in 26 classes, a capital and its small letter in one, as in EMNIST's Letters."""
    letters = select_classes(femnist, string.ascii_uppercase + string.ascii_lowercase)
    names = tuple(string.ascii_uppercase)
    train, test = ({**data, "label": data["label"] % len(names)} for data in (letters.train, letters.test))
    return replace(letters, name="femnist-alphabet", train=train, test=test, label_names=names)


LETTERS = string.ascii_uppercase[10:] + string.ascii_lowercase[10:]
_INK_THRESHOLD = 32  # strokes are darker than this above the paper and its scanning noise
_LETTER_SIZE = 22  # pixels of the longer side in EMNIST
_BRIGHTNESS = 1.2  # enlarged strokes are paler; with this factor they are as bright as EMNIST's on average


def emnist_style_letters(femnist: DataSet) -> DataSet:
    """Return FEMNIST's letters from K and k on, which MNIST and EMNIST's letters A to J lack, in EMNIST's style."""
    chosen = select_classes(femnist, [name for name in LETTERS if name in femnist.label_names])
    splits = (chosen.train, chosen.test)
    train, test = ({"input": to_emnist_style(data["input"]), "label": data["label"]} for data in splits)
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
