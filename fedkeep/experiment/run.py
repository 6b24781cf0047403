"""Carry out a recipe: one cell for each method and seed, in this process or spread over worker processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedkeep.engine.cell import play
from fedkeep.engine.files import write_whole
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.recipe import Method, Recipe, load_recipe
from fedkeep.experiment.setup import checked_cohort, checked_device, describe_cell, engine_for, federate


@dataclass(frozen=True)
class Progress:
    """How far one cell is: rounds finished, of how many, and the last evaluated record, if any."""

    cell: str
    done: int
    rounds: int
    record: dict[str, Any] | None


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Machine:
    """Where and how a recipe is carried out; changes no result on the same device.

    Attributes
    ----------
    device : ``cpu`` or ``cuda``. threads : of PyTorch in each process; more than one is often slower for small models.
    workers : processes that share the cells; 0: one per core.
    data_dir : folder of local data sets. allow_code : let the recipe import a model by name.
    use : files and modules with methods of the user's own, imported first.
    """

    device: str = "cpu"
    threads: int = 1
    workers: int = 0
    data_dir: str | None = None
    allow_code: bool = False
    use: tuple[str, ...] = ()


def begin(recipe: Recipe, out: str | Path | None, machine: Machine, command: Sequence[str] = ()) -> Path:
    """Make a run folder for a recipe and return its path; nothing is trained yet.

    Raises
    ------
    RunError
        If ``out`` exists and holds something.
    """
    checked_device(machine.device)
    for seed in recipe.seeds:  # a missing data set or an impossible partition shows before any training
        checked_cohort(recipe, federate(recipe, seed, machine.data_dir))
    folder = Path(out) if out is not None else _new_folder(recipe.name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(
            f"{folder} exists and is not empty. Choose another --out, or continue it with: fedkeep resume {folder}"
        )
    info = {
        "fedkeep": version("fedkeep"),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": version("numpy")},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "command": list(command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.device,
        "threads": machine.threads,
        "title": recipe.title,
        "recipe": recipe.name,
        "git": _git_revision(),
    }
    write_whole(folder / "recipe.toml", recipe.to_toml())
    write_whole(folder / "run.json", json.dumps(info, indent=2))
    return folder


def carry_out(
    folder: Path, machine: Machine, on_progress: OnProgress | None = None, recipe: Recipe | None = None
) -> None:
    """Play all cells of a run folder that are not finished, each from its checkpoint.

    Safe to call again after a kill. Device and threads are those that the run began with, since results depend on them.
    With ``recipe``, the one that the folder was begun with, nothing needs to be found again by name in this process.
    """
    if not (folder / "recipe.toml").is_file() or not (folder / "run.json").is_file():
        raise RunError(
            f"{folder} is no run folder: it holds no recipe.toml and run.json. Give the folder that a run printed."
        )
    recipe = recipe or load_recipe(str(folder / "recipe.toml"), allow_code=machine.allow_code)
    machine = _as_begun(folder, machine)
    cells = [(method, seed) for seed in recipe.seeds for method in recipe.methods]
    pending = [(method, seed) for method, seed in cells if not (_cell(folder, method, seed) / "result.json").exists()]
    workers = machine.workers or (os.cpu_count() or 1 if machine.device == "cpu" else 1)
    workers = min(workers, len(pending))
    tell = on_progress or (lambda progress: None)
    if workers <= 1:
        for method, seed in pending:
            _play(recipe, method, seed, folder, machine, tell)
    else:
        _spread(recipe, pending, folder, machine, workers, tell)


def _as_begun(folder: Path, machine: Machine) -> Machine:
    """Return the machine with the device and the threads that a run began with."""
    try:
        info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return replace(machine, device=str(info["device"]), threads=int(info["threads"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"cannot read {folder / 'run.json'}: {type(error).__name__}: {error}.") from error


def _play(recipe: Recipe, method: Method, seed: int, folder: Path, machine: Machine, tell: OnProgress) -> None:
    cell = _cell(folder, method, seed)
    federation = federate(recipe, seed, machine.data_dir)
    partition = federation.partition
    counts = partition.counts(federation.dataset.train["label"], federation.dataset.classes)
    write_whole(cell / "cell.json", json.dumps(describe_cell(recipe, method, seed, federation)))
    write_whole(cell / "partition.json", json.dumps(partition.manifest() | {"counts": counts.tolist()}))
    last: dict[str, Any] | None = None

    def on_round(finished: Any) -> None:
        nonlocal last
        last = finished.record if "correct" in finished.record else last
        tell(Progress(cell.name, finished.record["round"], recipe.run.rounds, last))

    with pinned_threads(machine.threads):
        play(engine_for(recipe, method, seed, federation, machine.device), cell, on_round)


def _spread(
    recipe: Recipe,
    pending: list[tuple[Method, int]],
    folder: Path,
    machine: Machine,
    workers: int,
    tell: OnProgress,
) -> None:
    """Play cells in worker processes; this one reads how far they are from the records that they write."""
    context = multiprocessing.get_context("spawn")  # a forked PyTorch may hang
    stop = context.RawValue("b", 0)  # without a lock, which a dying worker could take along
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_listen, initargs=(stop,)) as pool:
        futures: dict[Future[None], str] = {
            pool.submit(_work, str(folder), method.label, seed, machine): _cell(folder, method, seed).name
            for method, seed in pending
        }
        watchers = [_Watcher(folder / "cells" / cell, recipe.run.rounds) for cell in futures.values()]
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for watcher in watchers:
                    watcher.tell(tell)
                for future in done:
                    future.result()
            if stop.value:
                raise KeyboardInterrupt
        except BrokenProcessPool as error:
            raise RunError(
                f"a worker process died, perhaps for lack of memory (there were {workers}). What is finished is kept: "
                f"fedkeep resume {folder} --workers {max(1, workers // 2)}"
            ) from error
        except BaseException:
            stop.value = 1  # the other cells save their last round and end, instead of being waited for
            raise
        finally:
            pool.shutdown(cancel_futures=True)


_stop: Any = None  # of a worker process: a flag, shared by all, that tells it to end


def _listen(stop: Any) -> None:
    global _stop
    _stop = stop


def _tell_or_stop(progress: Progress) -> None:
    if _stop.value:
        raise KeyboardInterrupt


def _work(folder: str, label: str, seed: int, machine: Machine) -> None:
    """Play one cell in a worker process, unless all shall stop."""
    if _stop.value:
        return
    from fedkeep.experiment.plugins import use

    use(machine.use)
    recipe = load_recipe(str(Path(folder) / "recipe.toml"), allow_code=machine.allow_code)
    method = next(method for method in recipe.methods if method.label == label)
    try:
        _play(recipe, method, seed, Path(folder), machine, _tell_or_stop)
    except KeyboardInterrupt:
        _stop.value = 1  # the state is saved; no cell that waits shall begin; the parent process tells the user


class _Watcher:
    """Reads a cell's records as they grow."""

    def __init__(self, cell: Path, rounds: int) -> None:
        self.cell = cell
        self.rounds = rounds
        self.position = 0
        self.last: dict[str, Any] | None = None
        self.done = self.told = 0

    def tell(self, tell: OnProgress) -> None:
        path = self.cell / "rounds.jsonl"
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
        if self.done != self.told:
            self.told = self.done
            tell(Progress(self.cell.name, self.done, self.rounds, self.last))


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


def cell_name(method: Method, seed: int) -> str:
    """Return the folder name of one method with one seed."""
    return f"{method.slug}-seed{seed}"


def _cell(folder: Path, method: Method, seed: int) -> Path:
    return folder / "cells" / cell_name(method, seed)


def _new_folder(recipe: str) -> Path:
    stem = Path(recipe).stem if recipe.endswith(".toml") else recipe.replace("/", "-")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / f"{stem}-{stamp}"
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not folder.exists():
            return folder
    raise ConfigError("runs/ is full of runs of this second. Give --out.")


def _git_revision() -> str | None:
    """Return the revision of the sources that run, if they are a checkout."""
    try:
        told = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None
