"""Run folders: create one for a recipe, open one to continue it, and print the commands that do so."""

from __future__ import annotations

import os
import platform
import shlex
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedkeep._utils.digests import DamagedFile, read_json, read_toml, write_json, write_toml
from fedkeep._utils.files import make_folder
from fedkeep._utils.identity import Identity
from fedkeep.data.loading import local_path
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.belonging import CODE, keep_code, settings_of, used
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.initial_model import KEPT, locate_weights
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.runtime import Machine, recorded_machine, revision, usable_cores, versions
from fedkeep.models import Architecture
from fedkeep.models.custom import describe_network

LOCK = ".lock"
"""The file by which processes that begin the same run wait for each other."""
JOIN_SECONDS = 60.0
"""Seconds for which a process waits while another creates the run folder."""


def prepare_run(experiment: Experiment, out: str | Path | None, command: Sequence[str] = ()) -> Path:
    """Check an experiment and create its run folder. Nothing is trained yet.

    ``out``: The folder; default: a new one under ``runs/``.
    """
    experiment.check()
    return create_run_folder(experiment.recipe, out, experiment.machine, command, **_inputs_of(experiment))


def _inputs_of(experiment: Experiment) -> dict[str, Any]:
    """Return what a run folder records of a user's own network and files."""
    path = local_path(experiment.recipe.data, experiment.machine.data_dir)
    recipe, weights = experiment.recipe, None
    if recipe.weights and not recipe.weights.startswith(KEPT):
        weights = locate_weights(recipe.weights, experiment.machine.data_dir)
    return {"network": experiment.describe_network(), "data_path": path, "weights_path": weights}


