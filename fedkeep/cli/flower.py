"""``fedkeep flower``: set up a federation on Flower, such as a small app for a user's own project."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from fedkeep._utils.files import atomic_write
from fedkeep.cli.run import recipe_of
from fedkeep.cli.text import say
from fedkeep.errors import ConfigError, MissingExtra, RunError
from fedkeep.experiment.recipe import Recipe
from fedkeep.flower.config import RunConfig
from fedkeep.options import as_table


def new(options: Namespace, console: Console) -> int:
    """Write a Flower app for a recipe."""
    _require_flower()
    recipe = recipe_of(options)
    folder = create_app(Path(options.folder), recipe, options.sites)
    nodes = options.sites or recipe.partition.num_clients or 2
    command = f"flwr run {folder} --stream --federation-config 'num-supernodes={nodes} client-resources-num-cpus=1'"
    lines = (
        f"wrote {folder}/: pyproject.toml, recipe.toml, fedkeep_app.py",
        "",
        "a test run on this machine:",
        "  export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 FLWR_TELEMETRY_ENABLED=0",
        f"  {command}",
        "on several machines: docs/deploy.md",
    )
    say(console, "\n".join(lines))
    return 0


def keys(options: Namespace, console: Console) -> int:
    """Make keys and certificates for a test federation."""
    _require_flower()
    from fedkeep.flower.keys import make_keys

    for path in make_keys(Path(options.folder), options.sites, options.hosts, options.days):
        say(console, str(path))
    return 0


def _require_flower() -> None:
    if find_spec("flwr") is None:
        raise MissingExtra("fedkeep flower", "flower")


def clock(options: Namespace, console: Console) -> int:
    """Compare this machine's clock with the server's; the exit code is 1 if Flower does not bear the difference."""
    from fedkeep.flower.clock import describe_clock

    said, is_borne = describe_clock(options.superlink, options.root_certificates)
    say(console, said)
    return int(not is_borne)


APP = '''\
"""The Flower app of this project: FedKeep's client and server. Import your own methods here, from files beside it."""

from fedkeep.flower.apps import client, server

__all__ = ["client", "server"]
'''


def create_app(folder: Path, recipe: Recipe, sites: int) -> Path:
    """Write ``pyproject.toml``, ``recipe.toml`` and ``fedkeep_app.py`` into a folder.

    ``folder``: A new or empty folder.
    ``sites``: How many sites take part. In a simulation the recipe's data are split over as many clients. 0: as many as
        the recipe has clients.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} exists and is not empty. Choose another folder.")
    if sites:
        recipe = _with_sites(recipe, sites)
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "federation"
    atomic_write(folder / "recipe.toml", replace(recipe, paper={}).to_toml())
    atomic_write(folder / "fedkeep_app.py", APP)
    atomic_write(folder / "pyproject.toml", tomli_w.dumps(_project(name, recipe.title, sites)))
    return folder


def _with_sites(recipe: Recipe, sites: int) -> Recipe:
    if "num_clients" not in type(recipe.partition).__dataclass_fields__:
        raise ConfigError(
            f"the partition {recipe.partition.name!r} cannot be made for {sites} sites. Leave --sites out."
        )
    run = replace(
        recipe.run, cohort_size=min(recipe.run.cohort_size, sites), min_clients=min(recipe.run.min_clients, sites)
    )
    return replace(recipe, partition=replace(recipe.partition, num_clients=sites), run=run)


def _project(name: str, title: str, sites: int) -> dict[str, Any]:
    config = as_table(RunConfig(recipe="recipe.toml", sites=sites))
    return {
        "project": {
            "name": name,
            "version": "1.0.0",
            "description": title,
            "license": "Apache-2.0",
            "dependencies": [f"fedkeep[flower]=={version('fedkeep')}"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": name,
                    "fab-include": ["*.py", "recipe.toml"],
                    "components": {"serverapp": "fedkeep_app:server", "clientapp": "fedkeep_app:client"},
                    "config": {option.replace("_", "-"): value for option, value in config.items()},
                }
            }
        },
    }
