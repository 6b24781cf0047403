"""Clients that are alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep.data.partition.base import Deal, Integers, Scheme, even_sizes, offsets_of, stream


@dataclass(frozen=True)
class IID(Scheme):
    """Deal a random permutation of the rows in equal slices; sizes differ by at most one and no row is dropped."""

    name: ClassVar[str] = "iid"

    def deal(self, labels: Integers, classes: int, train: Mapping[str, Tensor], seed: int) -> Deal:
        """Return the slices of one permutation."""
        rows = stream(seed, "rows").permutation(len(labels))
        return Deal(rows, offsets_of(even_sizes(len(labels), self.clients)))
