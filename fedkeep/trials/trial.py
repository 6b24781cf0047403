"""One trial: a method with a seed, recorded in its own folder, that can be killed and resumed at any time."""

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors.torch import save
from torch import Tensor

from fedkeep._utils.digests import Digest, Identity, check_file, digest_of, is_sealed, read_json, write_manifest
from fedkeep._utils.files import atomic_write, make_folder, sync_folder
from fedkeep._utils.torch_state import set_plain_torch
from fedkeep.errors import RunError
from fedkeep.rounds.state import RoundResult, SimulationState
from fedkeep.trials.callbacks import Callback, Evaluation, Outcome
from fedkeep.trials.checkpoint import Checkpoint
from fedkeep.trials.simulation import ChangedInPlace, Simulation

MANIFEST = "manifest.json"
"""The file that makes a trial a finished one: it is written last, and lists all other files with their digests."""
LEDGER = "privacy.jsonl"
"""What left with noise, a line for each round, rounds that were repeated after a restart included."""


class CallbackFailed(RunError):
    """A callback of the user raised an exception, which ends its trial."""


class TrialBusy(RunError):
    """Another process is running this trial."""


@contextmanager
def lock_trial(folder: Path, name: str = ".lock", by: str = "process") -> Iterator[None]:
    """Keep others from running the same trial; raise `TrialBusy` if one does."""
    make_folder(folder)
    lock = FileLock(folder / name, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise TrialBusy(f"{folder} is being run by another {by}. Wait for it, or end it, then resume.") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        raise RunError(
            f"{folder} is on a file system without locks ({error.strerror}). Choose a folder elsewhere (--out)."
        ) from error
    try:
        yield
    finally:
        lock.release()


MayRepeat: TypeAlias = Callable[[SimulationState, RoundResult], bool]
"""Tells of the last round whether it is to be repeated if the trial stops after it."""


def run_trial(
    simulation: Simulation,
    folder: Path,
    callbacks: Sequence[Callback] = (),
    *,
    own: Sequence[Callback] = (),
    identity: Identity = Identity(),  # noqa: B008  # which is frozen
    checkpoint_share: float = 0.01,
    may_repeat: MayRepeat = lambda state, result: False,
) -> None:
    """Run a simulation to its last round inside a folder, and resume from the folder's checkpoint if there is one.

    It writes ``rounds.jsonl`` (which is the same for equal seeds, however often the trial was killed),
    ``timings.jsonl``, ``checkpoint/``, and at the end ``model.safetensors`` (the first evaluation model; others are in
    ``model-moving.safetensors`` and the like), ``result.json`` and ``manifest.json``. If an exception or Ctrl-C stops
    it, it saves the last finished round first. If it is killed, the rounds since the last checkpoint are run again:
    those of a minute at most, or of the time that saving takes if that is longer.

    ``folder``: The folder of the trial. No other process can run the trial meanwhile.
    ``callbacks``: Called in this order, after the round has been recorded and, if that is due, saved.
    ``own``: The user's callbacks. They are called after the others when a trial begins and ends, and before them after
        a round, to whose record they may add (see `Callback.on_round_end`).
    ``identity``: The trial: its manifests say that they belong to it, and what belongs to another one is refused.
    ``checkpoint_share``: The largest share of the time that saving may take.
    ``may_repeat``: Tells of a round whether it is to be repeated if the trial stops after it. There is no checkpoint
        after such a round; by default there are none.
    """
    with lock_trial(folder), closing(Records(folder)) as records:
        checkpoint = Checkpoint(folder / "checkpoint", checkpoint_share, identity)
        builtin = [records, Checkpoints(simulation, checkpoint, records, may_repeat), *callbacks]
        with ExitStack() as ends:  # all are called, in their order, also if one of them raises an exception
            for callback in reversed(own):
                ends.enter_context(_plain_after())
                ends.callback(callback.on_trial_end, simulation)
            for callback in reversed(builtin):
                ends.callback(callback.on_trial_end, simulation)
            for callback in builtin:
                callback.on_trial_begin(simulation)
            for callback in own:
                with _named(callback):
                    callback.on_trial_begin(simulation)
            while simulation.finished < simulation.rounds and not simulation.ended:
                try:
                    records.last = result = simulation.run_round()
                except ChangedInPlace:
                    records.last = None  # the last checkpoint stays
                    raise
                stops = False
                for callback in own:  # before the round is recorded
                    with _named(callback):
                        stops |= _add_metrics(result, callback.on_round_end(simulation, result))
                if stops and "correct" not in result.record:  # the last round is always evaluated
                    for evaluation in (one for one in simulation.callbacks if isinstance(one, Evaluation)):
                        evaluation.evaluate(simulation, result)
                simulation.ended = stops
                for callback in builtin:
                    callback.on_round_end(simulation, result)
                if not simulation.ended:
                    _stop_if_useless(simulation)
        _export(simulation, folder, records.on_disk(), identity)


@contextmanager
def _named(callback: Callback) -> Iterator[None]:
    """Say which of the user's callbacks has raised an exception."""
    try:
        with _plain_after():
            yield
    except Exception as error:
        what = f"the callback {type(callback).__name__} raised {type(error).__name__}: {error}"
        raise CallbackFailed(what) from error


@contextmanager
def _plain_after() -> Iterator[None]:
    """Take back what the user's code in the block sets in PyTorch: it is not for the next round."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        set_plain_torch()
        torch.set_num_threads(threads)


def _plain(value: Any) -> Any:
    """Return a number of NumPy, or one in a tensor, as Python has it; anything else as it is."""
    return value.item() if isinstance(value, np.generic | Tensor) and value.ndim == 0 else value


def _add_metrics(result: RoundResult, outcome: Outcome) -> bool:
    """Add what a callback measured to a round's record, and tell whether it ends the trial."""
    if outcome is None:
        return False
    if not isinstance(outcome, tuple) or len(outcome) != 2 or not isinstance(outcome[1], Mapping):
        raise TypeError(f"on_round_end returns (stop, metrics), such as (False, {{}}), or None, not {outcome!r:.80}")
    stop, metrics = outcome
    metrics = {name: _plain(value) for name, value in metrics.items()}
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"the metric {name!r} is {value!r:.80}, not a number")
    if metrics:
        added = result.record.get("measured", {})
        result.record["measured"] = {**added, **{name: float(value) for name, value in metrics.items()}}
    return bool(stop)


