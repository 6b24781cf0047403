"""The files of recipes: their names, the tables of papers, and what a file extends; without PyTorch, to list them."""

import tomllib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from importlib.resources import files
from os.path import isfile
from pathlib import Path
from typing import Any

from fedkeep.errors import ConfigError, in_one_line, nearest

ROOT = Path(str(files("fedkeep"))) / "recipes"
"""The folder of the recipes that come with the package."""
TABLE_FILE = "_table.toml"
"""The file in a folder of recipes that describes a table of a paper and is extended by the table's columns."""

Merge = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
"""A recipe's table with the entries of another, which take precedence."""


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper: a folder of recipes, one for each column.

    ``name``: The folder, such as ``sfedkd/table1``.
    ``title``: One line that describes it.
    ``table``: Its name in the paper, such as "SFedKD, table 1".
    ``columns``: The names of its recipes, in the paper's order.
    ``notes``: What the paper leaves open, how FedKeep reads it, and which numbers are doubtful.
    """

    name: str
    title: str
    table: str
    columns: tuple[str, ...]
    notes: str = ""


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package, such as ``sfedkd/table1/fashion-mnist-2-0.5``.

    Files whose names begin with an underscore only serve to be extended, and are left out.
    """
    paths = (path for path in ROOT.rglob("*.toml") if not path.name.startswith("_"))
    return sorted(path.relative_to(ROOT).as_posix().removesuffix(".toml") for path in paths)


def paper_tables() -> Mapping[str, PaperTable]:
    """Return by name the papers' tables and figures that come with the package; a paper's tables come first."""
    names = [path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob(TABLE_FILE)]
    found = {}
    for name in sorted(names, key=lambda name: (name.rpartition("/")[0], "/table" not in name, name)):
        shared = tomllib.loads((ROOT / name / TABLE_FILE).read_text(encoding="utf-8"))
        paper = shared["paper"]
        columns = tuple(f"{name}/{column}" for column in paper["columns"])
        found[name] = PaperTable(name, shared["title"], paper["table"], columns, paper.get("notes", ""))
    return found


def read_title(name: str) -> str:
    """Read the title of a recipe, without building the rest."""
    table = read_recipe_file(name, _by_section)[0]
    return titled(str(table.get("title", name)), table.get("data", {}).get("validation", 0.0))


def _by_section(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return all sections with all options, which is enough for a title."""
    return base | {name: base.get(name, {}) | part if isinstance(part, dict) else part for name, part in over.items()}


def read_recipe_file(
    name: str,
    merge: Merge,
    chain: tuple[Path, ...] = (),
    merged: set[Path] | None = None,
    skipped: Set[Path] = frozenset(),
) -> tuple[dict[str, Any], str]:
    """Return a recipe's table, merged with the recipes that it extends, and its name in error messages.

    ``chain``: The files on the way to this one.
    ``merged``: The files that were merged already, to which this one and its parents are added.
    ``skipped``: Files whose entries are left out: what two parents extend does not undo what the first one changes.
    """
    merged = set() if merged is None else merged
    path = Path(name)
    if path.suffix != ".toml":
        path = ROOT / f"{name}.toml"
        if not isfile(path):
            raise _unknown_recipe(name)
    try:
        if path.resolve() in chain:
            raise ConfigError(f"recipe {name!r} extends itself, by way of {', '.join(link.name for link in chain)}.")
        text = path.read_text(encoding="utf-8-sig")  # Windows writes a byte order mark
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {name!r}. Give a path to a recipe, or a name such as demo. See: fedkeep recipes."
        ) from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the name
        raise ConfigError(f"cannot read the recipe {in_one_line(repr(name), 200)}: {error}") from error
    table = parse_toml(text, f"the recipe {name!r}")
    parents = table.pop("extends", [])
    if path.resolve() in skipped:
        return {}, f"recipe {name!r}"
    before = frozenset() if path.resolve() in merged else frozenset(merged)  # one that is named again counts whole
    merged.add(path.resolve())
    base: dict[str, Any] = {}
    parents = [*map(str, parents if isinstance(parents, list) else [parents])]
    for parent in parents:
        # A path is relative to the file that names it.
        parent_name = str(path.parent / parent) if parent.endswith(".toml") else parent
        base = merge(base, read_recipe_file(parent_name, merge, (*chain, path.resolve()), merged, before)[0])
    extends = f", which extends {' and '.join(parents)}" if len(parents) > 1 else ""
    return merge(base, table), f"recipe {name!r}{extends}"


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the table of a TOML file."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # of TOML, or of an integer of more than 4,300 digits
        raise ConfigError(f"cannot read {where}: {in_one_line(error, 300)}") from error
    except RecursionError as error:
        raise ConfigError(f"cannot read {where}: its tables or lists are nested too deeply.") from error


def _unknown_recipe(name: str) -> ConfigError:
    tables = paper_tables()
    if table := tables.get(name.rstrip("/")):
        columns = ", ".join(table.columns)
        return ConfigError(f"{name!r} is no recipe; it has one for each column of {table.table}: {columns}.")
    hint = nearest(name, [*recipe_names(), *tables])
    return ConfigError(f"there is no recipe {name!r}.{hint} See: fedkeep recipes. Or give a path to a .toml file.")


def titled(title: str, validation: Any) -> str:
    """Return a recipe's title, with a note if models are not evaluated on the test images."""
    note = f"evaluated on {validation:.0%} of the training images" if type(validation) is float and validation else ""
    return title if note in title else f"{title} ({note})"
