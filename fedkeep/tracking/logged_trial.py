"""What is known of a trial whose metrics are logged, and the interface of what writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FOLDER = "logs"
"""The folder in a run folder that holds what is logged."""


@dataclass(frozen=True)
class LoggedTrial:
    """What is known of a trial before its first round.

    ``run``: The run folder.
    ``title``: The title of the run.
    ``label``: The method's label.
    ``options``: The method's options and the recipe's settings, by name.
    ``test_total``: Test examples by class.
    """

    run: Path
    folder: Path
    title: str
    label: str
    seed: int
    options: Mapping[str, Any]
    test_total: Sequence[int]

    @property
    def name(self) -> str:
        """The name of the trial's folder."""
        return self.folder.name


class MetricWriter(Protocol):
    """Takes the metrics of one trial."""

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a round; those of a round that is written again replace the former."""

    def close(self) -> None:
        """Finish; the trial may be resumed later."""
