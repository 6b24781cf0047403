"""Partitions, the base class of the schemes that make them, and helpers for schemes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedkeep._utils.seeds import numpy_rng
from fedkeep.errors import PartitionError, did_you_mean
from fedkeep.options import Options, as_table, option

Numbers = npt.NDArray[Any]


def size_statistics(sizes: Numbers) -> dict[str, float]:
    """Return min, median, max, mean and (population) standard deviation of clients' sizes, int ``[clients]``."""
    return {
        "min": int(sizes.min()),
        "median": float(np.median(sizes)),
        "max": int(sizes.max()),
        "mean": float(sizes.mean()),
        "std": float(sizes.std()),
    }


Integers: TypeAlias = npt.NDArray[np.int64]

# Each purpose has its own stream. Drawing more attempts than are needed from one stream cannot shift another, so the
# number of attempts that are drawn at a time changes no partition.
_STREAMS = {"rows": 0, "shares": 1, "ties": 2, "owners": 3, "order": 4}


@dataclass(frozen=True, eq=False)
class Partition:
    """Which client holds which rows: client ``i`` holds ``rows[offsets[i]:offsets[i + 1]]``.

    ``attempts``: Number of draws until one was acceptable; 1 for schemes that do not retry.
    ``rows``: int64 ``[rows held]``, row numbers of the training set, each at most once.
    ``offsets``: int64 ``[clients + 1]``.
    ``dropped``: Number of training rows that no client holds, on purpose (only ``column`` with ``num_groups`` does
        this).
    """

    scheme: str
    settings: Mapping[str, Any]
    seed: int
    attempts: int
    rows: Tensor
    offsets: Tensor
    dropped: int = 0

    @cached_property
    def _bounds(self) -> Integers:
        return self.offsets.numpy()  # the same memory, of which single numbers are read in a tenth of the time

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._bounds) - 1

    def __getitem__(self, client: int) -> Tensor:
        """Return the row numbers of one client, int64 ``[size]``."""
        if not 0 <= client < len(self):
            raise IndexError(f"There is no client {client}: the partition has {len(self)}, counted from 0.")
        return self.rows[self._bounds[client] : self._bounds[client + 1]]

    @classmethod
    def empty(cls) -> Partition:
        """Return the partition without clients and rows, for a party that does not know what others hold."""
        return cls("nothing", {}, 0, 1, torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))

    def size(self, client: int) -> int:
        """Return the number of rows of one client."""
        return int(self._bounds[client + 1] - self._bounds[client])

    @property
    def sizes(self) -> Tensor:
        """Number of rows of each client, int64 ``[clients]``."""
        return self.offsets.diff()

    @property
    def holders(self) -> Tensor:
        """Number of the client that holds each row, int64 ``[rows]``."""
        return torch.repeat_interleave(torch.arange(len(self)), self.sizes)

    def counts(self, labels: Tensor, num_classes: int) -> Tensor:
        """Count each client's examples of each class.

        ``labels``: int64 ``[n]``, the labels of the training set that was split.
        Returns: int64 ``[clients, num_classes]``.
        """
        index = self.holders * num_classes + labels.cpu()[self.rows]
        return torch.bincount(index, minlength=len(self) * num_classes).reshape(len(self), num_classes)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of rows and offsets (little-endian int64), in hex: equal hashes are equal partitions."""
        digest = hashlib.sha256()
        for tensor in (self.rows, self.offsets):
            digest.update(np.ascontiguousarray(tensor.numpy(), dtype="<i8").data)
        return digest.hexdigest()

    def manifest(self) -> dict[str, Any]:
        """Return the description of the partition for a run folder, as JSON types."""
        return {
            "scheme": self.scheme,
            "settings": dict(self.settings),
            "seed": self.seed,
            "attempts": self.attempts,
            "clients": len(self),
            "rows": len(self.rows),
            "dropped": self.dropped,
            "sizes": size_statistics(self.sizes.numpy()),
            "hash": self.hash,
        }


class Assignment(NamedTuple):
    """Rows assigned to clients.

    ``rows``: int64 ``[m]``, row numbers grouped by client.
    ``offsets``: int64 ``[clients + 1]``, where each client's rows begin, and the end.
    ``attempts``: Number of draws until one was acceptable.
    """

    rows: Integers
    offsets: Integers
    attempts: int = 1


@dataclass(frozen=True)
class Scheme(Options, ABC):
    """Base class of partition schemes: options, and a method that assigns training rows to clients.

    A subclass sets ``name`` and defines `assign`; `split` checks the request and wraps the result.
    """

    name: ClassVar[str]
    num_clients: int = option(100, "number of clients", low=1, kw_only=True)

    def split(self, train: Mapping[str, Tensor], num_classes: int, seed: int) -> Partition:
        """Divide a training set among the clients.

        Parameters
        ----------
        train : mapping of str to Tensor
            Columns of one length, with ``"label"`` int64 ``[n]``.
        num_classes : int
            Number of classes; labels lie in ``0..num_classes - 1``.
        seed : int
            The run's seed; nothing else decides the result.

        Raises
        ------
        PartitionError
            If the request is impossible, or no acceptable draw came up within the scheme's attempts.
        """
        labels = _check_labels(train, num_classes)
        if self.num_clients > len(labels):
            raise self.error(f"{self.num_clients} clients cannot share {len(labels)} examples. Use fewer clients.")
        versions = [column._version for column in train.values()]
        rows, offsets, attempts = self.assign(labels.copy(), num_classes, train, seed)
        if versions != [column._version for column in train.values()]:
            raise self.error("it changed the training examples in place, which others read too. Change a clone().")
        self._check_assignment(rows, offsets, len(labels))
        return Partition(
            scheme=self.name,
            settings=as_table(self),
            seed=seed,
            attempts=attempts,
            rows=torch.from_numpy(rows),
            offsets=torch.from_numpy(offsets),
            dropped=len(labels) - len(rows),
        )

    def _check_assignment(self, rows: Integers, offsets: Integers, examples: int) -> None:
        """Raise `PartitionError` if `assign` of a scheme returned no partition: this is a mistake in the scheme."""
        if self.num_clients and len(offsets) != self.num_clients + 1:
            raise self.error(f"assign returned {len(offsets) - 1} clients instead of {self.num_clients}.")
        if rows.dtype != np.int64 or offsets.dtype != np.int64:
            raise self.error(f"assign gave rows of {rows.dtype} and offsets of {offsets.dtype}; both must be int64.")
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(rows) or (np.diff(offsets) < 0).any():
            raise self.error("assign returned offsets that do not rise from 0 to the number of rows.")
        if len(rows) and not 0 <= rows.min() <= rows.max() < examples:
            raise self.error(f"assign returned rows outside 0..{examples - 1}.")
        if len(rows) and np.bincount(rows).max() > 1:
            raise self.error(f"assign gave row {np.bincount(rows).argmax()} to a client more than once, or to several.")

    @abstractmethod
    def assign(self, labels: Integers, num_classes: int, train: Mapping[str, Tensor], seed: int) -> Assignment:
        """Assign rows to clients.

        Parameters
        ----------
        labels : array
            int64 ``[n]``, checked.
        num_classes : int
            Number of classes.
        train : mapping of str to Tensor
            All columns of the training set.
        seed : int
            The run's seed; random numbers come from `random_stream`.
        """

    def error(self, message: str) -> PartitionError:
        """Return an error that begins with the scheme and its settings."""
        settings = ", ".join(f"{name}={value}" for name, value in as_table(self).items())
        return PartitionError(f"{self.name}({settings}): {message}")

    def require_examples(self, examples: int, min_size: int) -> None:
        """Raise `PartitionError` if there are too few examples for all clients to have ``min_size``."""
        if min_size * self.num_clients > examples:
            raise self.error(
                f"{self.num_clients} clients with at least {min_size} examples each need "
                f"{min_size * self.num_clients}, and "
                f"there are {examples}. Lower min_size to at most {examples // self.num_clients}, or use fewer clients."
            )


def random_stream(seed: int, purpose: str) -> np.random.Generator:
    """Return the random generator of one purpose within a partition: a key of ``_STREAMS``."""
    if purpose not in _STREAMS:
        raise PartitionError(f"there is no random stream {purpose!r} for partitions. Use one of {', '.join(_STREAMS)}.")
    return numpy_rng(seed, "partition", use=_STREAMS[purpose])


def even_sizes(total: int, parts: int) -> Integers:
    """Return the sizes of `numpy.array_split`, int64 ``[parts]``: they differ by at most one, the larger ones first."""
    return total // parts + (np.arange(parts, dtype=np.int64) < total % parts)


def to_offsets(sizes: Integers) -> Integers:
    """Return where each part begins, and the end, int64 ``[parts + 1]``, for sizes int64 ``[parts]``."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def rows_by_class(labels: Integers, num_classes: int, seed: int) -> Integers:
    """Return all row numbers, int64 ``[n]``, class after class and in random order within a class."""
    shuffled = random_stream(seed, "rows").permutation(len(labels))
    return shuffled[_stable_order(labels[shuffled], num_classes)]


