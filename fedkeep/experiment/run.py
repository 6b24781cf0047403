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
from fedkeep.engine.networks import checked_batches
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.cells import Job, as_begun, play_all
from fedkeep.experiment.folders import cell_folder, cell_name, is_finished
from fedkeep.experiment.machine import Machine, OnProgress, Progress
from fedkeep.experiment.networks import located, own_models
from fedkeep.experiment.provenance import revision, versions
from fedkeep.experiment.reading import load_recipe
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.setup import checked_augmentation, checked_cohort, checked_device, checked_generator, federate
from fedkeep.files import write_whole

__all__ = ["Machine", "OnProgress", "Progress", "begin", "carry_out", "cell_name", "pending_cells", "resume_command"]


def begin(recipe: Recipe, out: str | Path | None, machine: Machine, command: Sequence[str] = ()) -> Path:
    """Make a run folder for a recipe and return its path; nothing is trained yet.

    Raises
    ------
    RunError
        If ``out`` exists and holds something.
    """
    checked_device(machine.device)
    for seed in recipe.seeds:  # what cannot be carried out shows before any training
        federation = federate(recipe, seed, machine.data_dir)
        checked_cohort(recipe, federation)
        checked_augmentation(recipe, federation)
        checked_generator(recipe, federation, machine.data_dir)
    for model in {recipe.model, *own_models(recipe.client_models, federation.clients).values()}:
        with seeds.borrowed(0):
            network = located(model, machine.data_dir).build(federation.dataset.shape, federation.seen[0])
        checked_batches(network, recipe.training)
    return lay_out(recipe, out, machine, command)


def lay_out(recipe: Recipe, out: str | Path | None, machine: Machine, command: Sequence[str] = ()) -> Path:
    """Make a run folder for a recipe that was checked, and return its path; raise `RunError` as `begin` does."""
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


def carry_out(
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
    machine = as_begun(folder, machine)
    jobs = [Job(folder, recipe, *cell, cell_name(*cell)) for cell in pending_cells(folder, recipe)]
    fewer = max(1, (machine.workers or os.cpu_count() or 2) // 2)
    again = resume_command(folder, replace(machine, workers=fewer))
    play_all(jobs, machine, on_progress, again)


def pending_cells(folder: Path, recipe: Recipe) -> list[tuple[Method, int]]:
    """Return the cells of a run, method and seed, that are not finished."""
    cells = [(method, seed) for seed in recipe.seeds for method in recipe.methods]
    return [cell for cell in cells if not is_finished(cell_folder(folder, *cell))]


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
