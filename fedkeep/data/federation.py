"""A data set and which client holds which of its rows.

For a client test each client has test examples: those that the data name as its own, or a share that is held back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, overload

import numpy as np
import torch
from torch import Tensor

from fedkeep._utils.seeds import numpy_rng
from fedkeep.data.dataset import Data, DataSet, select_rows
from fedkeep.data.partition import ByColumn, Partition
from fedkeep.data.schema import GROUP
from fedkeep.data.task_stream import TaskStream
from fedkeep.errors import DataError


@dataclass(frozen=True)
class ClientNames(Sequence[str]):
    """The names ``"0"``, ``"1"``, ... of a number of clients, each made on demand."""

    num_clients: int

    def __len__(self) -> int:
        return self.num_clients

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(map(str, range(self.num_clients)[index]))
        return str(range(self.num_clients)[index])

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self.num_clients))

    def __contains__(self, name: object) -> bool:
        return self._find(name) is not None

    def index(self, name: str, start: int = 0, stop: int | None = None) -> int:
        """Return the index of a name, without a search."""
        found = self._find(name)
        if found is None or found not in range(self.num_clients)[start:stop]:
            raise ValueError(f"{name!r} is not a client")
        return found

    def _find(self, name: object) -> int | None:
        # Only the spelling that this sequence itself gives: "07", "+7" and "٧" would be second names of client 7.
        if isinstance(name, str) and name.isascii() and name.isdecimal() and str(int(name[:19])) == name:
            return int(name) if int(name) < self.num_clients else None
        return None


@dataclass(frozen=True, eq=False)
class Federation:
    """A data set divided among clients.

    The data set stays one tensor for each column and a client is a slice of an index, so that a client that is never
    asked costs nothing.

    ``dataset``: The data set of which clients hold training rows; the test split stays whole.
    ``partition``: Which client holds which rows of ``dataset.train``.
    ``server_data``: Examples that the server holds itself, as columns, such as an auxiliary set; may be empty.
    ``stream``: The tasks that this federation is a part of; None if there is only one.
    ``task``: Number of the current task, counted from 1.
    ``owners``: By row of the whole test split, the number of the client whose own it is; None: it is for all.
    """

    dataset: DataSet
    partition: Partition
    server_data: Data = field(default_factory=dict)
    stream: TaskStream | None = None
    task: int = 1
    owners: Tensor | None = None

    holds_client_data: ClassVar[bool] = True
    """Whether the clients' examples are here, as in a simulation, and not at sites of their own."""

    def __post_init__(self) -> None:
        rows, have = self.partition.rows, len(self.dataset.train["label"])
        if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= have):
            raise DataError(
                f"The partition names rows {int(rows.min())} to {int(rows.max())}, but {self.dataset.name} has {have} "
                "training rows. Partition this data set, not another."
            )

    @classmethod
    def from_stream(cls, stream: TaskStream, task: int = 1, server_data: Data | None = None) -> Federation:
        """Return the federation of one task, with the test images of all classes so far.

        ``task``: Number of the task, counted from 1.
        ``server_data``: Examples that the server holds itself, as columns.
        """
        return cls(stream.dataset_of(task), stream.tasks[task - 1].partition, server_data or {}, stream, task)

    @property
    def clients(self) -> Sequence[str]:
        """The clients' names, ``"0"`` to the last, made on demand."""
        return ClientNames(len(self.partition))

    @property
    def holds_test_data(self) -> bool:
        """Whether the test examples are here, and not at sites."""
        return True

    @property
    def cumulative_classes(self) -> tuple[int, ...]:
        """Number of classes that have arrived by the end of each task so far, the current one included."""
        if self.stream is None:
            return (self.dataset.num_classes,)
        return tuple(task.num_classes for task in self.stream.tasks[: self.task])

    @property
    def partitions(self) -> Sequence[Partition]:
        """The partitions of all tasks."""
        return (self.partition,) if self.stream is None else [task.partition for task in self.stream.tasks]

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return 1 if self.stream is None else len(self.stream.tasks)

    def for_task(self, task: int) -> Federation:
        """Return the federation of another task, counted from 1."""
        if self.stream is None:
            return self
        partition = self.stream.tasks[task - 1].partition
        return replace(self, dataset=self.stream.dataset_of(task), partition=partition, task=task)

    def data(self, client: str) -> Data:
        """Return a client's training rows, every column, on the data set's device."""
        train = self.dataset.train
        rows = self.partition[self._index(client)].to(train["label"].device)
        return {name: column.index_select(0, rows) for name, column in train.items()}

    def test_data(self, client: str) -> Data:
        """Return a client's own test rows, of the classes that have arrived."""
        assert self.owners is not None
        test = self.dataset.test
        owners = self.owners if self.stream is None else self.owners[self.stream.tasks[self.task - 1].test]
        rows = (owners == self._index(client)).nonzero().flatten().to(test["label"].device)
        return {name: column.index_select(0, rows) for name, column in test.items()}

    def num_examples(self, client: str) -> int:
        """Return the number of a client's training rows; errors as in `data`."""
        return self.partition.size(self._index(client))

    def total_examples(self, client: str) -> int:
        """Return a client's number of training rows in this and all earlier tasks; errors as in `data`."""
        if self.stream is None:
            return self.num_examples(client)
        index = self._index(client)
        return sum(task.partition.size(index) for task in self.stream.tasks[: self.task])

    def to(self, device: torch.device | str) -> Federation:
        """Return the federation with its data set on a device; the partition's index stays where it is."""
        dataset = self.dataset.to(device)
        if dataset is self.dataset:
            return self
        server_data = {name: column.to(device) for name, column in self.server_data.items()}
        moved = replace(self, dataset=dataset, server_data=server_data)
        if self.stream is None:
            return moved
        return replace(moved, stream=replace(self.stream, dataset=self.stream.dataset.to(device))).for_task(self.task)

    def _index(self, client: str) -> int:
        try:
            return self.clients.index(client)
        except ValueError:
            count = len(self.partition)
            raise DataError(f"There is no client {client!r}. The {count} clients are '0' to '{count - 1}'.") from None


