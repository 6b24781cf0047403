"""What every partition is, and what every scheme that makes one shares."""

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

from fedkeep._utils.seeds import numpy_generator
from fedkeep.data.partition.statistics import sizes_summary
from fedkeep.errors import PartitionError, did_you_mean
from fedkeep.options import Options, as_table, option

Integers: TypeAlias = npt.NDArray[np.int64]

# One stream a purpose. Drawing more attempts than are needed in one stream cannot shift another, so how many attempts
# are drawn at a time changes no partition.
_STREAMS = {"rows": 0, "shares": 1, "ties": 2, "owners": 3, "order": 4}


@dataclass(frozen=True, eq=False)
class Partition:
    """Who holds which rows: client ``i`` holds ``rows[offsets[i]:offsets[i + 1]]``.

    Attributes
    ----------
    scheme, settings, seed : what made it.
    attempts : how many draws it took until one was acceptable; 1 for schemes that do not retry.
    rows : int64 [rows held], row numbers of the training set, each at most once.
    offsets : int64 [clients + 1].
    dropped : rows of the training set that no client holds, on purpose (only ``column`` with ``groups`` does this).
    """

    scheme: str
    settings: Mapping[str, Any]
    seed: int
    attempts: int
    rows: Tensor
    offsets: Tensor
    dropped: int = 0

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Tensor:
        """Return the rows of one client, int64 [size]."""
        if not 0 <= client < len(self):
            raise IndexError(f"There is no client {client}: the partition has {len(self)}, counted from 0.")
        return self.rows[int(self.offsets[client]) : int(self.offsets[client + 1])]

    @classmethod
    def of_nothing(cls) -> Partition:
        """Return the partition that hands out nothing, to nobody: others hold what they hold."""
        return cls("nothing", {}, 0, 1, torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))

    @property
    def sizes(self) -> Tensor:
        """Return how many rows each client holds, int64 [clients]."""
        return self.offsets.diff()

    def counts(self, labels: Tensor, classes: int) -> Tensor:
        """Return how many examples of each class each client holds, int64 [clients, classes].

        Parameters
        ----------
        labels : int64 [n], the labels of the training set that was split.
        classes : number of classes.
        """
        client = torch.repeat_interleave(torch.arange(len(self)), self.sizes)
        cell = client * classes + labels.cpu()[self.rows]
        return torch.bincount(cell, minlength=len(self) * classes).reshape(len(self), classes)

    @cached_property
    def hash(self) -> str:
        """Return the SHA-256 of rows and offsets (little-endian int64), in hex: equal hashes are equal partitions."""
        digest = hashlib.sha256()
        for tensor in (self.rows, self.offsets):
            digest.update(np.ascontiguousarray(tensor.numpy(), dtype="<i8").data)
        return digest.hexdigest()

    def manifest(self) -> dict[str, Any]:
        """Return what a run folder says about the partition; JSON-able."""
        return {
            "scheme": self.scheme,
            "settings": dict(self.settings),
            "seed": self.seed,
            "attempts": self.attempts,
            "clients": len(self),
            "rows": len(self.rows),
            "dropped": self.dropped,
            "sizes": sizes_summary(self.sizes.numpy()),
            "hash": self.hash,
        }


class Deal(NamedTuple):
    """What a scheme decides: ``rows`` int64 [m] grouped by client, ``offsets`` int64 [clients + 1], attempts."""

    rows: Integers
    offsets: Integers
    attempts: int = 1


