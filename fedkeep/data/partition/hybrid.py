"""Some clients alike, the others skewed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedkeep.data.partition.allocation import allocate
from fedkeep.data.partition.base import (
    Deal,
    Integers,
    Scheme,
    even_sizes,
    grouped,
    owners_of,
    rows_by_class,
    stream,
)
from fedkeep.data.partition.clientwise import draw_owners
from fedkeep.options import option


@dataclass(frozen=True)
class Hybrid(Scheme):
    """Mix IID and skewed clients in the proportion ``iid : non_iid``.

    The IID clients' part of the training set is drawn stratified by class and dealt equally; the rest goes to the
    other clients by class-wise Dirichlet shares with the soft cap ``n / clients`` and ``min_size`` (or, with
    ``per_client``, in equal sizes from Dirichlet priors of the clients); then the clients are shuffled.

    The number of IID clients is ``clients * iid / (iid + non_iid)``, rounded to the nearest. FedADKD's paper names the
    proportion and not the procedure; this one is ours.
    """

    name: ClassVar[str] = "hybrid"
    iid: int = option(1, "parts of the clients that are IID", low=0)
    non_iid: int = option(1, "parts of the clients that are skewed", low=0)
    alpha: float = option(0.05, "concentration of the skewed clients' Dirichlet shares", low=1e-6)
    per_client: bool = option(False, "skewed clients in equal sizes, each from its own Dirichlet prior")
    min_size: int = option(10, "examples that each client has at least", low=1)
    attempts: int = option(2_000_000, "draws to try before giving up", low=1)

    @property
    def iid_clients(self) -> int:
        """Return how many clients are IID."""
        return int(self.clients * self.iid / (self.iid + self.non_iid) + 0.5)

    def deal(self, labels: Integers, classes: int, train: Mapping[str, Tensor], seed: int) -> Deal:
        """Return the two parts, with the clients shuffled."""
        if self.iid + self.non_iid == 0:
            raise self.error(
                "iid and non_iid are both 0. Say in which proportion clients are IID, such as iid=1, non_iid=1."
            )
        self.require_room(len(labels), self.min_size)
        sizes = np.bincount(labels, minlength=classes)
        # Rounding the running sum keeps each class within one example of its exact part, and the total too.
        reached = np.floor(np.cumsum(sizes) * self.iid_clients / self.clients + 0.5).astype(np.int64)
        taken = np.diff(reached, prepend=np.int64(0))
        taken = np.clip(taken, 0, sizes)
        by_class = rows_by_class(labels, classes, seed)
        place = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        alike = place < np.repeat(taken, sizes)
        owner = np.empty(len(labels), np.int64)
        attempts = 1
        order = stream(seed, "order")
        if self.iid_clients:
            pool = np.repeat(np.arange(self.iid_clients), even_sizes(int(taken.sum()), self.iid_clients))
            owner[alike] = order.permutation(pool)
        if self.iid_clients < self.clients:
            skewed, attempts = self._skewed(sizes - taken, len(labels) / self.clients, seed)
            owner[~alike] = self.iid_clients + skewed
        return grouped(by_class, order.permutation(self.clients)[owner], self.clients, attempts)

    def _skewed(self, sizes: Integers, cap: float, seed: int) -> tuple[Integers, int]:
        """Return the client of each remaining example, the first skewed one being 0, and the attempts."""
        clients = self.clients - self.iid_clients
        if self.per_client:
            return draw_owners(sizes, even_sizes(int(sizes.sum()), clients), self.alpha, seed), 1
        found = allocate(
            sizes,
            np.ones((clients, len(sizes)), dtype=bool),
            alpha=self.alpha,
            cap=cap,
            min_size=self.min_size,
            attempts=self.attempts,
            seed=seed,
        )
        if found.counts is None:
            raise self.error(found.failure(self.min_size, "raise alpha"))
        return owners_of(found.counts), found.attempts
