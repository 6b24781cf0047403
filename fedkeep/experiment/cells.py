"""Play the cells of runs, each a method with a seed: one after another, or spread over worker processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedkeep import doing
from fedkeep.engine.cell import CellBusy, play
from fedkeep.engine.choose import choose_stack
from fedkeep.engine.embedded import Embedded
from fedkeep.errors import RunError
from fedkeep.experiment.folders import TRIAL_FILE, cell_folder, is_finished
from fedkeep.experiment.helpers import Helpers, useful
from fedkeep.experiment.machine import Machine, OnProgress, Progress
from fedkeep.experiment.provenance import player
from fedkeep.experiment.reading import load_recipe
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.setup import describe_cell, describe_partition, engine_for, federate
from fedkeep.files import write_whole

DOING = "doing.json"
"""In the folder of a cell that another process plays: what its round is at, while there is one."""


@dataclass(frozen=True)
class Job:
    """One cell to play: a method with a seed, in a run folder. ``name`` is what progress calls it."""

    folder: Path
    recipe: Recipe
    method: Method
    seed: int
    name: str

    @property
    def cell(self) -> Path:
        """The cell's own folder."""
        return cell_folder(self.folder, self.method, self.seed)


def describe_begun(cell: Path, description: Mapping[str, Any]) -> None:
    """Write what a cell is, and which versions play it; raise `RunError` if its results rest on another thing now.

    Cells of versions that did not name a thing are not asked about it.
    """
    path, players = cell / TRIAL_FILE, [player()]
    if (cell / "checkpoint" / "manifest.json").is_file():
        before = _begun(path)
        begun, earlier = before.get("dependencies", {}), before.get("versions", ["a version that did not say"])
        players = list(dict.fromkeys([*earlier, *players]))
        others = [name for name, now in description["dependencies"].items() if begun.get(name, now) != now]
        if others:
            raise RunError(
                f"{cell} was begun with another {' and '.join(others)} than there is now, so that its rounds would not "
                "belong together. Put back what was there, in a generator's or an extractor's folder too, or begin a "
                "new run."
            )
    write_whole(path, json.dumps({**description, "versions": players}))


