"""A federation as each side knows it: the server the sites' names and sizes, a site its own examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedkeep.data import Data, DataSet, Federation
from fedkeep.data.dataset import describe
from fedkeep.data.partition import Partition
from fedkeep.errors import DataError


@dataclass(frozen=True, eq=False)
class Roster(Federation):
    """What the server knows: every site's name and how many examples it holds. The test set is its own."""

    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def clients(self) -> Sequence[str]:
        return tuple(self.sizes)

    def size(self, client: str) -> int:
        return self.sizes[client]

    def data(self, client: str) -> Data:
        raise DataError(f"The examples of {client} are at its site; the server has none of them.")


def roster(dataset: DataSet, server: Data, sizes: Mapping[str, int]) -> Roster:
    """Return what the server knows; of the training images it keeps one, for its shape."""
    kept = replace(dataset, train={name: column[:1].clone() for name, column in dataset.train.items()})
    ordered = sorted(sizes, key=lambda name: (len(name), name) if name.isdecimal() else (0, name))
    return Roster(kept, _nobody(), server, sizes={name: sizes[name] for name in ordered})


@dataclass(frozen=True, eq=False)
class OwnData(Federation):
    """What a site knows: its own name and examples. Of the others it does not even know the number."""

    site: str = ""
    examples: Data = field(default_factory=dict)

    @property
    def clients(self) -> Sequence[str]:
        return (self.site,)

    def data(self, client: str) -> Data:
        return self.examples

    def to(self, device: torch.device | str) -> OwnData:
        return replace(self, examples={name: column.to(device) for name, column in self.examples.items()})


def own_data(site: str, dataset: DataSet, examples: Data) -> OwnData:
    """Return a site's own view of the federation; ``dataset`` says what all sites agree on."""
    return OwnData(dataset, _nobody(), {}, site=site, examples=examples)


def _nobody() -> Partition:
    """Return a partition that hands out no rows: here the sites hold what they hold."""
    return Partition("sites", {}, 0, 1, torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


def described(dataset: DataSet) -> dict[str, Any]:
    """Return what the sites' data have to agree with, and how all of them are normalised."""
    return {
        "label_names": list(dataset.label_names),
        "shape": list(dataset.shape),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
    }


def fitted(dataset: DataSet, wanted: Mapping[str, Any]) -> DataSet:
    """Return a site's data set with its classes numbered and its images normalised as the server says.

    A site that lacks some of the classes is no error, since its classes are told apart by their names.

    Raises
    ------
    DataError
        If there are other classes, or images of another shape.
    """
    names, shape = list(wanted["label_names"]), tuple(wanted["shape"])
    strangers = [name for name in dataset.label_names if name not in names]
    if strangers:
        raise DataError(
            f"{dataset.name} has {dataset.classes} classes, and of these {', '.join(map(repr, strangers[:5]))} not "
            f"among the run's {len(names)}: {', '.join(map(repr, names))}. Name this site's classes as the run does."
        )
    if dataset.shape != shape:
        raise DataError(
            f"{dataset.name} has images of {describe(dataset.shape)}, and the run is for {describe(shape)}. "
            "Bring this site's images to that size."
        )
    numbers = torch.tensor([names.index(name) for name in dataset.label_names])
    train, test = ({**half, "label": numbers[half["label"]]} for half in (dataset.train, dataset.test))
    mean, std = tuple(wanted["mean"]), tuple(wanted["std"])
    return replace(dataset, train=train, test=test, label_names=tuple(names), mean=mean, std=std)
