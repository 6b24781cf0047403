"""A small Flower app for a user's own project: a recipe, a run configuration, and a module for the user's methods."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomli_w

from fedkeep._utils.files import atomic_write
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.recipe import Recipe
from fedkeep.flower.config import RunConfig
from fedkeep.options import as_table

APP = '''\
"""The Flower app of this project: FedKeep's client and server. Import your own methods here, from files beside it."""

from fedkeep.flower.client_app import app as client
from fedkeep.flower.server_app import app as server

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
