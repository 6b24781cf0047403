"""Reproduce a paper's table: its columns are recipes in one folder, and every column becomes a run folder.

A reproduction is a folder ``ROOT/sfedkd-table1`` with one run folder for each column. Later calls add methods and
seeds to it, and run only what is not finished. A reproduction with fewer rounds has another folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path

import tomli_w
from filelock import FileLock

from fedkeep._utils.digests import read_json, read_toml, write_json, write_toml
from fedkeep.errors import ConfigError, RunError, did_you_mean
from fedkeep.experiment.experiment import Experiment, Trial
from fedkeep.experiment.provenance import ARCHIVE_SUFFIX, NOT_SETTINGS, check_code
from fedkeep.experiment.recipe import Method, Recipe, rows_named
from fedkeep.experiment.recipe_loader import load_recipe, paper_tables, read_paper_section
from fedkeep.experiment.run import prepare_run, recorded_recipe
from fedkeep.experiment.runtime import Machine, recorded_machine
from fedkeep.options import as_table, options_of

NOTE = "reproduction.json"
"""The file in a reproduction's folder, and in its archive, that names the reproduced table."""


@dataclass(frozen=True)
class Column:
    """One column of a reproduction.

    ``name``: The column's short name.
    ``recipe``: The recipe, with the requested methods and seeds.
    ``folder``: The column's run folder.
    """

    name: str
    recipe: Recipe
    folder: Path


def _ordered(columns: dict[str, str]) -> list[str]:
    """Return the columns' names in the order that their recipes give. The recipes are only read, not built."""
    order = list(read_paper_section(next(iter(columns.values()))).get("columns", ()))
    return sorted(columns, key=lambda column: (order.index(column) if column in order else len(order), column))


def find_table(name: str) -> tuple[str, dict[str, str]]:
    """Return the name of a table, which is given by name or as a user's own folder of recipes, and its columns.

    Returns: Names or paths of recipes by the columns' short names, in the paper's order.
    """
    known = paper_tables()
    if name in known:
        return name, {column.rpartition("/")[2]: column for column in known[name].columns}
    if columns := {path.stem: str(path) for path in Path(name).glob("*.toml") if not path.name.startswith("_")}:
        return Path(name).resolve().name, {column: columns[column] for column in _ordered(columns)}
    hint = did_you_mean(name, known)
    raise ConfigError(f"there is no table {name!r}.{hint} The tables are listed by: fedkeep recipes")


def select_columns(
    table: str,
    recipes: Mapping[str, str],
    folder: Path,
    *,
    columns: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    fraction: float = 1.0,
    grid: bool = False,
    settings: Sequence[str] = (),
    allow_code: bool = False,
) -> list[Column]:
    """Return the requested columns of a table.

    ``recipes``: Names of recipes by the short names of the table's columns.
    ``folder``: The folder of the reproduction.
    ``columns``: The columns' short names; default: all.
    ``methods``: Methods, by label or name; default: all of the recipe's.
    ``fraction``: The share of the paper's rounds, above 0 and at most 1.
    ``grid``: Run the values that the paper tuned too.
    ``settings``: Changes to every column's recipe.
    ``allow_code``: Let a recipe import its model.
    Returns: The columns, with the requested methods, seeds and rounds in their recipes.
    """
    if unknown := [column for column in columns or () if column not in recipes]:
        raise ConfigError(f"{table} has no column {unknown[0]!r}.{did_you_mean(unknown[0], recipes)}")
    selected = []
    for column, name in recipes.items():
        if columns is None or column in columns:
            recipe = load_recipe(name, seeds=seeds, settings=settings, grid=grid, allow_code=allow_code)
            if settings:
                recipe = _label_changes(recipe, load_recipe(name, grid=grid, allow_code=allow_code))
            if methods is not None:
                recipe = replace(recipe, methods=_select_methods(recipe, methods))
            rounds = max(1, round(fraction * recipe.run.rounds))
            if rounds != recipe.run.rounds:
                paper = {**recipe.paper, "rounds": recipe.run.rounds}
                recipe = replace(recipe, run=replace(recipe.run, rounds=rounds), paper=paper)
            selected.append(Column(column, recipe, folder / column))
    return selected


def reproduction_folder(table: str, root: Path, fraction: float) -> Path:
    """Return the folder of a reproduction.

    ``fraction``: The share of the paper's rounds.
    """
    return root / (table.replace("/", "-") + ("" if fraction == 1 else f"-rounds-{fraction:g}"))


def _label_changes(recipe: Recipe, plain: Recipe) -> Recipe:
    """Return a recipe in which the labels of methods name the options that differ from the table's."""
    options = {method.label: as_table(method.algorithm) for method in plain.methods}
    methods = []
    for method in recipe.methods:
        before, now = options.get(method.label, {}), as_table(method.algorithm)
        changed = [f"{name}={value}" for name, value in now.items() if before.get(name) != value]
        label = method.label + (f", changed: {', '.join(changed)}" if changed else "")
        methods.append(replace(method, label=label, grid_of="" if changed else method.grid_of))
    return replace(recipe, methods=tuple(methods))


