"""A data set and who holds which of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, overload

import torch

from fedkeep.data.dataset import Data, DataSet
from fedkeep.errors import DataError

if TYPE_CHECKING:
    from fedkeep.data.partition import Partition
    from fedkeep.data.tasks import TaskStream


@dataclass(frozen=True)
class ClientNames(Sequence[str]):
    """The names ``"0"``, ``"1"``, ... up to a number of clients, each made when it is asked for."""

    total: int

    def __len__(self) -> int:
        return self.total

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[str, ...]: ...
    def __getitem__(self, place: int | slice) -> str | tuple[str, ...]:
        if isinstance(place, slice):
            return tuple(map(str, range(self.total)[place]))
        return str(range(self.total)[place])

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self.total))

    def __contains__(self, name: object) -> bool:
        return self._find(name) is not None

    def index(self, name: str, start: int = 0, stop: int | None = None) -> int:
        """Return the place of a name without searching for it."""
        place = self._find(name)
        if place is None or place not in range(self.total)[start:stop]:
            raise ValueError(f"{name!r} is not a client")
        return place

    def _find(self, name: object) -> int | None:
        # Only the spelling that this sequence itself gives: "07", "+7" and "٧" would be second names of client 7.
        if isinstance(name, str) and name.isascii() and name.isdecimal() and str(int(name[:19])) == name:
            place = int(name)
            return place if place < self.total else None
        return None


@dataclass(frozen=True, eq=False)
class Federation:
    """Give every client its rows of one data set.

    The data set stays one tensor for each column and a client is a slice of an index, so that a client that is never
    asked costs nothing.

    Parameters
    ----------
    dataset : what is shared out; its test split stays whole.
    partition : which client holds which rows of ``dataset.train``.
    server : what the server holds itself, such as an auxiliary set; empty if nothing.
    stream, task : the tasks of which this is one (see `fedkeep.data.tasks`), and its number, from 1; without a stream
        there is one task.

    Raises
    ------
    DataError
        For a partition that names rows which the data set does not have.
    """

    dataset: DataSet
    partition: Partition
    server: Data = field(default_factory=dict)
    stream: TaskStream | None = None
    task: int = 1

    def __post_init__(self) -> None:
        rows, have = self.partition.rows, len(self.dataset.train["label"])
        if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= have):
            raise DataError(
                f"The partition names rows {int(rows.min())} to {int(rows.max())}, but {self.dataset.name} has {have} "
                "training rows. Partition this data set, not another."
            )

    @property
    def clients(self) -> Sequence[str]:
        """The clients' names, ``"0"`` to the last, as a sequence that makes them on demand."""
        return ClientNames(len(self.partition))

    @property
    def seen(self) -> tuple[int, ...]:
        """How many classes were known with each task so far, this one included."""
        if self.stream is None:
            return (self.dataset.classes,)
        return tuple(task.seen for task in self.stream.tasks[: self.task])

    @property
    def tasks(self) -> int:
        """How many tasks there are."""
        return 1 if self.stream is None else len(self.stream.tasks)

    def at(self, task: int) -> Federation:
        """Return who holds what in another task, counted from 1."""
        if self.stream is None:
            return self
        there = self.stream.federation(task)
        return replace(self, dataset=there.dataset, partition=there.partition, task=task)

    def data(self, client: str) -> Data:
        """Return a client's training rows, every column, on the data set's device.

        Raises
        ------
        DataError
            For a name that is no client's.
        """
        train = self.dataset.train
        rows = self.partition[self._index(client)].to(train["label"].device)
        return {name: column.index_select(0, rows) for name, column in train.items()}

    def size(self, client: str) -> int:
        """Return how many training rows a client holds (see `data`)."""
        return len(self.partition[self._index(client)])

    def to(self, device: torch.device | str) -> Federation:
        """Return the federation with its data set on `device`; the partition's index stays where it is."""
        dataset = self.dataset.to(device)
        if dataset is self.dataset:
            return self
        server = {name: column.to(device) for name, column in self.server.items()}
        moved = replace(self, dataset=dataset, server=server)
        if self.stream is None:
            return moved
        return replace(moved, stream=replace(self.stream, dataset=self.stream.dataset.to(device))).at(self.task)

    def _index(self, client: str) -> int:
        try:
            return self.clients.index(client)
        except ValueError:
            count = len(self.partition)
            raise DataError(
                f"There is no client {client!r}. The {count} clients are named '0' to '{count - 1}'."
            ) from None