def clients_by_class(counts: Integers) -> Integers:
    """Return the client of each row of `rows_by_class`, int64 ``[sum]``, for counts int64 ``[clients, classes]``."""
    clients, classes = counts.shape
    return np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())


def group_by_client(rows: Integers, client_of: Integers, clients: int, attempts: int = 1) -> Assignment:
    """Return the assignment in which ``rows[j]`` belongs to client ``client_of[j]``; both int64 ``[m]``."""
    sizes = np.bincount(client_of, minlength=clients)
    return Assignment(rows[_stable_order(client_of, clients)], to_offsets(sizes), attempts)


def _stable_order(keys: Integers, bound: int) -> Integers:
    # NumPy sorts 16-bit integers stably by radix, several times faster than wider ones.
    narrow = keys.astype(np.uint16) if bound <= 1 << 16 else keys
    return np.argsort(narrow, kind="stable")


def _check_labels(train: Mapping[str, Tensor], num_classes: int) -> Integers:
    """Return the label column, int64 ``[n]``, or raise."""
    if "label" not in train:
        raise PartitionError(f"The training set has no column 'label'.{did_you_mean('label', train)}")
    labels: Integers = train["label"].cpu().numpy().astype(np.int64, copy=False)
    if labels.ndim != 1 or len(labels) == 0:
        raise PartitionError(f"The labels must be one number an example, not of shape {labels.shape}.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise PartitionError(
            f"The labels go from {low} to {high}; with {num_classes} classes they must lie in 0..{num_classes - 1}."
        )
    return labels