ADVICE = (
    "Mark rows of a table as test (data.split), give clients test files (clients/NAME/test.csv), or hold a share back: "
    "run.client_test=0.2."
)


def with_client_test(federation: Federation, how: float | Literal["own"]) -> Federation:
    """Return a federation of which every test example is a client's own, and no client trains on one.

    ``how``: The share of each client's examples that is held back, or ``own`` for the test examples that the data name
        as a client's, by the column of the partition.
    """
    return _named_tests(federation) if how == "own" else _held_back(federation, how)


def hold_out_client_test(dataset: DataSet, share: float) -> DataSet:
    """Return a site's data set of which a share of the training examples is held back as its test split."""
    rows = len(dataset.train["label"])
    if not bool(_choose(torch.arange(rows), torch.zeros(rows, dtype=torch.int64), dataset.train, share).any()):
        return replace(dataset, test_held_out="nothing")
    everything = Partition("all", {}, 0, 1, torch.arange(rows), torch.tensor([0, rows]))
    found = _held_back(Federation(dataset, everything), share)
    return replace(found.dataset, train=select_rows(dataset.train, found.partition.rows), test_held_out=False)


def _named_tests(federation: Federation) -> Federation:
    partition, dataset = federation.partition, federation.dataset
    if partition.scheme != ByColumn.name:
        raise DataError(
            f"run.client_test=own takes the test examples that the data name as a client's, and with the partition "
            f"{partition.scheme!r} clients have no names in the data. Take partition.scheme=column, or run.client_test="
            "0.2."
        )
    column = partition.settings["column"]
    names, first = np.unique(dataset.train[column].cpu()[partition.rows].numpy(), return_index=True)
    wanted = dataset.test[column].cpu().numpy()
    place = np.searchsorted(names, wanted).clip(max=len(names) - 1)
    owners = np.where(names[place] == wanted, partition.holders.numpy()[first[place]], -1)
    rows = torch.from_numpy(np.flatnonzero(owners >= 0))
    if not len(rows):
        raise DataError(f"{dataset.name}: none of {len(owners)} test examples is named as a client's own. {ADVICE}")
    left = len(owners) - len(rows)
    note = f"{left} of {len(owners)} test examples are of no client that trains, and nobody tests on them."
    note = " ".join(filter(None, (dataset.note, note * bool(left))))
    tested = replace(dataset, test=select_rows(dataset.test, rows), note=note)
    return replace(federation, dataset=tested, owners=torch.from_numpy(owners)[rows])


