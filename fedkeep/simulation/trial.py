"""One trial of a run: a method with a seed, recorded in its own folder, that a kill cannot hurt."""

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
    """Another process runs this trial."""


def run_trial(
    simulation: Simulation, folder: Path, callbacks: Sequence[Callback] = (), *, checkpoint_share: float = 0.05
) -> None:
    """Run a simulation to its last round inside a folder, from its checkpoint if it has one.

    Writes ``rounds.jsonl`` (equal for equal seeds, however often killed), ``timings.jsonl``, ``checkpoint/``, and at
    the end ``model.safetensors`` (the evaluation model, tensors by name) and ``result.json``. Stopped by an exception
    or Ctrl-C it saves the last finished round first; killed, it loses the round under way and, of those before it, what
    a minute held at most (or as long as saving takes), and runs them again.

    Parameters
    ----------
    simulation : Simulation
        At round 0.
    folder : Path
        Of the trial; no other process can run it meanwhile.
    callbacks : Sequence[Callback]
        Called in this order, after the round is recorded and, where it is due, saved.
    checkpoint_share : float
        The largest share of the time that saving may take.

    Raises
    ------
    RunError
        If another process runs this trial, or what is in its folder cannot be continued.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0), closing(Records(folder)) as records:
            everyone = [records, Checkpoints(Checkpoint(folder / "checkpoint", checkpoint_share), records), *callbacks]
            try:
                for callback in everyone:
                    callback.on_trial_begin(simulation)
                while simulation.finished < simulation.rounds:
                    result = simulation.run_round()
                    for callback in everyone:
                        callback.on_round_end(simulation, result)
            finally:
                for callback in everyone:
                    callback.on_trial_end(simulation)
            _export(simulation, folder)
    except Timeout:
        raise TrialBusy(f"{folder} is being run by another process. Wait for it, or end it, then resume.") from None


def _export(simulation: Simulation, folder: Path) -> None:
    """Write what a finished trial leaves beside its records."""
    weights = simulation.evaluation_model(simulation.schedule.served[0])
    model = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    atomic_write(folder / "model.safetensors", save(model, {"format": "pt"}))
    atomic_write(folder / "result.json", json.dumps({"rounds": simulation.finished}))


class JsonlWriter:
    """A file of JSON lines that can be cut back to where a checkpoint left it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self.file = path.open("r+b")

    def seek(self, position: int) -> None:
        """Cut the file where a checkpoint left it; raise `RunError` if it is shorter than it was then."""
        if self.path.stat().st_size < position:
            raise RunError(
                f"{self.path} is shorter than when the checkpoint was taken, so records are lost. Remove "
                f"{self.path.parent} to run this part again."
            )
        self.cut(position)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line and hand it to the operating system, so that a killed process has told all it did."""
        self.file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self.file.flush()

    def end(self) -> int:
        """Return how long the file is, in bytes."""
        return self.file.tell()

    def cut(self, position: int) -> None:
        """Remove what was written beyond this place."""
        self.file.seek(position)
        self.file.truncate()

    def on_disk(self) -> int:
        """Force the file to disk and return how long it is, in bytes."""
        os.fsync(self.file.fileno())
        return self.file.tell()


class Records(Callback):
    """Writes a line for every round into ``rounds.jsonl`` and ``timings.jsonl``.

    Attributes
    ----------
    written : int
        Rounds that are written.
    """

    def __init__(self, folder: Path) -> None:
        self.rounds = JsonlWriter(folder / "rounds.jsonl")
        self.timings = JsonlWriter(folder / "timings.jsonl")
        self.written = 0
        self.checkpoint_seconds = 0.0  # that the last checkpoint took, if it was after the last written round
        self._ends = 0, 0  # of the files, after the last written round
        self._last: RoundResult | None = None

    def seek(self, finished: int, positions: dict[str, int]) -> None:
        """Cut the files where a checkpoint left them, after so many rounds."""
        self.rounds.seek(positions.get("rounds", 0))
        self.timings.seek(positions.get("timings", 0))
        self.written, self._ends = finished, (self.rounds.end(), self.timings.end())

    def on_disk(self) -> dict[str, int]:
        """Force the files to disk and return the positions up to which they are there."""
        return {"rounds": self.rounds.on_disk(), "timings": self.timings.on_disk()}

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        self._last = result
        self._write(state, result)

    def on_trial_end(self, state: SimulationState) -> None:
        # Ctrl-C may have struck before the last round was written, or in the middle of it.
        if self._last is not None and self._last.record["round"] == state.finished > self.written:
            self._write(state, self._last)

    def _write(self, state: SimulationState, result: RoundResult) -> None:
        """Write a round; safe to repeat after a stop half-way."""
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
    """Puts a simulation where its checkpoint was taken, and saves it now and then and at the end.

    Parameters
    ----------
    checkpoint : Checkpoint
        Where and how often.
    records : Records
        Called before this; its files are cut to where the checkpoint left them.
    """

    def __init__(self, checkpoint: Checkpoint, records: Records) -> None:
        self.checkpoint = checkpoint
        self.records = records
        self.saved = 0  # rounds that are saved

    def on_trial_begin(self, state: SimulationState) -> None:
        positions = self.checkpoint.restore(state)
        self.records.seek(state.finished, positions)
        self.saved = state.finished

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        if self.checkpoint.due():
            self._save(state)
            self.records.checkpoint_seconds = self.checkpoint.cost

    def on_trial_end(self, state: SimulationState) -> None:
        # Ctrl-C may have struck between the end of a round and its record; then the last checkpoint stands.
        if state.finished == self.records.written > self.saved:
            self._save(state)

    def _save(self, state: SimulationState) -> None:
        self.checkpoint.save(state, self.records.on_disk())
        self.saved = state.finished
