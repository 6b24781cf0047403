"""Data sets made of others: several as one, or some classes of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedkeep.data.dataset import Data, DataSet, channel_statistics, format_shape
from fedkeep.data.schema import GROUP
from fedkeep.errors import DataError


def concatenate(datasets: Sequence[DataSet]) -> DataSet:
    """Return several data sets as one, their classes one after the other.

    A class is called by its data set and its name, such as ``"mnist: 7"``. Columns other than images and labels are
    dropped, except for groups, which stay whole: in a data set without them every example is a group of its own. The
    normalisation is computed from all training images.
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
    offsets = [sum(dataset.num_classes for dataset in datasets[:number]) for number in range(len(datasets))]

    def stack(parts: Sequence[Data]) -> Data:
        labels = [part["label"] + offset for part, offset in zip(parts, offsets, strict=True)]
        return {"input": torch.cat([part["input"] for part in parts]), "label": torch.cat(labels)}

    of_train, of_test = _groups(datasets)
    train = {**stack([dataset.train for dataset in datasets]), **of_train}
    test = {**stack([dataset.test for dataset in datasets]), **of_test}
    names = tuple(f"{dataset.name}: {name}" for dataset in datasets for name in dataset.label_names)
    notes = " ".join(f"{dataset.name}: {dataset.note}" for dataset in datasets if dataset.note)
    joined_name = "+".join(dataset.name for dataset in datasets)
    return DataSet(joined_name, train, test, names, *channel_statistics(train["input"]), notes)


def _groups(datasets: Sequence[DataSet]) -> tuple[Data, Data]:
    """Return the group of every example, training and test, numbered so that no two data sets share a group."""
    if not any(GROUP in dataset.train for dataset in datasets):
        return {}, {}
    train, test, first = [], [], 0
    for dataset in datasets:
        sizes = len(dataset.train["label"]), len(dataset.test["label"])
        known = torch.cat((dataset.train[GROUP], dataset.test[GROUP])) if GROUP in dataset.train else None
        numbers = first + (torch.arange(sum(sizes)) if known is None else known)
        train.append(numbers[: sizes[0]])
        test.append(numbers[sizes[0] :])
        first = int(numbers.max()) + 1
    return {GROUP: torch.cat(train)}, {GROUP: torch.cat(test)}


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
