"""Label skew by shards: each client gets a few pieces, each of one class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedkeep.data.partition.base import Assignment, Integers, Scheme, group_by_client, random_stream, rows_by_class
from fedkeep.options import option

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
        owner_of_shard = np.repeat(np.arange(self.num_clients), self.shards_per_client)[
            np.argsort(held.ravel(), kind="stable")
        ]
        position = np.tile(np.arange(per_class), num_classes)
        shard_sizes = np.repeat(sizes // per_class, per_class) + (position < np.repeat(sizes % per_class, per_class))
        return group_by_client(
            rows_by_class(labels, num_classes, seed), np.repeat(owner_of_shard, shard_sizes), self.num_clients
        )

    def _shards_per_class(self, sizes: Integers, num_classes: int) -> int:
        per_class, over = divmod(self.shards_per_client * self.num_clients, num_classes)
        if over:
            raise self.error(
                f"{self.shards_per_client} shards for each of {self.num_clients} clients are "
                f"{self.shards_per_client * self.num_clients}, which "
                f"{num_classes} classes cannot share equally. Make shards_per_client * num_clients a multiple of "
                f"{num_classes}."
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
