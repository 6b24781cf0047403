"""Reproduce a paper's table: its columns are recipes in one folder, and every column becomes a run folder.

A reproduction is a folder ``ROOT/sfedkd-table1`` with one run folder per column. It grows: later calls add methods and
seeds to it, and play only what is not finished. With a fraction of the rounds it has a name of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path

from filelock import FileLock

from fedkeep._utils.files import atomic_write
from fedkeep.errors import ConfigError, RunError, did_you_mean
from fedkeep.experiment.experiment import Experiment, Trial
from fedkeep.experiment.overrides import SECTIONS
from fedkeep.experiment.paths import ARCHIVE_SUFFIX
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.recipe_index import paper_tables
from fedkeep.experiment.recipe_loader import load_recipe, recipe_text
from fedkeep.experiment.run import prepare_run
from fedkeep.experiment.runtime import Machine, recorded_machine
from fedkeep.options import as_table

NOTE = "reproduction.json"
"""In the folder of a reproduction, and in the archive of a column: which table is reproduced."""


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper.

    Attributes
    ----------
    name : str
        Such as ``sfedkd/table1``.
    columns : dict of str to str
        Recipes by the columns' short names, in the paper's order.
    """

    name: str
    columns: dict[str, str]


@dataclass(frozen=True)
class Column:
    """One column of a reproduction.

    Attributes
    ----------
    name : str
        The column's short name.
    recipe : Recipe
        With the methods and seeds that were asked for.
    folder : Path
        Its run folder.
    """

    name: str
    recipe: Recipe
    folder: Path


def tables() -> dict[str, Table]:
    """Return all tables that come with the package by name, such as ``sfedkd/table1``."""
    return {
        name: Table(name, {column.rpartition("/")[2]: column for column in table.columns})
        for name, table in paper_tables().items()
    }


def _ordered(columns: dict[str, str]) -> list[str]:
    """Return the columns' names in the order that their recipes give, read as TOML: no recipe is carried out for it."""
    order = list(recipe_text(next(iter(columns.values()))).get("columns", ()))
    return sorted(columns, key=lambda column: (order.index(column) if column in order else len(order), column))


def find(name: str) -> Table:
    """Return a table by name, or a folder of recipes of the user's own by path.

    Raises
    ------
    ConfigError
        For an unknown name, with the nearest that there is.
    """
    known = tables()
    files = sorted(path for path in Path(name).glob("*.toml") if not path.name.startswith("_"))
    if name not in known and files:
        columns = {path.stem: str(path) for path in files}
        return Table(Path(name).resolve().name, {column: columns[column] for column in _ordered(columns)})
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"there is no table {name!r}.{hint} The tables are listed by: fedkeep reproduce")
    return known[name]


def columns_of(
    table: Table,
    root: Path,
    *,
    columns: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    fraction: float = 1.0,
    grid: bool = False,
    settings: Sequence[str] = (),
    allow_code: bool = False,
) -> list[Column]:
    """Return the columns that were asked for, each with its recipe: these methods and seeds, this share of the rounds.

    Raises
    ------
    ConfigError
        For a column, method or setting that there is not.
    """
    unknown = [column for column in columns or () if column not in table.columns]
    if unknown:
        raise ConfigError(f"{table.name} has no column {unknown[0]!r}.{did_you_mean(unknown[0], table.columns)}")
    folder = folder_of(table, root, fraction)
    found = []
    for column, name in table.columns.items():
        if columns is None or column in columns:
            recipe = load_recipe(name, seeds=seeds, settings=settings, grid=grid, allow_code=allow_code)
            if settings:
                recipe = _marked(recipe, load_recipe(name, grid=grid, allow_code=allow_code))
            if methods is not None:
                recipe = replace(recipe, methods=_chosen(recipe, methods))
            rounds = max(1, round(fraction * recipe.run.rounds))
            if rounds != recipe.run.rounds:
                paper = {**recipe.paper, "rounds": recipe.run.rounds}
                recipe = replace(recipe, run=replace(recipe.run, rounds=rounds), paper=paper)
            found.append(Column(column, recipe, folder / column))
    return found


def folder_of(table: Table, root: Path, fraction: float) -> Path:
    """Return the folder of a table's reproduction with a share of its rounds."""
    return root / (table.name.replace("/", "-") + ("" if fraction == 1 else f"-rounds-{fraction:g}"))


def _marked(recipe: Recipe, plain: Recipe) -> Recipe:
    """Return a recipe whose methods say in their labels where their options are not the table's."""
    options = {method.label: as_table(method.algorithm) for method in plain.methods}
    methods = []
    for method in recipe.methods:
        before, now = options.get(method.label, {}), as_table(method.algorithm)
        changed = [f"{name}={value}" for name, value in now.items() if before.get(name) != value]
        label = method.label + (f", changed: {', '.join(changed)}" if changed else "")
        methods.append(replace(method, label=label, point_of="" if changed else method.point_of))
    return replace(recipe, methods=tuple(methods))