def _stop_if_useless(simulation: Simulation) -> None:
    """Raise `RunError` if the model no longer answers, so that more rounds would be wasted."""
    reason = " ".join(filter(None, (step.reason_to_stop(simulation) for step in simulation.steps)))
    if reason and simulation.finished < simulation.rounds:
        raise RunError(
            f"stopped after round {simulation.finished}: {reason} All rounds are saved. Begin again from the recipe "
            "with stricter checks ([defense]) or other training options; report.html names the refused replies."
        )


def _export(simulation: Simulation, folder: Path, records: Mapping[str, Digest], identity: Identity) -> None:
    """Write the results of a finished trial, and last the manifest that makes it a finished one."""
    files = dict(records)

    def write(name: str, content: bytes) -> None:
        atomic_write(folder / name, content, sync=False)
        files[name] = digest_of(content)

    first, *others = simulation.evaluation_models
    for which in (first, *others):
        weights = simulation.evaluation_model(which)
        frozen = {name: tensor.clone() for name, tensor in simulation.context.runner.frozen.items()}  # tied ones too
        whole = {**frozen, **weights}  # what is exported has what did not change too
        model = {name: tensor.detach().cpu().contiguous() for name, tensor in whole.items()}
        name = "model.safetensors" if which == first else f"model-{which}.safetensors"
        write(name, save(model, {"format": "pt"}))
    write("result.json", json.dumps({"rounds": simulation.finished}).encode())
    for path in sorted(folder.glob("*.json")):  # which describe the trial
        content = path.read_bytes()
        if path.name != MANIFEST and is_sealed(content):
            read_json(path)  # a new digest must not confirm what was damaged since it was written
            files[path.name] = digest_of(content)
    sync_folder(folder)
    write_manifest(folder / MANIFEST, files, identity=identity.to_table())


End: TypeAlias = tuple[int, "hashlib._Hash"]