def _select_methods(recipe: Recipe, names: Sequence[str]) -> tuple[Method, ...]:
    """Return the recipe's methods with these labels; a method's name, in lower case, selects all of its rows."""
    chosen: list[Method] = []
    for name in names:
        found = rows_named(name, recipe.methods, lambda m: (m.label, m.grid_of, m.algorithm.name()))
        if not found:
            known = sorted({word for m in recipe.methods for word in (m.grid_of or m.label, m.algorithm.name())})
            raise ConfigError(f"recipe {recipe.name!r} has no method {name!r}.{did_you_mean(name, known)}")
        chosen += [method for method in found if method not in chosen]
    return tuple(chosen)


def prepare(column: Column, machine: Machine, command: Sequence[str] = ()) -> Column:
    """Create a column's run folder, or add methods and seeds to an existing one.

    Returns: The column with the recipe in its folder: all methods and seeds that were ever requested.
    """
    column.folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(column.folder.with_name(f".{column.folder.name}.lock")):  # another process may change it too
        return _prepare(column, machine, command)


def _prepare(column: Column, machine: Machine, command: Sequence[str]) -> Column:
    if not (column.folder / "run.json").exists():
        prepare_run(Experiment(column.recipe, machine), column.folder, command)
        return column
    check_code(column.folder, machine.use)
    old = recorded_recipe(column.folder, allow_code=machine.allow_code)
    differing = _differences(old, column.recipe)
    if differing:
        raise RunError(
            f"{column.folder} was begun with other settings ({', '.join(differing)}). Choose another --out, or remove "
            "that folder."
        )
    path, known = column.folder / "recipe.toml", {method.label for method in old.methods}
    added = tuple(method for method in column.recipe.methods if method.label not in known)
    seeds = tuple(sorted({*old.seeds, *column.recipe.seeds}))
    recipe = replace(old, methods=old.methods + added, seeds=seeds)
    if recipe != old:
        # All else stays as it was written: an older version may have written fewer options.
        begun, extended = (tomllib.loads(text) for text in (read_toml(path), recipe.to_toml()))
        methods = [*begun["methods"], *extended["methods"][len(old.methods) :]]
        write_toml(path, tomli_w.dumps({**begun, "methods": methods, "seeds": list(seeds)}))
    return replace(column, recipe=recipe)


def _differences(old: Recipe, new: Recipe) -> list[str]:
    """Return the sections and the common methods in which two recipes differ."""
    names = options_of(Recipe).keys() - NOT_SETTINGS
    found = sorted(name for name in names if getattr(old, name) != getattr(new, name))
    known = {method.label: (method.algorithm, dict(method.training)) for method in old.methods}
    asked = {method.label: (method.algorithm, dict(method.training)) for method in new.methods}
    return found + [label for label, options in asked.items() if known.get(label, options) != options]


def requested_trials(requested: Column, prepared: Column, machine: Machine) -> list[Trial]:
    """Return the requested trials of a column that are not finished.

    ``prepared``: What `prepare` returned for it.
    ``machine``: Device, processes and folders.
    """
    labels = {method.label for method in requested.recipe.methods}
    wanted = [(label, seed) for label in labels for seed in requested.recipe.seeds]
    experiment = Experiment(prepared.recipe, recorded_machine(prepared.folder, machine))
    return experiment.trials(prepared.folder, wanted, f"{prepared.name} ")


def existing_columns(folder: Path, *, allow_code: bool = False) -> list[Column]:
    """Return the columns of a reproduction that have a run folder, in the paper's order.

    ``allow_code``: Let a recipe import its model.
    """
    names = {run.parent.name: str(run.parent / "recipe.toml") for run in sorted(folder.glob("*/run.json"))}
    return [
        Column(name, recorded_recipe(folder / name, allow_code=allow_code), folder / name)
        for name in (_ordered(names) if names else ())
    ]


def write_note(folder: Path, table: str) -> None:
    """Record which table a folder reproduces."""
    path = folder / NOTE
    archive = folder.with_name(f"{folder.name}{ARCHIVE_SUFFIX}")
    if archive.is_file() and not path.exists():
        raise RunError(
            f"the records of {folder} are in {archive.name}. To add to them, unpack it: "
            f"python -m zipfile -e {archive} {folder}"
        )
    if path.exists() and (other := table_of(path)) != table:
        raise ConfigError(f"{folder} holds a reproduction of {other!r}, not of {table!r}. Choose another --out.")
    write_json(path, {"table": table})


def table_of(path: Traversable) -> str:
    """Return the name of the table that a `NOTE` file records."""
    return str(read_json(path)["table"])
