"""One trial: a method with a seed, recorded in its own folder, that can be killed and resumed at any time."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors.torch import save

from fedkeep._utils.files import atomic_write
from fedkeep.errors import RunError
from fedkeep.simulation.callbacks import Callback
from fedkeep.simulation.checkpoint import Checkpoint
from fedkeep.simulation.simulation import Simulation
from fedkeep.simulation.state import RoundResult, SimulationState


class TrialBusy(RunError):
    """Another process is running this trial."""


def run_trial(
    simulation: Simulation, folder: Path, callbacks: Sequence[Callback] = (), *, checkpoint_share: float = 0.05
) -> None:
    """Run a simulation to its last round inside a folder, and resume from the folder's checkpoint if there is one.

    It writes ``rounds.jsonl`` (which is the same for equal seeds, however often the trial was killed),
    ``timings.jsonl``, ``checkpoint/``, and at the end ``model.safetensors`` (the first evaluation model; others are in
    ``model-moving.safetensors`` and the like) and ``result.json``.
    If an exception or Ctrl-C stops it, it saves the last finished round first. If it is killed, the rounds since the
    last checkpoint are run again: those of a minute at most, or of the time that saving takes if that is longer.

    Parameters
    ----------
    simulation : Simulation
        The simulation, before its first round.
    folder : Path
        The folder of the trial. No other process can run the trial meanwhile.
    callbacks : Sequence[Callback]
        Called in this order, after the round has been recorded and, if that is due, saved.
    checkpoint_share : float
        The largest share of the time that saving may take.

    Raises
    ------
    TrialBusy
        If another process is running this trial.
    RunError
        If the content of the folder cannot be resumed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0), closing(Records(folder)) as records:
            all_callbacks = [
                records,
                Checkpoints(Checkpoint(folder / "checkpoint", checkpoint_share), records),
                *callbacks,
            ]
            try:
                for callback in all_callbacks:
                    callback.on_trial_begin(simulation)
                while simulation.finished < simulation.rounds:
                    result = simulation.run_round()
                    for callback in all_callbacks:
                        callback.on_round_end(simulation, result)
                    _stop_if_useless(simulation)
            finally:
                for callback in all_callbacks:
                    callback.on_trial_end(simulation)
            _export(simulation, folder)
    except Timeout:
        raise TrialBusy(f"{folder} is being run by another process. Wait for it, or end it, then resume.") from None


def _stop_if_useless(simulation: Simulation) -> None:
    """Raise `RunError` if the model no longer answers, so that more rounds would be wasted."""
    reason = simulation.history.reason_to_stop(simulation.defense, simulation.finished)
    if reason is not None and simulation.finished < simulation.rounds:
        raise RunError(
            f"stopped after round {simulation.finished}: {reason} All rounds are saved. Begin again from the recipe "
            "with stricter checks ([defense]) or other training options; report.html names the refused replies."
        )


def _export(simulation: Simulation, folder: Path) -> None:
    """Write the results of a finished trial."""
    first, *others = simulation.schedule.evaluation_models
    for which in (first, *others):
        weights = simulation.evaluation_model(which)
        model = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        name = "model.safetensors" if which == first else f"model-{which}.safetensors"
        atomic_write(folder / name, save(model, {"format": "pt"}))
    atomic_write(folder / "result.json", json.dumps({"rounds": simulation.finished}))


