"""Run folders: create one for a recipe, open one to continue it, and print the commands that do so."""

import logging
import os
import platform
import secrets
import shlex
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch.backends.cpu import get_cpu_capability

from fedkeep._utils.digests import DamagedFile, Identity, read_json, read_toml, write_json, write_toml
from fedkeep._utils.files import make_folder
from fedkeep.data.catalog import local_paths
from fedkeep.data.loading import local_path
from fedkeep.errors import RunError
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.initial_model import KEPT, locate_weights
from fedkeep.experiment.plugins import describe_loss, describe_method, describe_reply_step
from fedkeep.experiment.provenance import CODE, code_digests, keep_code, run_identity, settings_of, used
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.runtime import Machine, recorded_machine, revision, versions
from fedkeep.models import Architecture
from fedkeep.models.custom import describe_code, describe_network
from fedkeep.rounds.reply_step import ReplyStep

log = logging.getLogger(__name__)
LOCK = ".lock"
"""The file by which processes that begin the same run wait for each other."""
JOIN_SECONDS = 60.0
"""Seconds for which a process waits while another creates the run folder."""


def prepare_run(
    experiment: Experiment, out: str | Path | None, command: Sequence[str] = (), steps: Sequence[ReplyStep] = ()
) -> Path:
    """Check an experiment and create its run folder. Nothing is trained yet.

    ``out``: The folder; default: a new one under ``runs/``.
    ``steps``: Reply steps that were given in Python.
    """
    experiment.check(steps)
    inputs = _inputs_of(experiment) | ({"own_steps": [describe_reply_step(step) for step in steps]} if steps else {})
    return create_run_folder(experiment.recipe, out, experiment.machine, command, **inputs)


def _inputs_of(experiment: Experiment) -> dict[str, Any]:
    """Return what a run folder records of a user's own network, methods, losses and files."""
    recipe, data_dir = experiment.recipe, experiment.machine.data_dir
    found: dict[str, Any] = {"network": experiment.describe_network(recipe.model)}
    if any(own := [experiment.describe_network(client.model) for client in recipe.client_models]):
        found["client_networks"] = own
    found |= {f"{what}_path": local_path(name, data_dir) for what, name in _named_data(recipe).items()}
    if recipe.generator.exists(data_dir):
        found["generator_path"] = recipe.generator.folder(data_dir).resolve()
    if begun := found["network"]:
        found["trained"] = describe_code(recipe.model, tuple(begun["shape"]), begun["classes"])
    if recipe.weights and not recipe.weights.startswith(KEPT):
        found["weights_path"] = locate_weights(recipe.weights, data_dir)  # for another working directory
    found |= _own_code(recipe)
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items() if value}