def _held_back(federation: Federation, share: float) -> Federation:
    stream = federation.stream
    dataset = federation.dataset if stream is None else stream.dataset
    holders = [(partition.rows, partition.holders) for partition in federation.partitions]
    if GROUP in dataset.train:  # a group is held back whole, whoever holds parts of it, and in all tasks
        rows_held, of = (torch.cat(parts) for parts in zip(*holders, strict=True))
        chosen = _choose(rows_held, of, dataset.train, share)
        taken_of = torch.split(chosen, [len(rows) for rows, _ in holders])
    else:
        taken_of = tuple(_choose(*one, dataset.train, share) for one in holders)
    pairs = [*zip(federation.partitions, taken_of, strict=True)]
    rows = torch.cat([partition.rows[taken] for partition, taken in pairs])
    if not len(rows):
        raise DataError(
            f"run.client_test={share:g} holds none of a client's examples back, and the largest has "
            f"{max(int(one.sizes.max()) for one in federation.partitions)}. Raise it."
        )
    unused = len(dataset.test["label"])
    if torch.equal(dataset.train["input"][-unused:], dataset.test["input"]):
        unused = 0  # they were given back to the training split
    note = f"Its {unused} test examples are not used: clients test on what they hold back." * bool(unused)
    note = " ".join(filter(None, (dataset.note, note)))
    tested = replace(dataset, test=select_rows(dataset.train, rows), note=note)
    owners = torch.cat([partition.holders[taken] for partition, taken in pairs])
    rest = [_without(partition, taken) for partition, taken in pairs]
    if stream is None:
        return replace(federation, dataset=tested, partition=rest[0], owners=owners)
    labels = tested.test["label"]
    tasks = tuple(
        replace(task, partition=kept, test=(labels < task.num_classes).nonzero().flatten())
        for task, kept in zip(stream.tasks, rest, strict=True)
    )
    whole = replace(federation, stream=replace(stream, dataset=tested, tasks=tasks), owners=owners)
    return whole.for_task(federation.task)


def _choose(rows: Tensor, holders: Tensor, train: Data, share: float) -> Tensor:
    """Choose a share of each client's rows, spread over its classes, or of its groups; always the same ones.

    ``rows``, ``holders``: int64 ``[rows held]``: examples, and which client holds each.
    Returns: bool ``[rows held]``, true for a row that is held back.
    """
    owner, label = holders.numpy(), train["label"].cpu()[rows].numpy()
    unit = first = np.arange(len(owner))
    if GROUP in train:
        group = train[GROUP].cpu()[rows].numpy()
        _, begin, same = np.unique(group, return_index=True, return_inverse=True)
        pairs = np.stack([owner[begin][same.reshape(-1)], group])  # it counts for the client of its first row
        _, first, unit = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
    keys = numpy_rng(0, "client test").random(len(first))  # no seed of a run, as of all test splits
    order = np.lexsort((keys, label[first], owner[first]))
    of = owner[first][order]
    rank = np.arange(len(of)) - np.searchsorted(of, of)  # within a client, class after class
    chosen: np.ndarray[Any, np.dtype[np.bool_]] = np.empty(len(of), dtype=bool)
    chosen[order] = np.floor((rank + 1) * share) > np.floor(rank * share)
    return torch.from_numpy(chosen[unit.reshape(-1)])


def _without(partition: Partition, taken: Tensor) -> Partition:
    sizes = torch.bincount(partition.holders[~taken], minlength=len(partition))
    return replace(partition, rows=partition.rows[~taken], offsets=torch.cat((sizes.new_zeros(1), sizes.cumsum(0))))