def _chosen(recipe: Recipe, names: Iterable[str]) -> tuple[Method, ...]:
    """Return the recipe's methods of these names: labels, or a method's own name for all of its rows."""
    chosen: list[Method] = []
    for name in names:
        wanted = name.lower()
        found = [m for m in recipe.methods if wanted in (m.label.lower(), m.point_of.lower(), m.algorithm.name())]
        if not found:
            known = sorted({word for m in recipe.methods for word in (m.point_of or m.label, m.algorithm.name())})
            raise ConfigError(f"recipe {recipe.name!r} has no method {name!r}.{did_you_mean(name, known)}")
        chosen += [method for method in found if method not in chosen]
    return tuple(chosen)


def prepare(column: Column, machine: Machine, command: Sequence[str] = ()) -> Column:
    """Begin a column's run folder, or add to one that was begun what was not asked for before.

    Returns
    -------
    Column
        With the recipe as it now stands in the folder: all methods and seeds ever asked for.

    Raises
    ------
    RunError
        If the folder was begun with other settings.
    """
    column.folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(column.folder.with_name(f".{column.folder.name}.lock")):  # another process may add to it too
        return _prepare(column, machine, command)


def _prepare(column: Column, machine: Machine, command: Sequence[str]) -> Column:
    asked = {(method.label, seed) for method in column.recipe.methods for seed in column.recipe.seeds}
    archive = column.folder.with_name(f"{column.folder.name}{ARCHIVE_SUFFIX}")
    if archive.is_file() and not column.folder.exists():
        raise RunError(
            f"the records of {column.folder} are in {archive.name}. To add to them, unpack it: "
            f"python -m zipfile -e {archive} {column.folder}"
        )
    if not (column.folder / "run.json").exists():
        prepare_run(Experiment(column.recipe, machine), column.folder, command)
        _ask(column.folder, asked)
        return column
    old = load_recipe(str(column.folder / "recipe.toml"), allow_code=machine.allow_code)
    differing = _differences(old, column.recipe)
    if differing:
        raise RunError(
            f"{column.folder} was begun with other settings ({', '.join(differing)}). Choose another --out, or remove "
            "that folder."
        )
    known = {method.label for method in old.methods}
    added = tuple(method for method in column.recipe.methods if method.label not in known)
    seeds = tuple(sorted({*old.seeds, *column.recipe.seeds}))
    recipe = replace(old, methods=old.methods + added, seeds=seeds)
    if recipe != old:
        atomic_write(column.folder / "recipe.toml", recipe.to_toml())
    _ask(column.folder, asked)
    return replace(column, recipe=recipe)


def _differences(old: Recipe, new: Recipe) -> list[str]:
    """Return in which sections two recipes differ, apart from which methods and seeds they have."""
    names = (*SECTIONS, "client_models")
    found = [name for name in names if getattr(old, name) != getattr(new, name)]
    options = {method.label: method.algorithm for method in old.methods}
    return found + [m.label for m in new.methods if options.get(m.label, m.algorithm) != m.algorithm]


def trials_of(asked: Column, prepared: Column, machine: Machine) -> list[Trial]:
    """Return the trials of a prepared column that were asked for and are not finished."""
    labels = {method.label for method in asked.recipe.methods}
    return _trials(prepared, machine, [(label, seed) for label in labels for seed in asked.recipe.seeds])


def trials_left(column: Column, machine: Machine) -> list[Trial]:
    """Return the trials of a column that were ever asked for and are not finished."""
    return _trials(column, machine, list(_asked(column.folder)))


def _trials(column: Column, machine: Machine, wanted: Sequence[tuple[str, int]]) -> list[Trial]:
    experiment = Experiment(column.recipe, recorded_machine(column.folder, machine))
    return experiment.trials(column.folder, wanted, f"{column.name} ")


def _asked(folder: Path) -> set[tuple[str, int]]:
    """Return which trials, label and seed, were ever asked for in a column's folder."""
    path = folder / "asked.json"
    try:
        return {(str(label), int(seed)) for label, seed in json.loads(path.read_text())} if path.exists() else set()
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"cannot read {path}: {error}. Remove it, and ask for the trials again.") from error


def _ask(folder: Path, trials: set[tuple[str, int]]) -> None:
    atomic_write(folder / "asked.json", json.dumps(sorted(trials | _asked(folder))))


def begun(folder: Path, *, allow_code: bool = False) -> list[Column]:
    """Return the columns of a reproduction that exist, in the paper's order, with the recipes in their folders."""
    names = {run.parent.name: str(run.parent / "recipe.toml") for run in sorted(folder.glob("*/run.json"))}
    return [
        Column(name, load_recipe(names[name], allow_code=allow_code), folder / name)
        for name in (_ordered(names) if names else ())
    ]


def note(folder: Path, table: Table) -> None:
    """Write which table a folder reproduces, for pages that are made of several.

    Raises
    ------
    ConfigError
        If it is another table's folder.
    """
    path = folder / NOTE
    if path.exists() and (other := table_of(path)) != table.name:
        raise ConfigError(f"{folder} holds a reproduction of {other!r}, not of {table.name!r}. Choose another --out.")
    atomic_write(path, json.dumps({"table": table.name}))


def table_of(path: Traversable) -> str:
    """Return the name of the table that a `NOTE` names; raise `RunError` if it cannot be read."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["table"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"cannot read {path}: {error}.") from error