def _own_code(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the digests of a user's own methods and losses by name."""
    methods = {method.algorithm.name(): describe_method(type(method.algorithm)) for method in recipe.methods}
    losses = {name: describe_loss(name) for name in {recipe.training_of(method).loss for method in recipe.methods}}
    return {
        "own_methods": {name: digest for name, digest in methods.items() if digest},
        "own_losses": {name: digest for name, digest in losses.items() if digest},
    }


def as_argument(folder: Path) -> Path:
    """Return a folder as commands take it: a name that begins with a dash looks like an option."""
    return folder.absolute() if str(folder).startswith("-") else folder


def create_run_folder(
    recipe: Recipe, out: str | Path | None, machine: Machine, command: Sequence[str] = (), **inputs: Any
) -> Path:
    """Create a run folder for a recipe that was checked before; ``inputs`` are entries of run.json."""
    folder = as_argument(Path(out)) if out is not None else _new_folder(recipe.name)
    argument, again = "--out", shlex.join(["fedkeep", "resume", str(folder)])
    if list(command[:1]) == ["fedkeep.run"]:
        model = ", model=..." * bool(inputs.get("network"))
        argument, again = "out", f"fedkeep.resume({str(folder)!r}{model})"
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file. Choose another {argument}.")
    if folder.exists() and any(_content(folder)):
        hint = f", or continue it with: {again}" if (folder / "run.json").exists() else ""
        raise RunError(f"{folder} exists and is not empty. Choose another {argument}{hint}.")
    kept = keep_code(folder, machine.use)
    info = {
        "fedkeep": version("fedkeep"),
        "versions": versions(),
        # The instructions decide the last bits of a sum, and rounds of training make points of them.
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {get_cpu_capability()}",
        "command": list(command),
        "id": secrets.token_hex(8),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.device,
        "threads": machine.threads,
        "stack": machine.stack,
        "title": recipe.title,
        "recipe": recipe.name,
        "git": revision(),
        "identity": Identity(settings=settings_of(tomllib.loads(recipe.to_toml())), code=kept["code"]).to_table(),
    }
    info |= {**inputs, **({"use": kept["use"]} if kept["use"] else {})}
    write_toml(folder / "recipe.toml", recipe.to_toml())
    write_json(folder / "run.json", info, indent=2)
    return folder


def add_code(folder: Path, recipe: Recipe, use: Sequence[str]) -> None:
    """Keep the user's code of methods that join a run folder which was begun without it."""
    info, begun, now = read_json(folder / "run.json"), run_identity(folder).code, code_digests(use)
    if now.keys() <= begun.keys():
        return
    if twice := [name for name, digest in now.items() if begun.get(name, digest) != digest]:
        raise RunError(f"{folder} has another {twice[0]} already, of its first methods. Rename the new one.")
    kept = keep_code(folder, use)
    info["identity"] = {**info.get("identity", {}), "code": {**begun, **kept["code"]}}
    info["use"] = list(dict.fromkeys([*info.get("use", ()), *kept["use"]]))
    info |= {name: {**digests, **info.get(name, {})} for name, digests in _own_code(recipe).items()}
    write_json(folder / "run.json", info, indent=2)


def join_run(experiment: Experiment, out: str | Path, command: Sequence[str] = ()) -> Path:
    """Check an experiment, and create its run folder or join the one that another process has created for it."""
    experiment.check()
    folder, recipe, inputs = Path(out), experiment.recipe, _inputs_of(experiment)
    make_folder(folder)
    try:
        with FileLock(folder / LOCK, timeout=JOIN_SECONDS):
            if not (folder / "run.json").is_file():
                return create_run_folder(recipe, folder, experiment.machine, command, **inputs)
    except Timeout:
        raise RunError(f"{folder} is locked by another process. End it, then repeat this command.") from None
    begun, given = (tomllib.loads(text) for text in (read_toml(folder / "recipe.toml"), recipe.to_toml()))
    if {**begun, "title": ""} != {**given, "title": ""}:
        raise RunError(f"{folder} was begun with another recipe. Choose another --out, or give the recipe as it was.")
    continued_machine(folder, experiment.machine)
    return folder


def continued_machine(folder: Path, machine: Machine) -> Machine:
    """Return `recorded_machine`, and warn where other values were asked for."""
    kept = recorded_machine(folder, machine)
    fixed = {name: getattr(kept, name) for name in ("device", "threads", "stack")}
    if any(getattr(machine, name) not in (value, getattr(Machine(), name)) for name, value in fixed.items()):
        told = " ".join(f"--{name} {value}" for name, value in fixed.items())
        log.warning("%s was begun with %s, which this trial keeps.", folder, told)
    return kept


def _content(folder: Path) -> list[Path]:
    """Return what a folder contains, apart from the files of a run that was killed before it began."""
    content = list(folder.iterdir())
    begun = any(path.name == "run.json" for path in content)
    return [p for p in content if begun or (p.name not in ("recipe.toml", LOCK, CODE) and p.suffix != ".tmp")]


def open_run(folder: Path, machine: Machine, model: Architecture | None = None) -> Experiment:
    """Return the experiment of a run folder, to continue it.

    ``machine``: The machine. Its device, threads and stack are replaced by those with which the run began,
        since results depend on them.
    ``model``: The user's network, if it was given in Python and cannot be imported.
    """
    check_run_folder(folder)
    if read_json(folder / "run.json").get("command", [])[:2] == ["flwr", "run"]:
        given = shlex.quote(f'out="{folder.resolve()}"')
        raise RunError(
            f"{folder} is run at sites, and its data are there. Continue it with flwr run APP --run-config {given}; "
            f"its results so far: fedkeep report {shlex.quote(str(folder))}"
        )
    recipe = recorded_recipe(folder, allow_code=machine.allow_code, model=model)
    recipe = _with_found_data(folder, recipe, machine)
    info = read_json(folder / "run.json")
    if model is not None and info.get("network") is None:
        raise RunError(f"{folder} was begun with a network of its recipe. Leave model= out to continue it.")
    for network, begun in zip(recipe.models, [info.get("network"), *info.get("client_networks", ())], strict=False):
        if begun and begun != describe_network(network, tuple(begun["shape"]), begun["classes"]):
            raise RunError(
                f"{folder} was begun with another network than {network.name} is now, so that its rounds would not "
                "belong together. Restore the former network, or begin a new run."
            )
    _check_own_code(folder, recipe)
    return Experiment(recipe, recorded_machine(folder, machine))


def check_own_steps(folder: Path, steps: Sequence[ReplyStep]) -> None:
    """Raise `RunError` if trials would go on without the reply steps that a run was given in Python."""
    begun = read_json(folder / "run.json").get("own_steps")
    if not begun:
        return
    if not steps:
        named = ", ".join(step.partition(" ")[0] for step in begun)
        raise RunError(
            f"{folder} was begun with reply steps of your own ({named}). Continue it with them, in Python: "
            f"fedkeep.resume({str(folder)!r}, steps=[...])."
        )
    if begun != [describe_reply_step(step) for step in steps]:
        log.warning("%s was begun with other code or numbers of its reply steps than these.", folder)


def check_run_folder(folder: Path) -> None:
    """Raise `RunError` for a folder that holds no run."""
    for name in ("run.json", "recipe.toml"):
        if not (folder / name).is_file():
            raise RunError(f"{folder} is no run folder: it holds no {name}. Give the folder that a run printed.")


def _check_own_code(folder: Path, recipe: Recipe) -> None:
    """Raise `RunError` for another loss, or another method of the program itself; `check_code` compares files."""
    begun, now = read_json(folder / "run.json"), _own_code(recipe)
    losses, methods = begun.get("own_losses", {}), begun.get("own_methods", {})
    changed = [f"loss ({name})" for name, digest in now["own_losses"].items() if losses.get(name, digest) != digest]
    changed += [
        f"method ({name})"
        for name, digest in now["own_methods"].items()
        if "source" in digest and methods.get(name, {}).get("source", digest["source"]) != digest["source"]
    ]
    if changed:
        raise RunError(
            f"{folder} was begun with another {' and another '.join(changed)} than this, so that its rounds would not "
            "belong together. Restore the former code and numbers, or begin a new run."
        )


def _named_data(recipe: Recipe) -> dict[str, str]:
    """Return the names or paths of what a recipe reads; empty for what it does not name."""
    return {"data": recipe.data, "public": recipe.public.name}


def _with_found_data(folder: Path, recipe: Recipe, machine: Machine) -> Recipe:
    """Return a recipe whose data are found from here; raise `RunError` if the files with which it began are gone."""
    info, data_dir = read_json(folder / "run.json"), machine.data_dir
    names = _named_data(recipe)
    for what, name in names.items():
        recorded, here = info.get(f"{what}_path"), local_path(name, data_dir)
        if not isinstance(recorded, str) or str(here) == recorded:
            continue
        if Path(recorded).exists():
            names[what] = recorded
        elif here is None:
            called = {"data": "data", "public": "public set"}[what]
            raise RunError(
                f"{folder} read its {called} from {recorded}, which is not there any more. Put it back, or continue "
                f"the run from a folder in which there is {name}."
            )
    place = recipe.generator.folder(data_dir).resolve() if recipe.generator.exists(data_dir) else None
    recorded = info.get("generator_path")
    if recorded and (place is None or (str(place) != recorded and Path(recorded).exists())):
        raise RunError(
            f"{folder} read its generator from {recorded}, which is not what {recipe.generator.name} is from here. "
            "Continue the run from where it was begun, and put the generator back if it is gone."
        )
    weights = info.get("weights_path")
    moved = weights and not Path(weights).exists() and any(map(Path.exists, local_paths(recipe.weights, data_dir)))
    return replace(
        recipe,
        data=names["data"],
        public=replace(recipe.public, name=names["public"]),
        weights=recipe.weights if moved or not weights else weights,
    )


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


def resume_command(folder: Path, machine: Machine, verb: str = "resume") -> str:
    """Return the command that continues a run.

    The command repeats arguments that are not recorded in the folder, such as files with code to import.
    """
    use = used(folder.parent if folder.suffix == ".toml" else folder) or machine.use
    words = ["fedkeep", verb, str(as_argument(folder)), *(word for file in use for word in ("--use", file))]
    recorded = ("device", "threads", "stack") if verb == "run" else ()  # a run that goes on has its own
    for name in (*recorded, "data_dir", "allow_code", "workers", "executor", "address"):
        if (value := getattr(machine, name)) and (name == "workers" or value != getattr(Machine(), name)):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)


def dated_folder(recipe: str, prefix: str = "") -> Path:
    """Return a folder under ``runs`` that has a recipe's name and the time."""
    stem = Path(recipe).stem if recipe.endswith(".toml") else recipe.replace("/", "-")
    return Path("runs") / f"{prefix}{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _new_folder(recipe: str) -> Path:
    base = dated_folder(recipe)
    make_folder(base.parent)  # with a link to nothing there, each number would seem taken
    for number in count(1):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with suppress(FileExistsError):  # two processes that start in one second get two folders
            folder.mkdir(parents=True)
            return folder
    raise AssertionError
