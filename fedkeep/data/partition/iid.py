"""IID clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeep.data.partition.base import Assignment, Integers, Scheme, even_sizes, random_stream, to_offsets


@dataclass(frozen=True)
class IID(Scheme):
    """Cut a random permutation of the rows into equal slices; sizes differ by at most one and no row is dropped."""

    name: ClassVar[str] = "iid"

    def assign(self, labels: Integers, num_classes: int, train: Mapping[str, Tensor], seed: int) -> Assignment:
        """Assign rows to clients; see `Scheme.assign`."""
        rows = random_stream(seed, "rows").permutation(len(labels))
        return Assignment(rows, to_offsets(even_sizes(len(labels), self.num_clients)))
