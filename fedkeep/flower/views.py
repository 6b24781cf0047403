"""A federation as each party knows it: the server knows the sites' names and sizes, a site its own examples.

All parties know which classes arrive in which task: this follows from the recipe, the seed and the classes' names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch

from fedkeep.data import Data, DataSet, Federation, TaskStream
from fedkeep.data.columns import columns_to_json
from fedkeep.data.dataset import describe_input, format_shape, select_rows
from fedkeep.data.partition import Partition
from fedkeep.errors import DataError
from fedkeep.experiment.recipe import Recipe
from fedkeep.models.weights import tensor_hash

log = logging.getLogger(__name__)
ALMOST_ZERO = 1e-200
"""The deviation of a constant column: above 0, as a scale must be, and 0 when squared."""


@dataclass(frozen=True, eq=False)
class ServerView(Federation):
    """The server's view: every site's name and number of examples in each task, and the server's own test set.

    ``sizes``: By site, its number of examples in each task.
    ``client_test``: Whether sites test models, each on its own test examples.
    """

    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    client_test: bool = False
    holds_client_data = False

    @property
    def clients(self) -> Sequence[str]:
        return tuple(self.sizes)

    @property
    def holds_test_data(self) -> bool:
        return not self.client_test

    def num_examples(self, client: str) -> int:
        return self.sizes[client][self.task - 1]

    def total_examples(self, client: str) -> int:
        """Return a site's number of examples in this and all earlier tasks, of which it may have stored some."""
        return sum(self.sizes[client][: self.task])

    def data(self, client: str) -> Data:
        raise DataError(f"The examples of {client} are at its site; the server has none of them.")


def server_view(
    recipe: Recipe, seed: int, dataset: DataSet, server: Data, sizes: Mapping[str, Sequence[int]]
) -> ServerView:
    """Return the server's view. Of the training images it holds only the first, which gives the shape.

    ``dataset``: The server's data set, with the test images.
    ``sizes``: By site, its number of examples in each task.
    """
    dataset = replace(dataset, train={name: column[:1].clone() for name, column in dataset.train.items()})
    stream = split_classes(recipe, seed, dataset)
    if recipe.run.client_test and stream is not None and not len(stream.tasks[0].test):
        # A stand-in for tests that are at the sites, with an example of each class.
        inputs = dataset.test["input"][:1].expand(dataset.num_classes, *dataset.shape)
        dataset = replace(dataset, test={"input": inputs, "label": torch.arange(dataset.num_classes)})
        stream = split_classes(recipe, seed, dataset)
    first = dataset if stream is None else Federation.from_stream(stream, 1).dataset
    ordered = sorted(sizes, key=lambda name: (len(name), name) if name.isdecimal() else (0, name))
    of_sites, client_test = {name: sizes[name] for name in ordered}, bool(recipe.run.client_test)
    return ServerView(first, Partition.empty(), server, stream, sizes=of_sites, client_test=client_test)


def split_classes(recipe: Recipe, seed: int, dataset: DataSet) -> TaskStream | None:
    """Return which classes arrive in which task. The server and all sites compute the same.

    ``dataset``: A data set with the run's classes.
    Returns: The tasks, or None for a run without tasks.
    """
    return recipe.tasks.split_classes(dataset, seed) if recipe.has_tasks else None


@dataclass(frozen=True, eq=False)
class SiteView(Federation):
    """A site's view: its own name and examples. It knows nothing of other sites, not even their number.

    ``examples``: The site's examples in each task.
    ``tests``: Its test examples of the classes that have arrived by each task; empty where the server tests.
    """

    site: str = ""
    examples: Sequence[Data] = ()
    tests: Sequence[Data] = ()

    @property
    def clients(self) -> Sequence[str]:
        return (self.site,)

    def for_task(self, task: int) -> SiteView:
        return replace(self, task=task)

    def data(self, client: str) -> Data:
        return self.examples[self.task - 1]

    def test_data(self, client: str) -> Data:
        return self.tests[self.task - 1]

    def num_examples(self, client: str) -> int:
        return len(self.data(client)["label"])

    def digest(self) -> str:
        """Return a hash of all examples, by which the site notices that it has others later."""
        columns = [tensor_hash(data[name]) for data in (*self.examples, *self.tests) for name in sorted(data)]
        return sha256(" ".join(columns).encode()).hexdigest()[:16]

    def to(self, device: torch.device | str) -> SiteView:
        examples, tests = (
            [{name: column.to(device) for name, column in data.items()} for data in each]
            for each in (self.examples, self.tests)
        )
        return replace(self, examples=examples, tests=tests)