def _begun(path: Path) -> dict[str, Any]:
    """Return what a cell that was begun is; empty if nobody said; raise `RunError` if it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise RunError(
            f"cannot read {path}: {error}. Remove the folder {path.parent} to play its cell anew."
        ) from error
    return found if isinstance(found, dict) else {}


def play_all(jobs: Sequence[Job], machine: Machine, on_progress: OnProgress | None, again: str) -> None:
    """Play cells, each from its checkpoint, and return when all are finished.

    Parameters
    ----------
    machine : its device, threads, stacks and graphs give way to those that a run began with.
    again : the command that continues, for the error after a failure.
    """
    workers = machine.workers or (os.cpu_count() or 1 if machine.device == "cpu" else 1)
    tell = on_progress or (lambda progress: None)
    if min(workers, len(jobs)) > 1:
        _spread(jobs, machine, min(workers, len(jobs)), tell, again, workers // len(jobs))
        for job in jobs:
            if not is_finished(job.cell):
                raise CellBusy(f"{job.cell} is being played by another process. Wait for it, or end it, then: {again}")
    else:
        for job in jobs:
            _play(job, machine, tell, workers)


def as_begun(folder: Path, machine: Machine) -> Machine:
    """Return the machine with what results depend on as a run began with it: device, threads, stacks and graphs."""
    try:
        info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        stack = int(info.get("stack", 1))  # runs of versions without stacks did not name them
        graphs = bool(info.get("graphs", False))
        return replace(machine, device=str(info["device"]), threads=int(info["threads"]), stack=stack, graphs=graphs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"cannot read {folder / 'run.json'}: {type(error).__name__}: {error}") from error


def _play(job: Job, machine: Machine, tell: OnProgress, spare: int) -> None:
    """Play one cell; ``spare`` processes may share its cohorts."""
    recipe, machine = job.recipe, as_begun(job.folder, machine)
    federation = federate(recipe, job.seed, machine.data_dir)
    description = describe_cell(recipe, job.method, job.seed, federation, machine.data_dir)
    last: dict[str, Any] | None = None

    def on_round(finished: Any) -> None:
        nonlocal last
        last = finished.record if "correct" in finished.record else last
        tell(Progress(job.name, finished.record["round"], recipe.rounds, last, _images(description, last)))
        helpers.consider(finished)

    def on_word(word: str) -> None:
        tell(Progress(job.name, engine.finished, recipe.rounds, last, _images(description, last), word))

    with pinned_threads(machine.threads):
        engine = engine_for(
            recipe, job.method, job.seed, federation, machine.device, machine.data_dir, graphs=machine.graphs
        )
        count = useful(job.method.algorithm, recipe.run.cohort, spare if machine.device == "cpu" else 0)
        helpers = Helpers(engine, job.folder, job.method.label, job.seed, machine, count)

        def prepare() -> None:
            engine.stack = _stack(job, engine, machine, max(count, 1))
            describe_begun(job.cell, description | {"stack": engine.stack})
            held = describe_partition(federation, visits=recipe.run.evaluate_visits)
            write_whole(job.cell / "partition.json", json.dumps(held))

        try:
            with doing.heard_by(on_word):
                play(engine, job.cell, on_round, prepare=prepare)
        finally:
            helpers.dismiss()


def _stack(job: Job, engine: Embedded, machine: Machine, workers: int) -> int:
    """Return how many clients this cell trains as one: as it was begun, as the user says, or as is quickest here."""
    try:
        return int(_begun(job.cell / TRIAL_FILE)["stack"])
    except (KeyError, TypeError):
        if job.method.algorithm.schedule != "parallel":
            return 1  # nobody trains beside another, and helpers work ahead only where there are no groups
        # The trial's batches of many lengths would be timed while they are recorded.
        return machine.stack or (1 if machine.graphs else choose_stack(engine, workers))


def _spread(jobs: Sequence[Job], machine: Machine, workers: int, tell: OnProgress, again: str, spare: int) -> None:
    """Play cells in worker processes; this one reads how far they are from the records that they write.

    With more cores than cells, each may have ``spare`` processes for its cohorts.

    Every worker goes through all cells and plays those that are neither finished nor being played, so that none waits
    while another has work left. Whether one lives is asked of the operating system: a pool that waits on pipes was seen
    to miss a death, and to wait for ever.
    """
    context = multiprocessing.get_context("spawn")  # a forked PyTorch may hang
    stop = context.RawValue("b", 0)  # without a lock, which a dying worker could take along
    places = [(str(job.folder), job.method.label, job.seed) for job in jobs]
    processes = [
        context.Process(target=_work, args=(places[i:] + places[:i], machine, stop, spare)) for i in range(workers)
    ]
    watchers = [_Watcher(job) for job in jobs]
    for job in jobs:
        (job.cell / DOING).unlink(missing_ok=True)  # a kill may have left it
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            time.sleep(0.3)
            for watcher in watchers:
                watcher.tell(tell)
            _raise_for([process.exitcode for process in processes], again)
        _raise_for([process.exitcode for process in processes], again)
        if stop.value:
            raise KeyboardInterrupt
    finally:
        stop.value = 1  # after a failure the other cells save their last round and end, instead of being waited for
        for process in processes:
            if process.pid is not None:
                process.join()


def _raise_for(codes: Sequence[int | None], again: str) -> None:
    """Raise what the exit codes of workers say: 1 is an exception, which the worker has printed; others are a death."""
    failed = [code for code in codes if code]
    if 1 in failed:
        raise RunError(f"a run failed in a worker process; its error stands above. What is finished is kept: {again}")
    if failed:
        raise RunError(
            f"a worker process died with code {failed[0]}, perhaps for lack of memory. What is finished is kept: "
            f"{again}"
        )


_stop: Any = None  # of a worker process: a flag, shared by all, that tells it to end


def _tell_or_stop(cell: Path, progress: Progress) -> None:
    if _stop.value or _orphaned():
        raise KeyboardInterrupt
    if progress.doing:
        _leave_word(cell, progress)


def _leave_word(cell: Path, progress: Progress) -> None:
    """Write what a long round is at for `_Watcher`, which sees by itself when a round is finished."""
    with suppress(OSError):  # no run shall end because its progress cannot be shown
        write_whole(cell / DOING, json.dumps({"done": progress.done, "doing": progress.doing}))


def _work(places: list[tuple[str, str, int]], machine: Machine, stop: Any, spare: int) -> None:
    """Play cells, each a run folder, a method's label and a seed, in a worker process, unless all shall stop."""
    global _stop
    _stop = stop
    from fedkeep.experiment.plugins import use

    use(machine.use)
    recipes: dict[str, Recipe] = {}
    try:
        for folder, label, seed in places:
            if stop.value:
                return
            if folder not in recipes:
                recipes[folder] = load_recipe(str(Path(folder) / "recipe.toml"), allow_code=machine.allow_code)
            method = recipes[folder].method(label)
            job = Job(Path(folder), recipes[folder], method, seed, label)
            if is_finished(job.cell):
                continue
            try:
                _play(job, machine, partial(_tell_or_stop, job.cell), spare)
                (job.cell / DOING).unlink(missing_ok=True)
            except CellBusy:
                continue  # another worker is at it
    except KeyboardInterrupt:
        stop.value = 1  # the state is saved; no cell that waits shall begin; the parent process tells the user


def _orphaned() -> bool:
    """Tell whether the process that began this one is gone, killed perhaps."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


class _Watcher:
    """Reads a cell's records as they grow."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.position = 0
        self.last: dict[str, Any] | None = None
        self.done = self.told = 0
        self.doing = ""
        self.description: dict[str, Any] = {}

    def tell(self, tell: OnProgress) -> None:
        path = self.job.cell / "rounds.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            if path.stat().st_size < self.position:
                self.position = 0  # a resumed cell starts from its checkpoint
            file.seek(self.position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.position += len(line)
                record = json.loads(line)
                self.done = record["round"]
                self.last = record if "correct" in record else self.last
        at = self._doing()
        if (self.done, at) != (self.told, self.doing):
            self.told, self.doing = self.done, at
            if not self.description:
                self.description = json.loads((self.job.cell / TRIAL_FILE).read_text(encoding="utf-8"))
            images = _images(self.description, self.last)
            tell(Progress(self.job.name, self.done, self.job.recipe.rounds, self.last, images, at))

    def _doing(self) -> str:
        """Return what the round in flight is at, as far as its process said."""
        try:
            said = json.loads((self.job.cell / DOING).read_text(encoding="utf-8"))
            return str(said["doing"]) if said["done"] == self.done else ""
        except (OSError, ValueError, KeyError):
            return ""


def _images(description: Mapping[str, Any], record: Mapping[str, Any] | None) -> int:
    """Return how many test images a record is about: those of the classes seen by then."""
    return sum(description["test_total"][: len(record["correct"])] if record else description["test_total"])


@contextmanager
def pinned_threads(threads: int) -> Iterator[None]:
    """Let PyTorch use this many threads for the block: results depend on the number, and small models suffer from
    more."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
