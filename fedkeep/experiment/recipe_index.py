"""The recipes that come with the package, and the papers' tables and figures, which have one for each column."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

ROOT = Path(str(files("fedkeep"))) / "recipes"
SHARED = "_table.toml"


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper: a folder of recipes, one for each column.

    Attributes
    ----------
    name : the folder, such as ``sfedkd/table1``. title : a line for people.
    table : what the paper calls it, such as "SFedKD, table 1".
    columns : the names of its recipes, in the paper's order.
    notes : what the paper leaves open, how it was read, and what is not to be trusted.
    """

    name: str
    title: str
    table: str
    columns: tuple[str, ...]
    notes: str = ""


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package, such as ``sfedkd/table1/fashion-mnist-2-0.5``.

    Files whose names begin with an underscore are there to be extended, and are left out.
    """
    paths = (path for path in ROOT.rglob("*.toml") if not path.name.startswith("_"))
    return sorted(path.relative_to(ROOT).as_posix().removesuffix(".toml") for path in paths)


def paper_tables() -> Mapping[str, PaperTable]:
    """Return the papers' tables and figures that come with the package, by name; of a paper, tables come first."""
    found = {path.parent.relative_to(ROOT).as_posix(): path for path in ROOT.rglob(SHARED)}
    return {name: _table(name, found[name]) for name in sorted(found, key=_order)}


def _order(name: str) -> tuple[str, bool, str]:
    paper, _, table = name.rpartition("/")
    return paper, not table.startswith("table"), table


def _table(name: str, path: Path) -> PaperTable:
    shared: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    paper = shared["paper"]
    columns = tuple(f"{name}/{column}" for column in paper["columns"])
    return PaperTable(name, shared["title"], paper["table"], columns, paper.get("notes", ""))