def site_view(site: str, dataset: DataSet, stream: TaskStream | None, tests: bool = False) -> SiteView:
    """Return the view of a site that holds a whole data set. Of some tasks it may have no example.

    ``stream``: Which classes arrive in which task; None without tasks.
    ``tests``: Whether it tests models on its own test examples.
    """
    none = dataset.test_held_out == "nothing"  # its test split are its training examples
    if stream is None:
        own = [select_rows(dataset.test, torch.arange(0)) if none else dataset.test] if tests else []
        return SiteView(dataset, Partition.empty(), site=site, examples=[dataset.train], tests=own)
    train = stream.dataset.train
    rows_by_task = [task.new_class_rows(train["label"]) for task in stream.tasks]
    examples = [select_rows(train, rows) for rows in rows_by_task]
    own = [select_rows(stream.dataset.test, task.test[: 0 if none else None]) for task in stream.tasks] if tests else []
    return SiteView(stream.dataset, Partition.empty(), stream=stream, site=site, examples=examples, tests=own)


def client_view(federation: Federation, client: str, site: str) -> SiteView:
    """Return the view of a site that stands for one of the clients over which a data set was split."""
    tasks = [federation.for_task(task) for task in range(1, federation.num_tasks + 1)]
    examples = [task.data(client) for task in tasks]
    tests = [] if federation.owners is None else [task.test_data(client) for task in tasks]
    stream = federation.stream
    return SiteView(federation.dataset, Partition.empty(), stream=stream, site=site, examples=examples, tests=tests)


def describe_dataset(dataset: DataSet, left_out: bool, generator: str) -> dict[str, Any]:
    """Return the server's requirements on the sites' data, and the mean and standard deviation that all scale with.

    ``left_out``: Whether the generator's training images are kept out of training.
    ``generator``: The generator's hash; empty without one.
    Returns: The requirements, as `match_dataset` takes them.
    """
    return {
        "left_out": left_out,
        "generator": generator,
        "label_names": list(dataset.label_names),
        "shape": list(dataset.shape),
        "kind": dataset.kind,
        "columns": columns_to_json(dataset.columns),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
    }


def with_true_deviations(dataset: DataSet) -> DataSet:
    """Return a site's data set with its columns' means and deviations over all its training rows, for pooling.

    The columns were scaled without the held-out rows, a constant one by 1; its deviation is almost 0 here.

    ``dataset``: A data set with scaled columns.
    """
    if not dataset.columns:
        return dataset
    inputs, place, columns = dataset.train["input"].double(), 0, []
    for column in dataset.columns:
        if column.kind != "category":
            shift, factor = float(inputs[:, place].mean()), float(inputs[:, place].std(correction=0))
            scale = column.scale * factor if factor > 1e-6 else ALMOST_ZERO
            column = replace(column, mean=column.mean + column.scale * shift, scale=scale)
        columns.append(column)
        place += len(column.features)
    return replace(dataset, columns=tuple(columns))


def match_dataset(dataset: DataSet, wanted: Mapping[str, Any]) -> DataSet:
    """Return a site's data set with the run's numbers of classes, mean and standard deviation.

    A site may lack some of the run's classes: classes are identified by their names.

    ``wanted``: The server's requirements, from `describe_dataset`.
    """
    names, shape = list(wanted["label_names"]), tuple(wanted["shape"])
    unknown = [name for name in dataset.label_names if name not in names]
    if unknown:
        log.error("this site's classes that the run has not: %s", ", ".join(map(repr, unknown)))
        raise DataError(  # without their names, which may be misplaced cells
            f"the site's data have {dataset.num_classes} classes, and {len(unknown)} of them are not among the run's "
            f"{len(names)}: {', '.join(map(repr, names))}. Its own log names them. Name this site's classes as the run "
            "does."
        )
    if dataset.shape != shape or dataset.kind != wanted["kind"]:
        raise DataError(
            f"the site's data are {describe_input(dataset.train['input'])}, and the run is for {wanted['kind']} of "
            f"{format_shape(shape)}. Bring this site's data to that form."
        )
    numbers = torch.tensor([names.index(name) for name in dataset.label_names])
    train, test = ({**half, "label": numbers[half["label"]]} for half in (dataset.train, dataset.test))
    mean, std = tuple(wanted["mean"]), tuple(wanted["std"])
    return replace(dataset, train=train, test=test, label_names=tuple(names), mean=mean, std=std)
