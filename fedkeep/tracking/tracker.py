"""The callback that passes each round's metrics on, and the names of those who take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep import metrics
from fedkeep.errors import ConfigError, MissingExtra, did_you_mean
from fedkeep.rounds.state import RoundResult, SimulationState
from fedkeep.tracking.logged_trial import LoggedTrial, MetricWriter
from fedkeep.tracking.writers import WRITERS
from fedkeep.trials.callbacks import Callback

Floats = NDArray[np.float64]
PACKAGES: Mapping[str, str] = {"csv": "csv", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""By name in a recipe's ``log``, the module that is needed."""


def check_log(names: Sequence[str]) -> None:
    """Check the names in a recipe's ``log``."""
    for name in names:
        if name not in PACKAGES:
            raise ConfigError(f"log cannot be {name!r}.{did_you_mean(str(name), PACKAGES)}")


def check_packages(names: Sequence[str]) -> None:
    """Check that what is needed to log is installed."""
    for name in names:
        if find_spec(PACKAGES[name]) is None:
            raise MissingExtra(f"log = {name!r}", "tracking")


class Tracker(Callback):
    """Passes the metrics of each round on.

    ``log``: ``csv``, ``tensorboard``, ``wandb`` or ``mlflow``.
    """

    def __init__(self, log: str, trial: LoggedTrial) -> None:
        self.log = log
        self.trial = trial
        self.writer: MetricWriter | None = None
        self._history: list[Floats] = []

    def on_trial_begin(self, state: SimulationState) -> None:
        self._history = []
        earlier = [self._values(record, {}) for record in self._records(state.finished)]
        self.writer = WRITERS[self.log](self.trial, state.finished, earlier)

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        if self.writer is not None:
            self.writer.write(result.record["round"], self._values(result.record, result.timings))

    def on_trial_end(self, state: SimulationState) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def _records(self, finished: int) -> list[dict[str, Any]]:
        """Return the records of the rounds before a resume, from which forgetting goes on."""
        file = self.trial.folder / "rounds.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if finished and file.is_file() else []
        return [json.loads(line) for line in lines[:finished]]

    def _values(self, record: Mapping[str, Any], timings: Mapping[str, float]) -> dict[str, float]:
        values = {
            "round": record["round"],
            "train_loss": record.get("loss"),
            "bytes_up": record.get("up"),
            "bytes_down": record.get("down"),
            "lost_clients": len(record.get("lost") or ()),
            "train_seconds": timings.get("train"),
        }
        if "correct" in record:
            values |= {"test_loss": record.get("test_loss"), "accuracy": self._accuracy(record)}
            self._history.append(self._by_class(record))
            values["forgetting"] = metrics.forgetting(np.stack(self._history))
            for which, other in (record.get("evaluation_models") or {}).items():
                values[f"accuracy_{which}"] = self._accuracy(other)
        return {name: float(value) for name, value in values.items() if value is not None}

    def _accuracy(self, record: Mapping[str, Any]) -> float:
        correct = record["correct"]
        return metrics.accuracy(correct, self.trial.test_total[: len(correct)])

    def _by_class(self, record: Mapping[str, Any]) -> Floats:
        correct = list(record["correct"])
        missing = len(self.trial.test_total) - len(correct)  # classes that have not arrived
        known = metrics.class_accuracy(correct, self.trial.test_total[: len(correct)])
        return np.concatenate([known, np.full(missing, np.nan)])
