"""A federation as each side knows it: the server the sites' names and sizes, a site its own examples.

Both know which classes arrive in which task: that follows from the recipe, the seed and the classes' names alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedkeep.data import Data, DataSet, Federation, TaskStream
from fedkeep.data.dataset import format_shape
from fedkeep.data.partition import Partition
from fedkeep.errors import DataError
from fedkeep.experiment.recipe import Recipe


@dataclass(frozen=True, eq=False)
class ServerView(Federation):
    """What the server knows: every site's name and how many examples it holds in each task. The test set is its own."""

    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def clients(self) -> Sequence[str]:
        return tuple(self.sizes)

    def num_examples(self, client: str) -> int:
        return self.sizes[client][self.task - 1]

    def total_size(self, client: str) -> int:
        """Return how many examples a site has had, this task's included; it may have kept some of earlier ones."""
        return sum(self.sizes[client][: self.task])

    def data(self, client: str) -> Data:
        raise DataError(f"The examples of {client} are at its site; the server has none of them.")


def server_view(
    recipe: Recipe, seed: int, dataset: DataSet, server: Data, sizes: Mapping[str, Sequence[int]]
) -> ServerView:
    """Return what the server knows; of the training images it keeps one, for its shape.

    Parameters
    ----------
    server : what it holds itself.
    sizes : examples of each site in each task.
    """
    dataset = replace(dataset, train={name: column[:1].clone() for name, column in dataset.train.items()})
    stream = class_schedule(recipe, seed, dataset)
    first = dataset if stream is None else Federation.from_stream(stream, 1).dataset
    ordered = sorted(sizes, key=lambda name: (len(name), name) if name.isdecimal() else (0, name))
    return ServerView(first, Partition.empty(), server, stream, sizes={name: sizes[name] for name in ordered})


def class_schedule(recipe: Recipe, seed: int, dataset: DataSet) -> TaskStream | None:
    """Return which classes arrive when, which server and sites find out alike; None without tasks."""
    return recipe.tasks.class_schedule(dataset, seed) if recipe.has_tasks else None


@dataclass(frozen=True, eq=False)
class SiteView(Federation):
    """What a site knows: its own name, and examples of each task. Of the others it does not even know the number."""

    site: str = ""
    examples: Sequence[Data] = ()

    @property
    def clients(self) -> Sequence[str]:
        return (self.site,)

    def for_task(self, task: int) -> SiteView:
        return replace(self, task=task)

    def data(self, client: str) -> Data:
        return self.examples[self.task - 1]

    def num_examples(self, client: str) -> int:
        return len(self.data(client)["label"])

    def to(self, device: torch.device | str) -> SiteView:
        moved = [{name: column.to(device) for name, column in data.items()} for data in self.examples]
        return replace(self, examples=moved)


def site_view(site: str, dataset: DataSet, stream: TaskStream | None) -> SiteView:
    """Return the view of a site all of whose training examples are its own; of a task it may have none."""
    if stream is None:
        return SiteView(dataset, Partition.empty(), site=site, examples=[dataset.train])
    train = stream.dataset.train
    rows = [task.new_class_rows(train["label"]) for task in stream.tasks]
    examples = [{name: column[own] for name, column in train.items()} for own in rows]
    return SiteView(stream.dataset, Partition.empty(), stream=stream, site=site, examples=examples)


def client_view(federation: Federation, client: str, site: str) -> SiteView:
    """Return the view of a site that plays one of the clients among whom a data set was split."""
    examples = [federation.for_task(task).data(client) for task in range(1, federation.num_tasks + 1)]
    return SiteView(federation.dataset, Partition.empty(), stream=federation.stream, site=site, examples=examples)


def describe_dataset(dataset: DataSet, left_out: bool, generator: str) -> dict[str, Any]:
    """Return what the sites' data have to agree with, and how all of them are normalised.

    ``left_out`` says that no party may train on the images that the run's generator learned from; ``generator`` is its
    hash.
    """
    return {
        "left_out": left_out,
        "generator": generator,
        "label_names": list(dataset.label_names),
        "shape": list(dataset.shape),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
    }


def match_dataset(dataset: DataSet, wanted: Mapping[str, Any]) -> DataSet:
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
            f"{dataset.name} has {dataset.num_classes} classes, and of these {', '.join(map(repr, strangers[:5]))} not "
            f"among the run's {len(names)}: {', '.join(map(repr, names))}. Name this site's classes as the run does."
        )
    if dataset.shape != shape:
        raise DataError(
            f"{dataset.name} has images of {format_shape(dataset.shape)}, and the run is for {format_shape(shape)}. "
            "Bring this site's images to that size."
        )
    numbers = torch.tensor([names.index(name) for name in dataset.label_names])
    train, test = ({**half, "label": numbers[half["label"]]} for half in (dataset.train, dataset.test))
    mean, std = tuple(wanted["mean"]), tuple(wanted["std"])
    return replace(dataset, train=train, test=test, label_names=tuple(names), mean=mean, std=std)
