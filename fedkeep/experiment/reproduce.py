"""Reproduce a paper's table: its columns are recipes in one folder, and every column becomes a run folder.

A reproduction is a folder ``ROOT/sfedkd-table1`` with one run folder for each column. Later calls add methods and
seeds to it, and run only what is not finished. A reproduction with fewer rounds has another folder.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock

from fedkeep._utils.digests import read_json, read_toml, write_json, write_toml
from fedkeep._utils.files import make_folder
from fedkeep.errors import ConfigError, RunError, did_you_mean
from fedkeep.experiment.experiment import Experiment, Trial
from fedkeep.experiment.provenance import ARCHIVE_SUFFIX, NOT_SETTINGS, check_code
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_files import paper_tables
from fedkeep.experiment.recipe_loader import load_recipe, read_paper_section
from fedkeep.experiment.run import add_code, continued_machine, prepare_run, recorded_recipe
from fedkeep.experiment.runtime import Machine
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


def place_in(order: Sequence[str], name: str) -> tuple[int, str]:
    """Return the place of a column in the paper's order; those that the paper does not have come last, by name."""
    return (list(order).index(name) if name in order else len(order)), name


def find_table(name: str) -> tuple[str, dict[str, str]]:
    """Return the name of a table, which is given by name or as a user's own folder of recipes, and its columns.

    Returns: Names or paths of recipes by the columns' short names, in the paper's order.
    """
    known = paper_tables()
    if name in known:
        return name, {column.rpartition("/")[2]: column for column in known[name].columns}
    if columns := {path.stem: str(path) for path in Path(name).glob("*.toml") if not path.name.startswith("_")}:
        paper = read_paper_section(next(iter(columns.values())))
        order = paper.get("columns", []) if isinstance(paper, Mapping) else []  # else it is refused with the recipe
        if not isinstance(order, list):
            raise ConfigError(
                f"paper.columns must be a list of the table's columns, such as ['a', 'b'], not {order!r}."
            )
        return Path(name).resolve().name, dict(sorted(columns.items(), key=lambda column: place_in(order, column[0])))
    hint = did_you_mean(name, known)
    raise ConfigError(f"there is no table {name!r}.{hint} The tables are listed by: fedkeep recipes")


def select_columns(
    table: str, recipes: Mapping[str, str], folder: Path, columns: Sequence[str], fraction: float, **changes: Any
) -> list[Column]:
    """Return the requested columns of a table.

    ``recipes``: Names of recipes by the short names of the table's columns.
    ``folder``: The folder of the reproduction.
    ``columns``: The columns' short names; none: all.
    ``fraction``: The share of the paper's rounds, above 0 and at most 1.
    ``**changes``: To every column's recipe, as `load_recipe` takes them.
    Returns: The columns, with the requested methods, seeds and rounds in their recipes.
    """
    if unknown := [column for column in columns if column not in recipes]:
        raise ConfigError(f"{table} has no column {unknown[0]!r}.{did_you_mean(unknown[0], recipes)}")
    selected = []
    for column, name in recipes.items():
        if not columns or column in columns:
            recipe = load_recipe(name, **changes)
            if changes.get("settings"):
                plain = [load_recipe(name, **{**changes, "settings": (), **of}) for of in ({"grid": False}, {})]
                recipe = _label_changes(recipe, plain)
            rounds = max(1, round(fraction * recipe.run.rounds))
            if rounds != recipe.run.rounds:
                paper = {**recipe.paper, "rounds": recipe.run.rounds}
                recipe = replace(recipe, run=replace(recipe.run, rounds=rounds), paper=paper)
            selected.append(Column(column, recipe, folder / column))
    return selected


def _label_changes(recipe: Recipe, plain: Sequence[Recipe]) -> Recipe:
    """Return a recipe in which the labels of methods name the options that differ from the table's.

    ``plain``: The table's recipe, without grids and with them.
    """
    options = {method.label: as_table(method.algorithm) for table in plain for method in table.methods}
    methods = []
    for method in recipe.methods:
        before, now = options.get(method.label, {}), as_table(method.algorithm)
        changed = [f"{name}={value}" for name, value in now.items() if before.get(name) != value]
        suffix = f", changed: {', '.join(changed)}" if changed else ""
        methods.append(
            replace(method, label=method.label + suffix, grid_of=method.grid_of and f"{method.grid_of}{suffix}")
        )
    return replace(recipe, methods=tuple(methods))


def prepare(column: Column, machine: Machine, command: Sequence[str] = ()) -> list[Trial]:
    """Create a column's run folder, or add its methods and seeds to an existing one; return what is not finished."""
    folder, recipe = column.folder, column.recipe
    make_folder(folder.parent)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # another process may change it too
        if not (folder / "run.json").exists():
            prepare_run(Experiment(recipe, machine), folder, command)
        else:
            check_code(folder, machine.use)
            recipe = _extend(folder, recorded_recipe(folder, allow_code=machine.allow_code), recipe)
            add_code(folder, recipe, machine.use)
    wanted = [(method.label, seed) for method in column.recipe.methods for seed in column.recipe.seeds]
    return Experiment(recipe, continued_machine(folder, machine)).trials(folder, wanted, f"{column.name} ")


def _extend(folder: Path, old: Recipe, new: Recipe) -> Recipe:
    """Add the methods and seeds of a recipe to that of a run folder; return all that were ever requested."""
    known = {method.label: method for method in old.methods}
    differing = sorted(n for n in options_of(Recipe).keys() - NOT_SETTINGS if getattr(old, n) != getattr(new, n))
    differing += [m.label for m in new.methods if replace(known.get(m.label, m), grid_of=m.grid_of) != m]
    if differing:
        raise RunError(
            f"{folder} was begun with other settings ({', '.join(differing)}). Choose another --out, or remove that "
            "folder."
        )
    added = tuple(method for method in new.methods if method.label not in known)
    recipe = replace(old, methods=old.methods + added, seeds=tuple(sorted({*old.seeds, *new.seeds})))
    if recipe != old:
        # All else stays as it was written: an older version may have written fewer options.
        path = folder / "recipe.toml"
        begun, extended = (tomllib.loads(text) for text in (read_toml(path), recipe.to_toml()))
        methods = [*begun["methods"], *extended["methods"][len(old.methods) :]]
        write_toml(path, tomli_w.dumps({**begun, "methods": methods, "seeds": list(recipe.seeds)}))
    return recipe


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
