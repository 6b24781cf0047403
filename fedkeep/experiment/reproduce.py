"""Reproduce a paper's table: its columns are recipes in one folder, and every column becomes a run folder.

A reproduction is a folder ``ROOT/sfedkd-table1`` with one run folder per column. It grows: later calls add methods and
seeds to it, and play only what is not finished. With a fraction of the rounds it has a name of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from fedkeep.errors import ConfigError, RunError, did_you_mean
from fedkeep.experiment.catalogue import paper_tables
from fedkeep.experiment.cells import Job
from fedkeep.experiment.changes import SECTIONS
from fedkeep.experiment.folders import cell_name
from fedkeep.experiment.machine import Machine
from fedkeep.experiment.reading import load_recipe, printed
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.run import begin, pending_cells
from fedkeep.files import write_whole
from fedkeep.options import as_table


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper.

    Attributes
    ----------
    name : such as ``sfedkd/table1``. columns : recipes by the columns' short names, in the paper's order.
    """

    name: str
    columns: dict[str, str]


@dataclass(frozen=True)
class Column:
    """One column of a reproduction: its recipe with what was asked for, and its run folder."""

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
    order = list(printed(next(iter(columns.values()))).get("columns", ()))
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
    if not (column.folder / "run.json").exists():
        begin(column.recipe, column.folder, machine, command)
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
        write_whole(column.folder / "recipe.toml", recipe.to_toml())
    _ask(column.folder, asked)
    return replace(column, recipe=recipe)


def _differences(old: Recipe, new: Recipe) -> list[str]:
    """Return in which sections two recipes differ, apart from which methods and seeds they have."""
    names = (*SECTIONS, "validation", "client_models")
    found = [name for name in names if getattr(old, name) != getattr(new, name)]
    options = {method.label: method.algorithm for method in old.methods}
    return found + [m.label for m in new.methods if options.get(m.label, m.algorithm) != m.algorithm]


def jobs_of(asked: Column, prepared: Column) -> list[Job]:
    """Return the cells of a prepared column that were asked for and are not finished."""
    labels = {method.label for method in asked.recipe.methods}
    return _jobs(prepared, {(label, seed) for label in labels for seed in asked.recipe.seeds})


def jobs_left(column: Column) -> list[Job]:
    """Return the cells of a column that were ever asked for and are not finished."""
    return _jobs(column, _asked(column.folder))


def _jobs(column: Column, wanted: set[tuple[str, int]]) -> list[Job]:
    return [
        Job(column.folder, column.recipe, method, seed, f"{column.name} {cell_name(method, seed)}")
        for method, seed in pending_cells(column.folder, column.recipe)
        if (method.label, seed) in wanted
    ]


def _asked(folder: Path) -> set[tuple[str, int]]:
    """Return which cells, label and seed, were ever asked for in a column's folder."""
    path = folder / "asked.json"
    try:
        return {(str(label), int(seed)) for label, seed in json.loads(path.read_text())} if path.exists() else set()
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"cannot read {path}: {error}. Remove it, and ask for the cells again.") from error


def _ask(folder: Path, cells: set[tuple[str, int]]) -> None:
    write_whole(folder / "asked.json", json.dumps(sorted(cells | _asked(folder))))


def begun(folder: Path, *, allow_code: bool = False) -> list[Column]:
    """Return the columns of a reproduction that exist, in the paper's order, with the recipes in their folders."""
    names = {run.parent.name: str(run.parent / "recipe.toml") for run in sorted(folder.glob("*/run.json"))}
    return [
        Column(name, load_recipe(names[name], allow_code=allow_code), folder / name)
        for name in (_ordered(names) if names else ())
    ]


def note(folder: Path, table: Table) -> None:
    """Write what a reproduction's folder reproduces, for pages that are made of several.

    Raises
    ------
    ConfigError
        If it is another table's folder.
    """
    if (folder / "reproduction.json").exists() and (other := read_note(folder)) != table.name:
        raise ConfigError(f"{folder} holds a reproduction of {other!r}, not of {table.name!r}. Choose another --out.")
    write_whole(folder / "reproduction.json", json.dumps({"table": table.name}))


def read_note(folder: Path) -> str:
    """Return the name of the table that a folder reproduces; raise `RunError` if it cannot be read."""
    try:
        return str(json.loads((folder / "reproduction.json").read_text(encoding="utf-8"))["table"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"cannot read {folder / 'reproduction.json'}: {error}.") from error
