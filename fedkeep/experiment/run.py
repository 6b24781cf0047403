"""Carry out a recipe in a run folder: one cell for each method and seed."""

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

from fedkeep import seeds
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.build import build_federation, check_augmentation, check_cohort, check_device, check_generator
from fedkeep.experiment.networks import located, own_models
from fedkeep.experiment.paths import is_finished, trial_folder, trial_name
from fedkeep.experiment.provenance import revision, versions
from fedkeep.experiment.reading import load_recipe
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.runtime import Machine, OnProgress, Progress
from fedkeep.experiment.trial_runner import Trial, recorded_machine, run_trials
from fedkeep.files import write_whole
from fedkeep.training.model_runner import check_batch_size

__all__ = [
    "Machine",
    "OnProgress",
    "Progress",
    "begin",
    "execute_run",
    "pending_trials",
    "resume_command",
    "trial_name",
]


def prepare_run(recipe: Recipe, out: str | Path | None, machine: Machine, command: Sequence[str] = ()) -> Path:
    """Make a run folder for a recipe and return its path; nothing is trained yet.

    Raises
    ------
    RunError
        If ``out`` exists and holds something.
    """
    check_device(machine.device)
    for seed in recipe.seeds:  # what cannot be carried out shows before any training
        federation = build_federation(recipe, seed, machine.data_dir)
        check_cohort(recipe, federation)
        check_augmentation(recipe, federation)
        check_generator(recipe, federation, machine.data_dir)
    for model in {recipe.model, *own_models(recipe.client_models, federation.clients).values()}:
        with seeds.borrowed(0):
            network = located(model, machine.data_dir).build(federation.dataset.shape, federation.seen[0])
        check_batch_size(network, recipe.training)
    return create_run_folder(recipe, out, machine, command)


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
    write_whole(folder / "recipe.toml", recipe.to_toml())
    write_whole(folder / "run.json", json.dumps(info, indent=2))
    return folder


def _held(folder: Path) -> list[Path]:
    """Return what a folder holds, apart from what a kill left of a run that had not begun."""
    held = list(folder.iterdir())
    begun = any(path.name == "run.json" for path in held)
    return held if begun else [path for path in held if path.name != "recipe.toml" and path.suffix != ".tmp"]


def execute_run(
    folder: Path, machine: Machine, on_progress: OnProgress | None = None, recipe: Recipe | None = None
) -> None:
    """Play all cells of a run folder that are not finished, each from its checkpoint.

    Safe to call again after a kill. Device, threads and stacks are those that the run began with: results
    depend on them. With ``recipe``, the one that the folder was begun with, nothing needs to be found again by name in
    this process.
    """
    for name in ("run.json", "recipe.toml"):
        if not (folder / name).is_file():
            raise RunError(f"{folder} is no run folder: it holds no {name}. Give the folder that a run printed.")
    recipe = recipe or load_recipe(str(folder / "recipe.toml"), allow_code=machine.allow_code)
    machine = recorded_machine(folder, machine)
    jobs = [Trial(folder, recipe, *cell, trial_name(*cell)) for cell in pending_trials(folder, recipe)]
    fewer = max(1, (machine.workers or os.cpu_count() or 2) // 2)
    again = resume_command(folder, replace(machine, workers=fewer))
    run_trials(jobs, machine, on_progress, again)


def pending_trials(folder: Path, recipe: Recipe) -> list[tuple[Method, int]]:
    """Return the cells of a run, method and seed, that are not finished."""
    cells = [(method, seed) for seed in recipe.seeds for method in recipe.methods]
    return [cell for cell in cells if not is_finished(trial_folder(folder, *cell))]


def resume_command(folder: Path, machine: Machine, verb: str = "resume") -> str:
    """Return the command that continues a run, with what the user has to say again: a folder must not import code."""
    words = ["fedkeep", verb, str(folder)]
    words += [word for file in machine.use for word in ("--use", file)]
    words += ["--data-dir", machine.data_dir] if machine.data_dir else []
    words += ["--allow-code"] if machine.allow_code else []
    words += ["--workers", str(machine.workers)] if machine.workers else []
    return shlex.join(words)


def _new_folder(recipe: str) -> Path:
    stem = Path(recipe).stem if recipe.endswith(".toml") else recipe.replace("/", "-")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / f"{stem}-{stamp}"
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not folder.exists():
            return folder
    raise ConfigError("runs/ is full of runs of this second. Give --out.")
