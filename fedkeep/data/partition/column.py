"""Natural clients: the groups of a column, such as writers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedkeep.data.partition.base import Assignment, Integers, Scheme, even_sizes, group_by_client, random_stream
from fedkeep.errors import did_you_mean
from fedkeep.options import option


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