def create_run_folder(
    recipe: Recipe,
    out: str | Path | None,
    machine: Machine,
    command: Sequence[str] = (),
    network: Mapping[str, Any] | None = None,
    data_path: Path | None = None,
    weights_path: Path | None = None,
) -> Path:
    """Create a run folder for a recipe that was checked before.

    ``out``: The folder; default: a new one under ``runs/``.
    ``machine``: The machine, of which device, threads, stack and compile are recorded.
    ``network``: What is recorded of a user's network (see `Experiment.describe_network`).
    ``data_path``: Where the user's own examples lie, so that the run can be continued from another working directory.
    ``weights_path``: Where the weights lie from which it begins.
    """
    folder = Path(out) if out is not None else _new_folder(recipe.name)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file. Choose another --out.")
    if folder.exists() and any(_content(folder)):
        hint = f", or continue it with: fedkeep resume {folder}" if (folder / "run.json").exists() else ""
        raise RunError(f"{folder} exists and is not empty. Choose another --out{hint}.")
    info = {
        "fedkeep": version("fedkeep"),
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "command": list(command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.device,
        "threads": machine.threads,
        "stack": machine.stack,
        "compile": machine.compile,
        "title": recipe.title,
        "recipe": recipe.name,
        "git": revision(),
    }
    if network:
        info["network"] = dict(network)
    if data_path is not None:
        info["data_path"] = str(data_path)
    if weights_path is not None:
        info["weights_path"] = str(weights_path)
    kept = keep_code(folder, machine.use)
    settings = settings_of(tomllib.loads(recipe.to_toml()))
    info |= {"use": kept["use"]} if kept["use"] else {}
    info["identity"] = Identity(settings=settings, code=kept["code"]).to_table()
    write_toml(folder / "recipe.toml", recipe.to_toml())
    write_json(folder / "run.json", info, indent=2)
    return folder


def join_run(experiment: Experiment, out: str | Path, command: Sequence[str] = ()) -> Path:
    """Check an experiment, and create its run folder or join the one that another process has created for it."""
    experiment.check()
    inputs = _inputs_of(experiment)
    folder, recipe = Path(out), experiment.recipe
    make_folder(folder)
    try:
        with FileLock(folder / LOCK, timeout=JOIN_SECONDS):
            if not (folder / "run.json").is_file():
                return create_run_folder(recipe, folder, experiment.machine, command, **inputs)
    except Timeout:
        raise RunError(f"{folder} is locked by another process. End it, then repeat this command.") from None
    if read_toml(folder / "recipe.toml").rstrip() != recipe.to_toml().rstrip():
        raise RunError(f"{folder} was begun with another recipe. Choose another --out, or give the recipe as it was.")
    return folder


def _content(folder: Path) -> list[Path]:
    """Return what a folder contains, apart from the files of a run that was killed before it began."""
    content = list(folder.iterdir())
    begun = any(path.name == "run.json" for path in content)
    return (
        content if begun else [p for p in content if p.name not in ("recipe.toml", LOCK, CODE) and p.suffix != ".tmp"]
    )


def open_run(folder: Path, machine: Machine, model: Architecture | None = None) -> Experiment:
    """Return the experiment of a run folder, to continue it.

    ``machine``: The machine. Its device, threads, stack and compile are replaced by those with which the run began,
        since results depend on them.
    ``model``: The user's network, if it was given in Python and cannot be imported.
    """
    for name in ("run.json", "recipe.toml"):
        if not (folder / name).is_file():
            raise RunError(f"{folder} is no run folder: it holds no {name}. Give the folder that a run printed.")
    recipe = recorded_recipe(folder, allow_code=machine.allow_code, model=model)
    weights = read_json(folder / "run.json").get("weights_path", recipe.weights)
    recipe = replace(recipe, data=_data_of(folder, recipe, machine), weights=weights)
    begun = _recorded_network(folder)
    if model is not None and begun is None:
        raise RunError(f"{folder} was begun with a network of its recipe. Leave model= out to continue it.")
    if begun is not None and begun != describe_network(recipe.model, tuple(begun["shape"]), begun["classes"]):
        raise RunError(
            f"{folder} was begun with another network than {recipe.model.name} is now, so that its rounds would not "
            "belong together. Restore the former network, or begin a new run."
        )
    return Experiment(recipe, recorded_machine(folder, machine))


def _data_of(folder: Path, recipe: Recipe, machine: Machine) -> str:
    """Return by which name or path a run's data set is found from here; raise `RunError` if its files are gone."""
    recorded, here = read_json(folder / "run.json").get("data_path"), local_path(recipe.data, machine.data_dir)
    if not isinstance(recorded, str) or str(here) == recorded:
        return recipe.data
    if Path(recorded).exists():
        return recorded
    if here is None:
        raise RunError(
            f"the data of {folder} were read from {recorded}, which is not there any more. Put them back, or continue "
            f"the run from a folder in which there is {recipe.data}."
        )
    return recipe.data


def recorded_recipe(folder: Path, *, allow_code: bool = False, model: Architecture | None = None) -> Recipe:
    """Return the recipe of a run folder, which must be as the run began with it.

    ``allow_code``: Let the recipe import its model.
    ``model``: The user's network, if it was given in Python and cannot be imported.
    """
    path = folder / "recipe.toml"
    try:
        read_toml(path)
    except DamagedFile as damage:
        raise RunError(
            f"{damage} A run goes on only with the recipe that it began with: restore the file, or begin a new run."
        ) from None
    return load_recipe(str(path), allow_code=allow_code, model=model)


def _recorded_network(folder: Path) -> Mapping[str, Any] | None:
    """Return what a run folder records of a user's network; None for a network of FedKeep."""
    try:
        found = read_json(folder / "run.json").get("network")
        if found is not None and not {"shape", "classes", "digest"} <= found.keys():
            raise ValueError("its 'network' is incomplete")
    except (ValueError, AttributeError) as error:
        raise RunError(f"cannot read {folder / 'run.json'}: {type(error).__name__}: {error}") from error
    network: Mapping[str, Any] | None = found
    return network


def resume_command(folder: Path, machine: Machine, verb: str = "resume") -> str:
    """Return the command that continues a run.

    The command repeats arguments that are not recorded in the folder, such as files with code to import.
    """
    use = used(folder.parent if folder.suffix == ".toml" else folder) or machine.use
    return shlex.join(["fedkeep", verb, str(folder), *machine_arguments(machine, use)])


def machine_arguments(machine: Machine, use: Iterable[str]) -> list[str]:
    """Return the arguments of a command that a run folder does not record, and ``--use`` for each of some files."""
    arguments = [argument for file in use for argument in ("--use", file)]
    arguments += ["--data-dir", machine.data_dir] if machine.data_dir else []
    arguments += ["--allow-code"] if machine.allow_code else []
    arguments += ["--workers", str(machine.workers)] if machine.workers else []
    arguments += ["--executor", machine.executor] if machine.executor != "processes" else []
    return arguments + (["--address", machine.address] if machine.address else [])


def retry_command(folder: Path, machine: Machine) -> str:
    """Return the command that continues a run after a failure, with fewer workers, which need less memory."""
    if machine.executor == "ray":
        return resume_command(folder, machine)
    fewer = max(1, (machine.workers or usable_cores()) // 2)
    return resume_command(folder, replace(machine, workers=fewer))


def _new_folder(recipe: str) -> Path:
    stem = Path(recipe).stem if recipe.endswith(".toml") else recipe.replace("/", "-")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / f"{stem}-{stamp}"
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            folder.mkdir(parents=True)  # two processes that start in one second get two folders
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"cannot create {folder}: {error.strerror}. Give another --out.") from error
        return folder
    raise ConfigError("runs/ has too many runs that began in this second. Give --out.")