class JsonlWriter:
    """A file of JSON lines that can be truncated to its length at a checkpoint.

    Parameters
    ----------
    path : Path
        The file, which is created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self.file = path.open("r+b")

    def seek(self, position: int) -> None:
        """Truncate the file to its length at a checkpoint.

        Parameters
        ----------
        position : int
            The length in bytes.

        Raises
        ------
        RunError
            If the file is shorter.
        """
        if self.path.stat().st_size < position:
            raise RunError(
                f"{self.path} is shorter than when the checkpoint was taken, so records are lost. Remove "
                f"{self.path.parent} to run this part again."
            )
        self.cut(position)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and pass it to the operating system, so that it is not lost if the process is killed.

        Parameters
        ----------
        line : dict[str, object]
            The content.
        """
        self.file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self.file.flush()

    def end(self) -> int:
        """Return the position of the end.

        Returns
        -------
        int
            The length of the file in bytes.
        """
        return self.file.tell()

    def cut(self, position: int) -> None:
        """Truncate the file.

        Parameters
        ----------
        position : int
            The new length in bytes.
        """
        self.file.seek(position)
        self.file.truncate()

    def on_disk(self) -> int:
        """Force the file to disk.

        Returns
        -------
        int
            The length of the file in bytes.
        """
        os.fsync(self.file.fileno())
        return self.file.tell()


class Records(Callback):
    """Writes a line for every round into ``rounds.jsonl`` and ``timings.jsonl``.

    Parameters
    ----------
    folder : Path
        The folder of the trial.

    Attributes
    ----------
    written : int
        Number of rounds that are written.
    checkpoint_seconds : float
        Seconds of the last checkpoint, if it was saved after the last written round; 0.0 otherwise.
    """

    def __init__(self, folder: Path) -> None:
        self.rounds = JsonlWriter(folder / "rounds.jsonl")
        self.timings = JsonlWriter(folder / "timings.jsonl")
        self.written = 0
        self.checkpoint_seconds = 0.0
        self._ends = 0, 0  # lengths of the files after the last written round
        self._last: RoundResult | None = None

    def seek(self, finished: int, positions: dict[str, int]) -> None:
        """Truncate the files to their lengths at a checkpoint.

        Parameters
        ----------
        finished : int
            Number of rounds at the checkpoint.
        positions : dict[str, int]
            The lengths in bytes.
        """
        self.rounds.seek(positions.get("rounds", 0))
        self.timings.seek(positions.get("timings", 0))
        self.written, self._ends = finished, (self.rounds.end(), self.timings.end())

    def on_disk(self) -> dict[str, int]:
        """Force the files to disk.

        Returns
        -------
        dict[str, int]
            Their lengths in bytes.
        """
        return {"rounds": self.rounds.on_disk(), "timings": self.timings.on_disk()}

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        self._last = result
        self._write(state, result)

    def on_trial_end(self, state: SimulationState) -> None:
        # Ctrl-C may have come before the last round was written, or while it was.
        if self._last is not None and self._last.record["round"] == state.finished > self.written:
            self._write(state, self._last)

    def _write(self, state: SimulationState, result: RoundResult) -> None:
        """Write a round; this can be repeated after an interruption."""
        self.rounds.cut(self._ends[0])
        self.timings.cut(self._ends[1])
        self.rounds.write(result.record)
        self.timings.write(result.timings | {"checkpoint": self.checkpoint_seconds})
        self.written, self._ends = state.finished, (self.rounds.end(), self.timings.end())
        self.checkpoint_seconds = 0.0

    def close(self) -> None:
        """Close the files."""
        self.rounds.file.close()
        self.timings.file.close()


class Checkpoints(Callback):
    """Restores a simulation from its checkpoint, and saves it from time to time and at the end.

    Parameters
    ----------
    checkpoint : Checkpoint
        The checkpoint.
    records : Records
        The records of the same trial, called before this; their files are truncated to the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, records: Records) -> None:
        self.checkpoint = checkpoint
        self.records = records
        self.saved = 0  # number of rounds that are saved

    def on_trial_begin(self, state: SimulationState) -> None:
        positions = self.checkpoint.restore(state)
        self.records.seek(state.finished, positions)
        self.saved = state.finished

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        if self.checkpoint.due():
            self._save(state)
            self.records.checkpoint_seconds = self.checkpoint.cost

    def on_trial_end(self, state: SimulationState) -> None:
        # Ctrl-C may have come between the end of a round and its record: then the last checkpoint stays.
        if state.finished == self.records.written > self.saved:
            self._save(state)

    def _save(self, state: SimulationState) -> None:
        self.checkpoint.save(state, self.records.on_disk())
        self.saved = state.finished
