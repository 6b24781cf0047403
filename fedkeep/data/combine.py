"""Data sets made of others: several as one, or some classes of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedkeep.data.dataset import Data, DataSet, channel_statistics, describe
from fedkeep.errors import DataError


def join(sets: Sequence[DataSet]) -> DataSet:
    """Return several data sets as one, their classes one after the other.

    A class is called by its set and its name, such as ``"mnist: 7"``. Columns other than images and labels are left
    out, and the normalisation is computed from all training images.

    Raises
    ------
    DataError
        For images of different sizes, or that are normalised already.
    """
    for one in sets:
        if one.shape != sets[0].shape:
            raise DataError(
                f"{one.name} cannot be joined to {sets[0].name}: its images are {describe(one.shape)}, not "
                f"{describe(sets[0].shape)} (channels, height, width)."
            )
        if one.train["image"].is_floating_point() or one.test["image"].is_floating_point():
            raise DataError(f"{one.name} cannot be joined to others: its images are normalised already.")
    first = [sum(one.classes for one in sets[:number]) for number in range(len(sets))]

    def joined(halves: Sequence[Data]) -> Data:
        labels = [half["label"] + start for half, start in zip(halves, first, strict=True)]
        return {"image": torch.cat([half["image"] for half in halves]), "label": torch.cat(labels)}

    train, test = joined([one.train for one in sets]), joined([one.test for one in sets])
    names = tuple(f"{one.name}: {name}" for one in sets for name in one.label_names)
    notes = " ".join(f"{one.name}: {one.note}" for one in sets if one.note)
    return DataSet("+".join(one.name for one in sets), train, test, names, *channel_statistics(train["image"]), notes)


def choose(dataset: DataSet, label_names: Sequence[str]) -> DataSet:
    """Return some classes of a data set, numbered in the order given.

    Raises
    ------
    DataError
        For a class that it does not have.
    """
    missing = [name for name in label_names if name not in dataset.label_names]
    if missing:
        raise DataError(f"{dataset.name} has no class {', '.join(map(repr, missing))} in this copy.")
    new = torch.full((dataset.classes,), -1)
    new[[dataset.label_names.index(name) for name in label_names]] = torch.arange(len(label_names))

    def chosen(half: Data) -> Data:
        labels = new[half["label"]]
        return {name: column[labels >= 0] for name, column in ({**half, "label": labels}).items()}

    return replace(dataset, train=chosen(dataset.train), test=chosen(dataset.test), label_names=tuple(label_names))


def in_common(label_names: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """Return the classes that others have too, each with its name there.

    Classes are known by their names, without that of their data set and in any case of letters; ``_`` is a space.
    """
    theirs = {_plain(name): name for name in others}
    return {name: theirs[_plain(name)] for name in label_names if _plain(name) in theirs}


def _plain(label_name: str) -> str:
    return label_name.rpartition(": ")[2].replace("_", " ").casefold()
