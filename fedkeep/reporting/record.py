"""What a run recorded of one method with one seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep import metrics

TAIL = 10  # evaluations, or rounds, over which what swings is averaged
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LostClient:
    """A client that did not finish a round, and why."""

    round: int
    client: str
    reason: str


@dataclass(frozen=True)
class Record:
    """One method with one seed: what was configured, and one record per finished round.

    Accuracies and forgetting are fractions; a value that was never measured is NaN.
    """

    label: str
    algorithm: str
    options: Mapping[str, Any]
    seed: int
    schedule: str
    rounds: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    partition: Mapping[str, Any]
    info: Mapping[str, Any]
    finished: bool
    path: Path | None = None

    @property
    def rounds_done(self) -> int:
        """Return how many rounds are on record."""
        return len(self.rounds)

    @property
    def rounds_planned(self) -> int:
        """Return how many rounds were asked for."""
        return int(self.info.get("rounds", len(self.rounds)))

    @property
    def generator(self) -> str:
        """Return which generator made images for it, and what that had seen; empty without one."""
        return str(self.info.get("generator", ""))

    @property
    def extractor(self) -> str:
        """Return which pre-trained extractors its networks have, and what these had seen; empty without one."""
        return str(self.info.get("extractor", ""))

    @property
    def versions(self) -> tuple[str, ...]:
        """Return the versions that played its rounds; several where another one resumed it, none in old records.

        At real sites it is the server's.
        """
        return tuple(map(str, self.info.get("versions", ())))

    @property
    def lost(self) -> list[LostClient]:
        """Return every client that was lost, in order of rounds."""
        return [
            LostClient(int(row["round"]), str(client), str(reason))
            for row in self.rounds
            for client, reason in (row.get("lost") or {}).items()
        ]

    @property
    def undone(self) -> list[int]:
        """Return the rounds that were undone because too few clients answered."""
        return [int(row["round"]) for row in self.rounds if row.get("undone")]

    def accuracy_by_class(self, row: Mapping[str, Any]) -> Floats:
        """Return the class-wise accuracy of an evaluated round or visit, float64 [C]."""
        return metrics.class_accuracy(*self.counted(row))

    def counted(self, row: Mapping[str, Any]) -> tuple[Floats, Floats]:
        """Return correct and all test examples by class, both float64 [C]; 0 for classes that had not arrived."""
        missing = len(self.test_total) - len(row["correct"])
        correct = np.asarray([*row["correct"], *[0] * missing], dtype=np.float64)
        return correct, np.where(np.arange(len(correct)) < len(row["correct"]), self.test_total, 0.0)

    @cached_property
    def test_total(self) -> Floats:
        """Return the test examples by class, float64 [C]."""
        return np.asarray(self.info.get("test_total", []), dtype=np.float64)

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Return the records of the rounds that were evaluated."""
        return [row for row in self.rounds if row.get("correct") is not None]
