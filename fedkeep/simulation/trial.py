"""One cell of a run: a method with a seed, recorded in a folder of its own, that a kill cannot hurt."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors.torch import save

from fedkeep.errors import RunError
from fedkeep.files import write_whole
from fedkeep.simulation.checkpoint import Checkpoint
from fedkeep.simulation.simulation import RoundResult, Simulation

OnRound = Callable[[RoundResult], None]


class TrialBusy(RunError):
    """Another process plays this cell."""


class JsonlWriter:
    """A file of JSON lines that can be cut back to where a checkpoint left it."""

    def __init__(self, path: Path, position: int) -> None:
        path.touch()
        if path.stat().st_size < position:
            raise RunError(
                f"{path} is shorter than when the checkpoint was taken, so records are lost. Remove {path.parent} to "
                "run this part again."
            )
        self.file = path.open("r+b")
        self.cut(position)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line and hand it to the operating system, so that a killed process has told all it did."""
        self.file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self.file.flush()

    def end(self) -> int:
        """Return how long the file is, in bytes."""
        return self.file.tell()

    def cut(self, position: int) -> None:
        """Take back what was written beyond this place."""
        self.file.seek(position)
        self.file.truncate()

    def on_disk(self) -> int:
        """Force the file to disk and return how long it is, in bytes."""
        os.fsync(self.file.fileno())
        return self.file.tell()


def run_trial(
    engine: Simulation,
    folder: Path,
    on_round: OnRound | None = None,
    checkpoint_share: float = 0.05,
    prepare: Callable[[], None] | None = None,
) -> None:
    """Play an engine to its last round inside a folder, from its checkpoint if it has one.

    Writes ``rounds.jsonl`` (equal for equal seeds, however often killed), ``timings.jsonl``, ``checkpoint/``, and at
    the end ``model.safetensors`` (the served model, tensors by name) and ``result.json``. Stopped by an exception or
    Ctrl-C it saves the last finished round first; killed, it loses the round in flight and, of those before it, what a
    minute held at most (or as long as saving takes), and plays them again. ``prepare`` is called first, when nobody
    else can run_trial here any more.

    Raises
    ------
    RunError
        If another process plays in this folder, or what is in it cannot be continued.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            if prepare is not None:
                prepare()
            _play(engine, folder, on_round, checkpoint_share)
    except Timeout:
        raise TrialBusy(f"{folder} is being played by another process. Wait for it, or end it, then resume.") from None


def _play(engine: Simulation, folder: Path, on_round: OnRound | None, checkpoint_share: float) -> None:
    checkpoint = Checkpoint(folder / "checkpoint", checkpoint_share)
    positions = checkpoint.restore(engine)
    records = JsonlWriter(folder / "rounds.jsonl", positions.get("rounds", 0))
    timings = JsonlWriter(folder / "timings.jsonl", positions.get("timings", 0))

    def save_state() -> None:
        checkpoint.save(engine, {"rounds": records.on_disk(), "timings": timings.on_disk()})

    def settle(finished: RoundResult) -> tuple[int, int, int]:
        """Write down a round, and return how many are written and where; safe to repeat after a stop half-way."""
        records.cut(written[1])
        timings.cut(written[2])
        records.write(finished.record)
        timings.write(finished.timings | {"checkpoint": spent})
        return engine.finished, records.end(), timings.end()

    written, saved, spent = (engine.finished, records.end(), timings.end()), engine.finished, 0.0
    finished: RoundResult | None = None
    with records.file, timings.file:
        try:
            while engine.finished < engine.rounds:
                finished = engine.run_round()
                written = settle(finished)
                spent = 0.0
                if checkpoint.due():
                    save_state()
                    saved, spent = engine.finished, checkpoint.cost
                if on_round is not None:
                    on_round(finished)
        finally:
            if finished is not None and finished.record["round"] == engine.finished > written[0]:
                written = settle(finished)
            # Ctrl-C may have struck between the end of a round and what it returns; then the last checkpoint stands.
            if engine.finished == written[0] > saved:
                save_state()
    served = engine.evaluation_model(engine.schedule.served[0])
    model = {name: tensor.detach().cpu().contiguous() for name, tensor in served.items()}
    write_whole(folder / "model.safetensors", save(model, {"format": "pt"}))
    write_whole(folder / "result.json", json.dumps({"rounds": engine.finished}))
