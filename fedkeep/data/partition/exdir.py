"""Extended Dirichlet: each client owns some classes, and each class has Dirichlet shares among its owners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedkeep.data.partition.allocation import allocate
from fedkeep.data.partition.base import (
    Assignment,
    Integers,
    Scheme,
    clients_by_class,
    group_by_client,
    random_stream,
    rows_by_class,
)
from fedkeep.options import option

_BATCH = 1 << 20  # random keys drawn at a time; the result does not depend on it


@dataclass(frozen=True)
class ExDir(Scheme):
    """Draw which classes each client owns, then divide each class among its owners with shares from Dir(alpha).

    The paper's ExDir(C, alpha) is ``classes_per_client`` and ``alpha`` here. Ownership: ``classes_per_client`` distinct
    classes for each client, uniformly, redrawn as a whole until every class has at least ``max(floor(classes_per_client
    * num_clients / C) div 5, 1)`` owners. Shares: as `Dirichlet`, among the owners only and with the same cap
    of ``n / num_clients``, redrawn (not the ownership) until each client has ``min_size`` examples. If all owners of a
    class are at the cap they share it equally.

    A share may round to nothing, so a client holds *at most* ``classes_per_client`` classes.

    Reference: Li & Lyu, "Convergence Analysis of Sequential Federated Learning on Heterogeneous Data", NeurIPS 2023,
    and its code.
    """

    name: ClassVar[str] = "exdir"
    classes_per_client: int = option(2, "classes that each client owns", low=1)
    alpha: float = option(0.5, "concentration of the shares: the smaller, the more the clients' sizes differ", low=1e-6)
    min_size: int = option(10, "examples that each client has at least", low=1)
    max_attempts: int = option(100_000, "draws to try before giving up, of the ownership and of the shares", low=1)

    def assign(self, labels: Integers, num_classes: int, train: Mapping[str, Tensor], seed: int) -> Assignment:
        """Assign rows to clients; see `Scheme.assign`."""
        self._check_request(len(labels), num_classes)
        found = allocate(
            np.bincount(labels, minlength=num_classes),
            self._draw_owners(num_classes, seed),
            alpha=self.alpha,
            cap=len(labels) / self.num_clients,
            min_size=self.min_size,
            attempts=self.max_attempts,
            seed=seed,
        )
        if found.counts is None:
            raise self.error(found.failure(self.min_size, "raise alpha or classes_per_client"))
        return group_by_client(
            rows_by_class(labels, num_classes, seed), clients_by_class(found.counts), self.num_clients, found.attempts
        )

    def _check_request(self, examples: int, num_classes: int) -> None:
        if self.classes_per_client > num_classes:
            raise self.error(
                f"a client cannot own {self.classes_per_client} classes of {num_classes}. Set classes_per_client to "
                f"at most {num_classes}."
            )
        if self.classes_per_client * self.num_clients < num_classes:
            raise self.error(
                f"{self.num_clients} clients with {self.classes_per_client} classes each cannot cover {num_classes} "
                "classes. "
                f"Set classes_per_client to at least {-(-num_classes // self.num_clients)}, or use more clients."
            )
        self.require_examples(examples, self.min_size)

    def _draw_owners(self, num_classes: int, seed: int) -> npt.NDArray[np.bool_]:
        """Return which client owns which class, bool ``[clients, num_classes]``; every class has enough owners."""
        least = max(self.classes_per_client * self.num_clients // num_classes // 5, 1)
        keys = random_stream(seed, "owners")
        largest = max(1, _BATCH // (self.num_clients * num_classes))
        tried, batch = 0, 1
        while tried < self.max_attempts:
            batch = min(batch, self.max_attempts - tried)
            drawn = keys.random((batch, self.num_clients, num_classes))
            # The classes with the smallest of independent uniform keys are a uniform set of distinct classes.
            chosen = np.argpartition(drawn, self.classes_per_client - 1, axis=2)[:, :, : self.classes_per_client]
            owners = np.zeros(drawn.shape, dtype=bool)
            np.put_along_axis(owners, chosen, True, axis=2)
            accepted = np.flatnonzero(owners.sum(axis=1).min(axis=1) >= least)
            if len(accepted):
                first: npt.NDArray[np.bool_] = owners[accepted[0]]
                return first
            tried += batch
            batch = min(2 * batch, largest)
        raise self.error(
            f"no draw of the ownership out of {tried} gave each of the {num_classes} classes at least {least} "
            f"owner{'s' if least > 1 else ''}. Raise classes_per_client, use more clients, or allow more attempts."
        )
