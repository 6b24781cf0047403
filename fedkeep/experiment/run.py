"""Run folders: made for a recipe, and continued until every trial is finished."""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from fedkeep._utils.files import atomic_write
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.provenance import revision, versions
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.runtime import Machine, recorded_machine


def prepare_run(experiment: Experiment, out: str | Path | None, command: Sequence[str] = ()) -> Path:
    """Make a run folder for an experiment and return its path; nothing is trained yet.

    Raises
    ------
    RunError
        If ``out`` exists and holds something.
    FedKeepError
        If the experiment cannot be carried out.
    """
    experiment.check()
    return create_run_folder(experiment.recipe, out, experiment.machine, command)


def create_run_folder(recipe: Recipe, out: str | Path | None, machine: Machine, command: Sequence[str] = ()) -> Path:
    """Make a run folder for a recipe that was checked, and return its path; raise `RunError` as `prepare_run` does."""
    folder = Path(out) if out is not None else _new_folder(recipe.name)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file. Choose another --out.")
    if folder.exists() and any(_held(folder)):
        again = f", or continue it with: fedkeep resume {folder}" if (folder / "run.json").exists() else ""
        raise RunError(f"{folder} exists and is not empty. Choose another --out{again}.")
    info = {
        "fedkeep": version("fedkeep"),
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "command": list(command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.device,
        "threads": machine.threads,
        "stack": machine.stack,
        "title": recipe.title,
        "recipe": recipe.name,
        "git": revision(),
    }
    atomic_write(folder / "recipe.toml", recipe.to_toml())
    atomic_write(folder / "run.json", json.dumps(info, indent=2))
    return folder


def _held(folder: Path) -> list[Path]:
    """Return what a folder holds, apart from what a kill left of a run that had not begun."""
    held = list(folder.iterdir())
    begun = any(path.name == "run.json" for path in held)
    return held if begun else [path for path in held if path.name != "recipe.toml" and path.suffix != ".tmp"]


def open_run(folder: Path, machine: Machine) -> Experiment:
    """Return the experiment of a run folder, to go on with it.

    Device, threads and stacks are those that the run began with, since results depend on them.

    Raises
    ------
    RunError
        If it is no run folder.
    """
    for name in ("run.json", "recipe.toml"):
        if not (folder / name).is_file():
            raise RunError(f"{folder} is no run folder: it holds no {name}. Give the folder that a run printed.")
    recipe = load_recipe(str(folder / "recipe.toml"), allow_code=machine.allow_code)
    return Experiment(recipe, recorded_machine(folder, machine))


def resume_command(folder: Path, machine: Machine, verb: str = "resume") -> str:
    """Return the command that continues a run, with what the user has to say again: a folder must not import code."""
    words = ["fedkeep", verb, str(folder)]
    words += [word for file in machine.use for word in ("--use", file)]
    words += ["--data-dir", machine.data_dir] if machine.data_dir else []
    words += ["--allow-code"] if machine.allow_code else []
    words += ["--workers", str(machine.workers)] if machine.workers else []
    return shlex.join(words)


def retry_command(folder: Path, machine: Machine) -> str:
    """Return the command that continues a run after a failure, with fewer workers, which take less memory."""
    fewer = max(1, (machine.workers or os.cpu_count() or 2) // 2)
    return resume_command(folder, replace(machine, workers=fewer))


def _new_folder(recipe: str) -> Path:
    stem = Path(recipe).stem if recipe.endswith(".toml") else recipe.replace("/", "-")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / f"{stem}-{stamp}"
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not folder.exists():
            return folder
    raise ConfigError("runs/ is full of runs of this second. Give --out.")
