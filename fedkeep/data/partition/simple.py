"""IID clients, natural clients by a column, and label skew by shards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedkeep.data.partition.base import (
    Assignment,
    Integers,
    Scheme,
    even_sizes,
    group_by_client,
    random_stream,
    rows_by_class,
    to_offsets,
)
from fedkeep.errors import did_you_mean
from fedkeep.options import option


@dataclass(frozen=True)
class IID(Scheme):
    """Cut a random permutation of the rows into equal slices; sizes differ by at most one and no row is dropped."""

    name: ClassVar[str] = "iid"

    def assign(self, labels: Integers, num_classes: int, train: Mapping[str, Tensor], seed: int) -> Assignment:
        """Assign rows to clients; see `Scheme.assign`."""
        rows = random_stream(seed, "rows").permutation(len(labels))
        return Assignment(rows, to_offsets(even_sizes(len(labels), self.num_clients)))


@dataclass(frozen=True)
class ByColumn(Scheme):
    """Assign whole groups of a column, such as all examples of a writer, to the clients.

    With ``clients = 0`` every group is a client of its own, in the order of the column's values: the natural partition
    of data that say whose each example is. Otherwise the groups are shuffled and divided in equal numbers (they differ
    by at most one).

    With ``num_groups`` only that many groups, drawn at random, are used, and **the rows of the others are left out on
    purpose**; the partition's manifest says how many (``dropped``).

    Reference: the "real" partition of Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022, used by FedCAD.
    """

    name: ClassVar[str] = "column"
    num_clients: int = option(0, "number of clients; 0 for one client for each group", low=0, kw_only=True)
    column: str = option("client", "column of the training set that says which group a row belongs to")
    num_groups: int = option(0, "use only so many groups, drawn at random, and leave the rest out; 0 for all", low=0)

    def assign(self, labels: Integers, num_classes: int, train: Mapping[str, Tensor], seed: int) -> Assignment:
        """Assign rows to clients; see `Scheme.assign`."""
        if self.column not in train:
            columns = [name for name in train if name not in ("input", "label")]
            known = did_you_mean(self.column, columns) or " It has no columns besides inputs and labels."
            if self.column == "client":
                known += " Name the column of the files that says whose an example is: data.client."
            raise self.error(f"the training set has no column {self.column!r}.{known}")
        values = train[self.column].cpu().numpy()
        if values.ndim != 1 or len(values) != len(labels) or values.dtype.kind not in "iub":
            raise self.error(
                f"column {self.column!r} must be one integer an example, not {values.dtype} {values.shape}."
            )
        found, group = np.unique(values, return_inverse=True)
        used = self.num_groups or len(found)
        clients = self.num_clients or used
        self._check_groups(len(found), used, clients)
        chosen = random_stream(seed, "order").permutation(len(found))[:used]
        if self.num_clients == 0:
            chosen.sort()
        client_of_group = np.full(len(found), -1, np.int64)
        client_of_group[chosen] = np.repeat(np.arange(clients), even_sizes(used, clients))
        client_of = client_of_group[group]
        kept = np.flatnonzero(client_of >= 0)
        return group_by_client(kept, client_of[kept], clients)

    def _check_groups(self, found: int, used: int, clients: int) -> None:
        if used > found:
            raise self.error(
                f"column {self.column!r} has {found} groups, not {used}. Set num_groups to at most {found}, or to 0."
            )
        if clients > used:
            raise self.error(f"{clients} clients cannot share {used} groups of {self.column!r}. Use fewer clients.")


_TRADES = 50  # rounds of trading after which an assignment of distinct shards counts as random


@dataclass(frozen=True)
class Sharding(Scheme):
    """Cut each class into equally many shards and give ``shards_per_client`` of them to each client.

    Every class is cut into ``shards_per_client * num_clients / C`` near-equal shards, what is left over going one each
    to the first. The shards are shuffled and assigned, so a client holds at most ``shards_per_client`` classes; with
    ``distinct_classes`` it holds exactly that many.

    References: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
    2017; cut per class as in the code of Lee et al., "Preservation of the Global Knowledge by Not-True Distillation
    in Federated Learning", NeurIPS 2022. ``distinct_classes`` follows the wording of FedADKD's paper; its assignments
    are drawn uniformly by global curveball trades (Carstens, Hamann, Meyer, Penschuck, Tran & Wagner, ESA 2018).
    """

    name: ClassVar[str] = "shards"
    shards_per_client: int = option(2, "shards that each client gets", low=1)
    distinct_classes: bool = option(False, "no two shards of one class for one client")

    def assign(self, labels: Integers, num_classes: int, train: Mapping[str, Tensor], seed: int) -> Assignment:
        """Assign rows to clients; see `Scheme.assign`."""
        sizes = np.bincount(labels, minlength=num_classes)
        per_class = self._shards_per_class(sizes, num_classes)
        draw = self._draw_distinct if self.distinct_classes else self._draw_any
        held = draw(per_class, num_classes, seed)
        # Shards of a class are taken in the order of the clients that hold them: which client has the longer ones
        # follows from a random assignment already.
        owners = np.repeat(np.arange(self.num_clients), self.shards_per_client)
        owners = owners[np.argsort(held.ravel(), kind="stable")]
        position = np.tile(np.arange(per_class), num_classes)
        shard_sizes = np.repeat(sizes // per_class, per_class) + (position < np.repeat(sizes % per_class, per_class))
        rows = rows_by_class(labels, num_classes, seed)
        return group_by_client(rows, np.repeat(owners, shard_sizes), self.num_clients)

    def _shards_per_class(self, sizes: Integers, num_classes: int) -> int:
        per_class, over = divmod(self.shards_per_client * self.num_clients, num_classes)
        if over:
            raise self.error(
                f"{self.shards_per_client} shards for each of {self.num_clients} clients are "
                f"{self.shards_per_client * self.num_clients}, which {num_classes} classes cannot share equally. Make "
                f"shards_per_client * num_clients a multiple of {num_classes}."
            )
        if self.distinct_classes and self.shards_per_client > num_classes:
            raise self.error(
                f"{num_classes} classes do not give {self.shards_per_client} distinct shards. Set shards_per_client "
                f"to at most {num_classes}."
            )
        if per_class > sizes.min():
            raise self.error(
                f"class {int(sizes.argmin())} has {int(sizes.min())} examples, too few for {per_class} shards. "
                "Use fewer shards_per_client or clients."
            )
        return per_class

    def _draw_any(self, per_class: int, num_classes: int, seed: int) -> Integers:
        """Return each client's classes, int64 [clients, shards]; one may come twice."""
        labels = random_stream(seed, "owners").permutation(np.repeat(np.arange(num_classes), per_class))
        return labels.reshape(self.num_clients, self.shards_per_client)

    def _draw_distinct(self, per_class: int, num_classes: int, seed: int) -> Integers:
        """Return each client's classes, int64 [clients, shards], none twice; uniform over all such assignments."""
        # Given out one by one, a class's shards go to successive clients, and there are at most as many as clients.
        labels = np.repeat(np.arange(num_classes), per_class).reshape(self.shards_per_client, self.num_clients).T
        owns = np.zeros((self.num_clients, num_classes), dtype=bool)
        np.put_along_axis(owns, labels, True, axis=1)
        rng = random_stream(seed, "owners")
        half = self.num_clients // 2
        for _ in range(_TRADES):
            order = rng.permutation(self.num_clients)
            left, right = order[:half], order[half : 2 * half]
            first, second = owns[left], owns[right]
            traded = first ^ second
            # Each pair pools the classes that only one of the two holds, shuffles them, and each takes back as many.
            keys = np.where(traded, rng.random(traded.shape), 2.0)
            rank = np.argsort(np.argsort(keys, axis=1), axis=1)
            to_first = traded & (rank < (first & ~second).sum(axis=1, keepdims=True))
            both = first & second
            owns[left], owns[right] = both | to_first, both | (traded & ~to_first)
        return np.nonzero(owns)[1].reshape(self.num_clients, self.shards_per_client)
