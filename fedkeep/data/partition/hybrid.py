"""A mixture of IID clients and clients with label skew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedkeep.data.partition.allocation import allocate
from fedkeep.data.partition.base import (
    Assignment,
    Integers,
    Scheme,
    clients_by_class,
    even_sizes,
    group_by_client,
    random_stream,
    rows_by_class,
)
from fedkeep.data.partition.dirichlet import draw_clients
from fedkeep.options import option


@dataclass(frozen=True)
class Hybrid(Scheme):
    """Mix IID and skewed clients in the proportion ``iid_parts : non_iid_parts``.

    The IID clients' part of the training set is drawn stratified by class and divided equally; the rest goes to the
    other clients by class-wise Dirichlet shares with the cap ``n / num_clients`` and ``min_size`` (or, with
    ``dirichlet_per_client``, in equal sizes from Dirichlet priors of the clients); then the clients are shuffled.

    The number of IID clients is ``num_clients * iid_parts / (iid_parts + non_iid_parts)``, rounded to the nearest.
    FedADKD's paper names the proportion and not the procedure; this one is ours.
    """

    name: ClassVar[str] = "hybrid"
    iid_parts: int = option(1, "parts of the clients that are IID", low=0)
    non_iid_parts: int = option(1, "parts of the clients that are skewed", low=0)
    alpha: float = option(0.05, "concentration of the skewed clients' Dirichlet shares", low=1e-6)
    dirichlet_per_client: bool = option(False, "skewed clients in equal sizes, each from its own Dirichlet prior")
    min_size: int = option(10, "examples that each client has at least", low=1)
    max_attempts: int = option(2_000_000, "draws to try before giving up", low=1)

    @property
    def iid_clients(self) -> int:
        """Number of IID clients."""
        return int(self.num_clients * self.iid_parts / (self.iid_parts + self.non_iid_parts) + 0.5)

    def assign(self, labels: Integers, num_classes: int, train: Mapping[str, Tensor], seed: int) -> Assignment:
        """Assign rows to clients; see `Scheme.assign`."""
        if self.iid_parts + self.non_iid_parts == 0:
            raise self.error(
                "iid_parts and non_iid_parts are both 0. Say in which proportion clients are IID, such as "
                "iid_parts=1, non_iid_parts=1."
            )
        self.require_examples(len(labels), self.min_size)
        sizes = np.bincount(labels, minlength=num_classes)
        # Rounding the running sum keeps each class within one example of its exact part, and the total too.
        running_sum = np.floor(np.cumsum(sizes) * self.iid_clients / self.num_clients + 0.5).astype(np.int64)
        iid_sizes = np.clip(np.diff(running_sum, prepend=np.int64(0)), 0, sizes)
        by_class = rows_by_class(labels, num_classes, seed)
        rank_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        is_iid = rank_in_class < np.repeat(iid_sizes, sizes)
        client_of = np.empty(len(labels), np.int64)
        attempts = 1
        order = random_stream(seed, "order")
        if self.iid_clients:
            pool = np.repeat(np.arange(self.iid_clients), even_sizes(int(iid_sizes.sum()), self.iid_clients))
            client_of[is_iid] = order.permutation(pool)
        if self.iid_clients < self.num_clients:
            skewed, attempts = self._assign_skewed(sizes - iid_sizes, len(labels) / self.num_clients, seed)
            client_of[~is_iid] = self.iid_clients + skewed
        return group_by_client(by_class, order.permutation(self.num_clients)[client_of], self.num_clients, attempts)

    def _assign_skewed(self, sizes: Integers, cap: float, seed: int) -> tuple[Integers, int]:
        """Return the client of each remaining example, counted from the first skewed one, and the attempts."""
        clients = self.num_clients - self.iid_clients
        if self.dirichlet_per_client:
            return draw_clients(sizes, even_sizes(int(sizes.sum()), clients), self.alpha, seed), 1
        found = allocate(
            sizes,
            np.ones((clients, len(sizes)), dtype=bool),
            alpha=self.alpha,
            cap=cap,
            min_size=self.min_size,
            attempts=self.max_attempts,
            seed=seed,
        )
        if found.counts is None:
            raise self.error(found.failure(self.min_size, "raise alpha"))
        return clients_by_class(found.counts), found.attempts