@dataclass(frozen=True)
class Scheme(Options, ABC):
    """Base of the partition schemes: a frozen set of options that splits a training set.

    A subclass sets ``name`` and `deal`; `split` checks the request and wraps the result.
    """

    name: ClassVar[str]
    clients: int = option(100, "number of clients", low=1)

    def split(self, train: Mapping[str, Tensor], classes: int, seed: int) -> Partition:
        """Deal the rows of a training set to the clients.

        Parameters
        ----------
        train : columns of one length, with ``"label"`` int64 [n].
        classes : number of classes; labels lie in ``0..classes - 1``.
        seed : the run's seed; the result depends on nothing else that is random.

        Raises
        ------
        PartitionError
            If the request is impossible, or no acceptable draw came up within the scheme's attempts.
        """
        labels = _checked_labels(train, classes)
        if self.clients > len(labels):
            raise self.error(f"{self.clients} clients cannot share {len(labels)} examples. Use fewer clients.")
        rows, offsets, attempts = self.deal(labels, classes, train, seed)
        return Partition(
            scheme=self.name,
            settings=as_table(self),
            seed=seed,
            attempts=attempts,
            rows=torch.from_numpy(rows),
            offsets=torch.from_numpy(offsets),
            dropped=len(labels) - len(rows),
        )

    @abstractmethod
    def deal(self, labels: Integers, classes: int, train: Mapping[str, Tensor], seed: int) -> Deal:
        """Return who gets what; ``labels`` int64 [n] are checked. Every scheme has its own."""

    def error(self, message: str) -> PartitionError:
        """Return an error that begins with the scheme and its settings."""
        settings = ", ".join(f"{name}={value}" for name, value in as_table(self).items())
        return PartitionError(f"{self.name}({settings}): {message}")

    def require_room(self, examples: int, min_size: int) -> None:
        """Raise `PartitionError` if ``clients`` times ``min_size`` is more than there is."""
        if min_size * self.clients > examples:
            raise self.error(
                f"{self.clients} clients with at least {min_size} examples each need {min_size * self.clients}, and "
                f"there are {examples}. Lower min_size to at most {examples // self.clients}, or use fewer clients."
            )


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Return the generator of one purpose within a partition."""
    return numpy_generator(seed, "partition", use=_STREAMS[purpose])


def even_sizes(total: int, parts: int) -> Integers:
    """Return the sizes of `numpy.array_split`, int64 [parts]: equal, the remainder one each to the first."""
    return total // parts + (np.arange(parts, dtype=np.int64) < total % parts)


def offsets_of(sizes: Integers) -> Integers:
    """Return where each part starts, and the end, int64 [parts + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def rows_by_class(labels: Integers, classes: int, seed: int) -> Integers:
    """Return all row numbers, int64 [n], class after class and in random order within a class."""
    shuffled = stream(seed, "rows").permutation(len(labels))
    return shuffled[_stable_order(labels[shuffled], classes)]


def owners_of(counts: Integers) -> Integers:
    """Return the client of every entry of `rows_by_class`, int64 [sum], for counts int64 [clients, classes]."""
    clients, classes = counts.shape
    return np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())


def grouped(rows: Integers, owner: Integers, clients: int, attempts: int = 1) -> Deal:
    """Return the deal in which ``rows[j]`` goes to client ``owner[j]``; both int64 [m]."""
    sizes = np.bincount(owner, minlength=clients)
    return Deal(rows[_stable_order(owner, clients)], offsets_of(sizes), attempts)


def _stable_order(keys: Integers, bound: int) -> Integers:
    # NumPy sorts 16-bit integers stably by radix, several times faster than wider ones.
    narrow = keys.astype(np.uint16) if bound <= 1 << 16 else keys
    return np.argsort(narrow, kind="stable")


def _checked_labels(train: Mapping[str, Tensor], classes: int) -> Integers:
    """Return the label column, int64 [n], or raise."""
    if "label" not in train:
        raise PartitionError(f"The training set has no column 'label'.{did_you_mean('label', train)}")
    labels: Integers = train["label"].cpu().numpy().astype(np.int64, copy=False)
    if labels.ndim != 1 or len(labels) == 0:
        raise PartitionError(f"The labels must be one number an example, not of shape {labels.shape}.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise PartitionError(
            f"The labels go from {low} to {high}; with {classes} classes they must lie in 0..{classes - 1}."
        )
    return labels
