"""Metrics of each round for TensorBoard or Weights & Biases: only where a recipe asks for it."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedkeep import metrics
from fedkeep._utils.digests import read_json
from fedkeep.errors import ConfigError, MissingExtra, did_you_mean, in_one_line, require_optional
from fedkeep.metrics import Floats
from fedkeep.rounds.state import RoundResult, SimulationState
from fedkeep.trials.callbacks import Callback

log = logging.getLogger(__name__)
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

    @property
    def digest(self) -> str:
        """What tells the trial from all others, wherever its folder is: a resumed trial continues its run."""
        run = read_json(self.run / "run.json").get("id")
        told = f"{run} {self.name}" if run else str(self.folder.resolve())  # older runs have none
        return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


class MetricWriter(Protocol):
    """Takes the metrics of one trial."""

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a round; those of a round that is written again replace the former."""

    def close(self) -> None:
        """Finish; the trial may be resumed later."""


class TensorBoardWriter:
    """Writes event files into ``logs/tensorboard/TRIAL``; show them with ``tensorboard --logdir RUN/logs/tensorboard``.

    ``finished``: Rounds that are finished; what was written after them is hidden.
    """

    def __init__(self, trial: LoggedTrial, finished: int) -> None:
        module = require_optional("torch.utils.tensorboard", "log = 'tensorboard'", "tracking")
        folder = trial.run / FOLDER / "tensorboard" / trial.name
        self.writer = module.SummaryWriter(str(folder), purge_step=finished + 1 if folder.exists() else None)
        if not finished:
            self.writer.add_text("settings", "\n".join(f"- {key}: {value}" for key, value in trial.options.items()))

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Write scalars."""
        for name, value in values.items():
            if name != "round":
                self.writer.add_scalar(name, value, round)
        self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        self.writer.close()


class WandbWriter:
    """Writes a run of Weights & Biases into ``logs/wandb``, offline: send it with ``wandb sync``.

    With ``WANDB_MODE=online`` in the environment it is sent while it runs. No code, no Git state and no measurements of
    the machine are collected.
    """

    def __init__(self, trial: LoggedTrial, finished: int) -> None:
        wandb = require_optional("wandb", "log = 'wandb'", "tracking")
        folder = trial.run / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        quiet = {"silent": True, "disable_git": True, "x_disable_stats": True, "x_disable_meta": True}
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedkeep"),
            name=trial.name,
            group=trial.title,
            # A resumed trial continues its run.
            id=trial.digest,
            resume="allow",
            dir=str(folder),
            config={**trial.options, "method": trial.label, "seed": trial.seed},
            mode=os.environ.get("WANDB_MODE", "offline"),
            reinit="create_new",
            settings=wandb.Settings(console="off", save_code=False, **quiet),
        )

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log metrics."""
        self.run.log(dict(values), step=round)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


WRITERS: dict[str, Callable[[LoggedTrial, int], MetricWriter]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
}
"""By name in a recipe's ``log``, which is also that of the module that is needed, what writes."""


def check_log(names: Sequence[str]) -> None:
    """Check the names in a recipe's ``log``."""
    for name in names:
        if name not in WRITERS:
            raise ConfigError(f"log cannot be {name!r}.{did_you_mean(str(name), WRITERS)}")


def check_packages(names: Sequence[str]) -> None:
    """Check that what is needed to log is installed."""
    for name in names:
        if find_spec(name) is None:
            raise MissingExtra(f"log = {name!r}", "tracking")


class Tracker(Callback):
    """Passes the metrics of each round on.

    ``log``: ``tensorboard`` or ``wandb``.
    """

    def __init__(self, log: str, trial: LoggedTrial) -> None:
        self.log = log
        self.trial = trial
        self.writer: MetricWriter | None = None
        self.written = 0
        self._history: dict[int, Floats] = {}  # by round

    def on_trial_begin(self, state: SimulationState) -> None:
        self._history, self.written = {}, state.finished
        for record in self._lines("rounds.jsonl", state.finished):
            self._values(record, {})
        with self._goes_on_without() if state.finished else self._named():
            self.writer = WRITERS[self.log](self.trial, state.finished)

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        if self.writer is not None:
            values = self._values(result.record, result.timings)
            with self._goes_on_without():
                self.writer.write(result.record["round"], values)
                self.written = state.finished

    def on_trial_end(self, state: SimulationState) -> None:
        writer = self.writer
        if writer is None:
            return
        with self._goes_on_without(), closing(writer):
            # Ctrl-C or another callback may have come between a round's record and this.
            files = (self._lines(name, state.finished)[self.written :] for name in ("rounds.jsonl", "timings.jsonl"))
            for record, timings in zip(*files, strict=False):
                writer.write(record["round"], self._values(record, timings))

    @contextmanager
    def _goes_on_without(self) -> Iterator[None]:
        """Warn of what a package of others raises: its log computes nothing, and no trial ends for it."""
        try:
            yield
        except Exception as error:
            writer, self.writer = self.writer, None
            with suppress(Exception):
                if writer is not None:
                    writer.close()
            told = f"{type(error).__name__}: {in_one_line(error, 300)}"
            log.warning("%s: log = %r cannot be written, and goes on without it: %s", self.trial.name, self.log, told)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say of which log is what a package of others raises, such as for a WANDB_MODE that cannot be."""
        try:
            yield
        except MissingExtra:
            raise
        except Exception as error:
            raise ConfigError(f"log = {self.log!r} cannot begin: {in_one_line(error, 300)}") from error

    def _lines(self, name: str, finished: int) -> list[dict[str, Any]]:
        """Return what a file says of the rounds that are finished, such as those before a resume."""
        file = self.trial.folder / name
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
            counts = metrics.counted(record, self.trial.test_total)
            values |= {"test_loss": record.get("test_loss"), "accuracy": metrics.accuracy(*counts)}
            self._history[record["round"]] = metrics.class_accuracy(*counts)
            values["forgetting"] = metrics.forgetting(np.stack([*self._history.values()]))
            for which, other in (record.get("evaluation_models") or {}).items():
                values[f"accuracy_{which}"] = metrics.accuracy(*metrics.counted(other, self.trial.test_total))
        return {name: float(value) for name, value in values.items() if value is not None}