class JsonlWriter:
    """A file of JSON lines that can be truncated to where it was at a checkpoint.

    ``path``: The file, which is created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self.file = path.open("r+b")
        self._hash = hashlib.sha256()

    def seek(self, digest: Digest) -> None:
        """Truncate the file to what it was at a checkpoint."""
        check_file(self.path, digest, beginning=True)
        self.file.seek(0)
        self.cut((digest.bytes, hashlib.sha256(self.file.read(digest.bytes))))

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and pass it to the operating system, so that it is not lost if the process is killed.

        JSON has no numbers that are not finite, such as the test loss of a model that diverged: null stands for them.
        """
        try:
            text = json.dumps(line, separators=(",", ":"), allow_nan=False)
        except ValueError:
            text = json.dumps(_without_nonfinite(line), separators=(",", ":"), allow_nan=False)
        content = text.encode() + b"\n"
        self.file.write(content)
        self.file.flush()
        try:
            is_there = os.path.samestat(os.fstat(self.file.fileno()), self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        if not is_there:
            raise RunError(f"{self.path} was removed while its trial was run, which ends it.")
        self._hash.update(content)

    def go_to_end(self) -> None:
        """Go behind the last whole line, since a kill may have cut one short."""
        content = self.file.read()
        end = content.rfind(b"\n") + 1
        self.cut((end, hashlib.sha256(content[:end])))

    def end(self) -> End:
        """Return what `cut` needs to return to this end.

        Returns: The length of the file in bytes, and the hash of its content.
        """
        return self.file.tell(), self._hash.copy()

    def cut(self, end: End) -> None:
        """Truncate the file."""
        self.file.seek(end[0])
        self.file.truncate()
        self._hash = end[1].copy()

    def on_disk(self) -> Digest:
        """Force the file to disk."""
        os.fsync(self.file.fileno())
        return Digest(self.file.tell(), self._hash.hexdigest())


def _without_nonfinite(value: Any) -> Any:
    """Return what a line of JSON holds, with None in the place of numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _without_nonfinite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Records(Callback):
    """Writes a line for every round into ``rounds.jsonl`` and ``timings.jsonl``.

    ``written``: Number of rounds that are written.
    ``checkpoint_seconds``: Seconds of the last checkpoint, if it was saved after the last written round; 0.0 otherwise.
    ``last``: The last round that was written, or began to be.
    """

    def __init__(self, folder: Path) -> None:
        self.rounds = JsonlWriter(folder / "rounds.jsonl")
        self.timings = JsonlWriter(folder / "timings.jsonl")
        self.ledger = JsonlWriter(folder / LEDGER) if (folder / LEDGER).exists() else None
        if self.ledger is not None:
            self.ledger.go_to_end()
        self._folder = folder
        sync_folder(folder)
        self.written = 0
        self.checkpoint_seconds = 0.0
        self._ends = self.rounds.end(), self.timings.end()  # of the files after the last written round
        self.last: RoundResult | None = None
        self._released: tuple[RoundResult, End] | None = None  # a round, and where it is in the ledger

    def check(self, digests: Mapping[str, Digest]) -> None:
        """Check that the files begin as they did at a checkpoint.

        ``digests``: The files' digests at the checkpoint, by name.
        """
        for name, digest in digests.items():
            check_file(self._folder / name, digest, beginning=True)

    def seek(self, finished: int, digests: Mapping[str, Digest]) -> None:
        """Truncate the files to what they were at a checkpoint.

        ``digests``: The files' digests at the checkpoint, by name; empty before the first.
        """
        for file in (self.rounds, self.timings):
            file.seek(digests.get(file.path.name, digest_of(b"")))
        self.written, self._ends = finished, (self.rounds.end(), self.timings.end())

    def on_disk(self) -> dict[str, Digest]:
        """Force the files to disk.

        Returns: Their digests, by name.
        """
        return {file.path.name: file.on_disk() for file in (self.rounds, self.timings, self.ledger) if file}

    def on_trial_end(self, state: SimulationState) -> None:
        # Ctrl-C may have come before the last round was written, or while it was.
        if self.last is not None and self.last.record["round"] == state.finished > self.written:
            self.on_round_end(state, self.last)

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        """Write a round; this can be repeated after an interruption. The ledger loses no release."""
        if result.releases:
            if self.ledger is None:
                self.ledger = JsonlWriter(self._folder / LEDGER)
            if self._released is None or self._released[0] is not result:
                self._released = result, self.ledger.end()
            self.ledger.cut(self._released[1])  # of this very round, if an error came while it was written
            self.ledger.write(result.releases)
        self.rounds.cut(self._ends[0])
        self.timings.cut(self._ends[1])
        self.rounds.write(result.record)
        self.timings.write(result.timings | {"checkpoint": self.checkpoint_seconds})
        self.written, self._ends = state.finished, (self.rounds.end(), self.timings.end())
        self.checkpoint_seconds = 0.0

    def close(self) -> None:
        """Close the files."""
        for file in (self.rounds, self.timings, self.ledger):
            if file is not None:
                file.file.close()


class Checkpoints(Callback):
    """Restores a simulation from its checkpoint, and saves it from time to time and at the end.

    ``records``: The records of the same trial, called before this; their files are truncated to the checkpoint.
    """

    def __init__(self, simulation: Simulation, checkpoint: Checkpoint, records: Records, may_repeat: MayRepeat) -> None:
        self.simulation = simulation
        self.checkpoint = checkpoint
        self.records = records
        self.may_repeat = may_repeat
        self.saved = 0  # number of rounds that are saved

    def on_trial_begin(self, state: SimulationState) -> None:
        self.records.seek(state.finished, self.checkpoint.restore(self.simulation, self.records.check))
        self.saved = state.finished

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        if self.checkpoint.due() and not self.may_repeat(state, result):
            self._save(state)
            self.records.checkpoint_seconds = self.checkpoint.cost

    def on_trial_end(self, state: SimulationState) -> None:
        # Ctrl-C may have come between the end of a round and its record: then the last checkpoint stays.
        last = self.records.last
        if state.finished == self.records.written > self.saved and last and not self.may_repeat(state, last):
            self._save(state)

    def _save(self, state: SimulationState) -> None:
        self.checkpoint.save(self.simulation, self.records.on_disk())
        self.saved = state.finished
