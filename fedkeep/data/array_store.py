"""The store of data sets that are given in Python, and which client holds which of their rows.

They are kept in the cache folder under the hash of their content, so that worker processes and a resumed run find
exactly the same examples.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.data import cache
from fedkeep.data.dataset import DataSet, select_rows
from fedkeep.data.schema import CLIENT
from fedkeep.errors import DataError, PartitionError

PREFIX = "arrays:"
"""What the name of a kept data set begins with; its digest follows."""

_FORMAT = 2  # nothing is decoded here: a run of an earlier version finds its examples when it is resumed


def assign_clients(dataset: DataSet, rows: Mapping[str, Any] | Sequence[Any]) -> DataSet:
    """Return a data set with a column ``"client"`` that says who holds each training row; rows of nobody are left out.

    ``rows``: The numbers of the training rows of each client, by its name, or in the clients' order.
    """
    clients = dict(rows) if isinstance(rows, Mapping) else {str(number): held for number, held in enumerate(rows)}
    if not clients:
        raise PartitionError("the partition names no client. Give each its rows, as in {'a': [0, 4], 'b': [1, 2]}.")
    total = len(dataset.train["label"])
    holder = np.full(total, -1, dtype=np.int64)
    for number, (name, held) in enumerate(clients.items()):
        listed = list(held) if isinstance(held, Iterable) and not isinstance(held, Tensor) else held
        numbers = listed.detach().cpu().numpy() if isinstance(listed, Tensor) else np.asarray(listed)
        if numbers.ndim == 1 and not len(numbers):
            raise PartitionError(f"client {name!r} holds no rows, and would learn nothing. Leave it out of partition.")
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise PartitionError(f"client {name!r} must hold a list of row numbers, such as [0, 4], not {held!r:.80}.")
        if numbers.min() < 0 or numbers.max() >= total:
            raise PartitionError(
                f"client {name!r} holds rows {numbers.min()} to {numbers.max()}, and there are {total} training rows, "
                "counted from 0."
            )
        if len(np.unique(numbers)) < len(numbers):
            raise PartitionError(f"client {name!r} holds a row twice.")
        taken = numbers[holder[numbers] >= 0]
        if len(taken):
            other = list(clients)[holder[taken[0]]]
            raise PartitionError(f"row {taken[0]} is held by client {other!r} and by client {name!r}. Give it to one.")
        holder[numbers] = number
    kept = torch.from_numpy(np.flatnonzero(holder >= 0))
    train = select_rows({**dataset.train, CLIENT: torch.from_numpy(holder)}, kept)
    test = {**dataset.test, CLIENT: torch.full_like(dataset.test["label"], -1)}
    note = f"{total - len(kept)} of {total} training rows belong to no client." if len(kept) < total else ""
    values = {**dataset.values, CLIENT: tuple(map(str, clients))}
    return replace(dataset, train=train, test=test, values=values, note=" ".join(filter(None, (dataset.note, note))))


def keep(dataset: DataSet) -> str:
    """Keep a data set in the cache folder, and return the name by which `find` returns it.

    Returns: Such as ``arrays:0123456789abcdef``, which depends on everything in it.
    """
    name = PREFIX + cache.digest(dataset)
    kept = cache.load_or_build(_entry(name), lambda: dataset, name.removeprefix(PREFIX))
    if kept is dataset:
        raise DataError(
            f"the examples cannot be kept in {cache.cache_folder()}, where worker processes and a resumed run would "
            "find them. Set FEDKEEP_CACHE to a folder that can be written to."
        )
    return name


def find(name: str) -> DataSet:
    """Return a data set that was kept.

    ``name``: Its name, as `keep` returned it.
    """
    dataset = cache.read_entry(_entry(name), name.removeprefix(PREFIX))
    if dataset is None:
        raise DataError(
            f"the examples {name!r} were given in Python, and are no longer whole in {cache.cache_folder()}. Give them "
            "again: fedkeep.resume(RUN, data=...), with the partition if that was given too."
        )
    return dataset


def _entry(name: str) -> Path:
    return cache.entry_path(name.replace(":", "-"), "given", "", decoding=_FORMAT)
