"""Extended Dirichlet: so many classes for each client, and Dirichlet shares of each class among its owners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedkeep.data.partition.allocation import allocate
from fedkeep.data.partition.base import Deal, Integers, Scheme, grouped, owners_of, rows_by_class, stream
from fedkeep.options import option

_BATCH = 1 << 20  # random keys drawn at a time; the result does not depend on it


@dataclass(frozen=True)
class ExDir(Scheme):
    """Draw which classes each client owns, then divide each class among its owners with shares from Dir(alpha).

    ExDir(C, alpha) is written here as ``classes`` and ``alpha``. Ownership: ``classes`` distinct classes for each
    client, uniformly, redrawn as a whole until every class has at least ``max(floor(classes * clients / C) div 5,
    1)`` owners. Shares: as `ClasswiseDirichlet`, among the owners only and with the same soft cap of ``n / clients``,
    redrawn (not the ownership) until each client has ``min_size`` examples. If all owners of a class are at the cap
    they share it equally.

    A share may round to nothing, so a client holds *at most* ``classes`` classes.

    Reference: Li & Lyu, "Convergence Analysis of Sequential Federated Learning on Heterogeneous Data", NeurIPS 2023,
    and its code.
    """

    name: ClassVar[str] = "exdir"
    classes: int = option(2, "classes that each client owns", low=1)
    alpha: float = option(0.5, "concentration of the shares: the smaller, the more the clients' sizes differ", low=1e-6)
    min_size: int = option(10, "examples that each client has at least", low=1)
    attempts: int = option(100_000, "draws to try before giving up, of the ownership and of the shares", low=1)

    def deal(self, labels: Integers, classes: int, train: Mapping[str, Tensor], seed: int) -> Deal:
        """Return the first acceptable draw of shares for the first acceptable ownership."""
        self._check(len(labels), classes)
        found = allocate(
            np.bincount(labels, minlength=classes),
            self._owners(classes, seed),
            alpha=self.alpha,
            cap=len(labels) / self.clients,
            min_size=self.min_size,
            attempts=self.attempts,
            seed=seed,
        )
        if found.counts is None:
            raise self.error(found.failure(self.min_size, "raise alpha or classes"))
        return grouped(rows_by_class(labels, classes, seed), owners_of(found.counts), self.clients, found.attempts)

    def _check(self, examples: int, classes: int) -> None:
        if self.classes > classes:
            raise self.error(
                f"a client cannot own {self.classes} classes of {classes}. Set classes to at most {classes}."
            )
        if self.classes * self.clients < classes:
            raise self.error(
                f"{self.clients} clients with {self.classes} classes each cannot cover {classes} classes. "
                f"Set classes to at least {-(-classes // self.clients)}, or use more clients."
            )
        self.require_room(examples, self.min_size)

    def _owners(self, classes: int, seed: int) -> npt.NDArray[np.bool_]:
        """Return who owns what, bool [clients, classes]: the first draw in which every class has enough owners."""
        least = max(self.classes * self.clients // classes // 5, 1)
        keys = stream(seed, "owners")
        largest = max(1, _BATCH // (self.clients * classes))
        tried, batch = 0, 1
        while tried < self.attempts:
            batch = min(batch, self.attempts - tried)
            drawn = keys.random((batch, self.clients, classes))
            # The classes with the smallest of independent uniform keys are a uniform set of distinct classes.
            chosen = np.argpartition(drawn, self.classes - 1, axis=2)[:, :, : self.classes]
            owners = np.zeros(drawn.shape, dtype=bool)
            np.put_along_axis(owners, chosen, True, axis=2)
            accepted = np.flatnonzero(owners.sum(axis=1).min(axis=1) >= least)
            if len(accepted):
                first: npt.NDArray[np.bool_] = owners[accepted[0]]
                return first
            tried += batch
            batch = min(2 * batch, largest)
        raise self.error(
            f"no draw of the ownership out of {tried} gave each of the {classes} classes at least {least} "
            f"owner{'s' if least > 1 else ''}. Raise classes, use more clients, or allow more attempts."
        )
