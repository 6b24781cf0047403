"""The examples of a client test: those that the data name as a client's, or a share of its examples, held back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedkeep._utils.seeds import numpy_rng
from fedkeep.data.dataset import Data, DataSet
from fedkeep.data.federation import Federation
from fedkeep.data.partition import ByColumn, Partition
from fedkeep.data.schema import GROUP
from fedkeep.errors import DataError

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
    """Return a data set of which a share of the training examples is held back as its test split."""
    rows = len(dataset.train["label"])
    everything = Partition("all", {}, 0, 1, torch.arange(rows), torch.tensor([0, rows]))
    found = _held_back(Federation(dataset, everything), share)
    return replace(found.dataset, train=_rows(dataset.train, found.partition.rows))


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
    owners = np.where(names[place] == wanted, _holders(partition).numpy()[first[place]], -1)
    rows = torch.from_numpy(np.flatnonzero(owners >= 0))
    if not len(rows):
        raise DataError(f"{dataset.name}: none of {len(owners)} test examples is named as a client's own. {ADVICE}")
    left = len(owners) - len(rows)
    note = f"{left} of {len(owners)} test examples are of no client that trains, and nobody tests on them."
    note = " ".join(filter(None, (dataset.note, note * bool(left))))
    tested = replace(dataset, test=_rows(dataset.test, rows), note=note)
    return replace(federation, dataset=tested, owners=torch.from_numpy(owners)[rows])


def _held_back(federation: Federation, share: float) -> Federation:
    stream = federation.stream
    dataset = federation.dataset if stream is None else stream.dataset
    partitions = [federation.partition] if stream is None else [task.partition for task in stream.tasks]
    chosen = [_choose(partition, dataset.train, share) for partition in partitions]
    pairs = list(zip(partitions, chosen, strict=True))
    rows = torch.cat([partition.rows[taken] for partition, taken in pairs])
    if not len(rows):
        raise DataError(
            f"run.client_test={share:g} holds none of a client's examples back, and the largest has "
            f"{max(int(one.sizes.max()) for one in partitions)}. Raise it."
        )
    tested = replace(dataset, test=_rows(dataset.train, rows))
    owners = torch.cat([_holders(partition)[taken] for partition, taken in pairs])
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


def _choose(partition: Partition, train: Data, share: float) -> Tensor:
    """Choose a share of each client's rows, spread over its classes, or of its groups; always the same ones.

    Returns: bool ``[rows held]``, true for a row that is held back.
    """
    owner, label = _holders(partition).numpy(), train["label"].cpu()[partition.rows].numpy()
    unit = first = np.arange(len(owner))
    if GROUP in train:
        pairs = np.stack([owner, train[GROUP].cpu()[partition.rows].numpy()])
        _, first, unit = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
    keys = numpy_rng(0, "client test").random(len(first))  # no seed of a run, as of all test splits
    order = np.lexsort((keys, label[first], owner[first]))
    of = owner[first][order]
    rank = np.arange(len(of)) - np.searchsorted(of, of)  # within a client, class after class
    chosen: np.ndarray[Any, np.dtype[np.bool_]] = np.empty(len(of), dtype=bool)
    chosen[order] = np.floor((rank + 1) * share) > np.floor(rank * share)
    return torch.from_numpy(chosen[unit.reshape(-1)])


def _holders(partition: Partition) -> Tensor:
    """Return the number of the client that holds each row of a partition."""
    return torch.repeat_interleave(torch.arange(len(partition)), partition.sizes)


def _without(partition: Partition, taken: Tensor) -> Partition:
    sizes = torch.bincount(_holders(partition)[~taken], minlength=len(partition))
    return replace(partition, rows=partition.rows[~taken], offsets=torch.cat((sizes.new_zeros(1), sizes.cumsum(0))))


def _rows(data: Data, rows: Tensor | Sequence[int]) -> dict[str, Tensor]:
    return {name: column[rows] for name, column in data.items()}
