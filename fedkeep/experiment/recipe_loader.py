"""Find recipes and read them from TOML files. All keys and values are checked before anything runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedkeep._utils.files import is_file
from fedkeep.data.partition import get_scheme
from fedkeep.data.schema import DataOptions
from fedkeep.errors import ConfigError, did_you_mean, in_one_line, nearest
from fedkeep.experiment.overrides import INITIAL_MODEL, add_grids, apply_overrides, expand, merge_tables
from fedkeep.experiment.recipe import (
    OPTIONS,
    SECTIONS,
    Method,
    Recipe,
    default_label,
    read_client_models,
    read_model,
    rows_named,
)
from fedkeep.interface import algorithms, get_algorithm
from fedkeep.models import Architecture
from fedkeep.options import build
from fedkeep.training.pooled import PooledTraining

ROOT = Path(str(files("fedkeep"))) / "recipes"
"""The folder of the recipes that come with the package."""
TABLE_FILE = "_table.toml"
"""The file in a folder of recipes that describes a table of a paper and is extended by the table's columns."""

GONE: dict[tuple[str, str], Any] = {
    ("defense", "logit_deviations"): None,
    ("defense", "rerun_distance"): None,
    ("defense", "collapsed_rounds"): 0,
    ("generator", "by_task"): [],
}
"""Options that are no more, with the value that kept recipes give them; None for any value."""

KEYS = ("title", "extends", "seeds", "methods", "client_models", "paper", "log", *SECTIONS)
"""The keys of a recipe."""


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
    paths = {path.parent.relative_to(ROOT).as_posix(): path for path in ROOT.rglob(TABLE_FILE)}
    return {name: _read_paper_table(name, paths[name]) for name in sorted(paths, key=_table_order)}


def _table_order(name: str) -> tuple[str, bool, str]:
    paper, _, table = name.rpartition("/")
    return paper, not table.startswith("table"), table


def _read_paper_table(name: str, path: Path) -> PaperTable:
    shared: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    paper = shared["paper"]
    columns = tuple(f"{name}/{column}" for column in paper["columns"])
    return PaperTable(name, shared["title"], paper["table"], columns, paper.get("notes", ""))


def load_recipe(
    name: str,
    *,
    settings: Sequence[str] = (),
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    log: Sequence[str] | None = None,
    allow_code: bool = False,
    grid: bool | Sequence[str] | Mapping[str, Any] | None = None,
    model: Architecture | None = None,
) -> Recipe:
    """Read a recipe by name or path, apply changes, and check all of it.

    Parameters
    ----------
    name : str
        The name of a recipe that comes with the package, or a path to a .toml file.
    settings : Sequence[str]
        Changes such as ``"training.lr=0.05"``, ``"algorithm.teachers=3"`` (all methods that have the option) or
        ``"sfedkd.tau=1"`` (that method, by name or label).
    methods : Sequence[str], optional
        Methods to run instead of the recipe's; those that the recipe lists keep its options.
    seeds : Sequence[int], optional
        Seeds to run instead of the recipe's.
    rounds : int, optional
        Rounds to run instead of the recipe's.
    log : Sequence[str], optional
        Where metrics are logged, instead of the recipe's ``log``.
    allow_code : bool
        Let the recipe name a model as ``package.module:function``, which is then imported.
    grid : bool or Sequence[str] or Mapping[str, list], optional
        Run a method once for every combination of the options in its ``grid``. A sequence or a table adds to the grids,
        such as ``["sfedkd.tau=1,2,4"]`` or ``{"training.lr": [0.01, 0.1]}``. By default the grids of a recipe are run,
        except in a recipe with a paper's numbers, whose grids say what the paper tuned; False leaves all out.
    model : Architecture, optional
        The model of a recipe whose own cannot be imported, since it was given in Python.

    Returns
    -------
    Recipe
        The recipe.

    Raises
    ------
    ConfigError
        For anything that cannot be run as written, with the nearest valid name.
    """
    table, where = _read(name, ())
    if rounds is not None:
        table.setdefault("run", {})["rounds"] = rounds
    if seeds is not None:
        table["seeds"] = list(seeds)
    if log is not None:
        table["log"] = list(log)
    if methods is not None:
        table["methods"] = _select_methods(table.get("methods", []), methods)
    apply_overrides(table, settings)
    expanded = grid if isinstance(grid, bool) else add_grids(table, grid or ()) or "paper" not in table
    if settings:
        # The title of a recipe that comes with FedKeep describes what it is, not what a user made of it.
        title = table.get("title", name) if name.endswith(".toml") else name
        table["title"] = f"{title} (changed: {', '.join(settings)})"
    return _build(name, table, where, allow_code, model, expanded)


def parse_recipe(text: str, where: str, *, allow_code: bool = False, model: Architecture | None = None) -> Recipe:
    """Read a recipe that `Recipe.to_toml` wrote, and check all of it.

    ``where``: What error messages call it.
    ``allow_code``: Let the recipe name a model as ``package.module:function``, which is then imported.
    ``model``: The model of a recipe whose own cannot be imported, since it was given in Python.
    """
    return _build(where, _parse(text, where), where, allow_code, model)


def with_grid(recipe: Recipe, grid: Mapping[str, Any] | Sequence[str], *, allow_code: bool = False) -> Recipe:
    """Return a recipe with those of its methods that a grid varies, once for each combination of values."""
    table = tomllib.loads(recipe.to_toml())
    add_grids(table, grid)
    table["methods"] = [entry for entry in table["methods"] if "grid" in entry]
    return _build(recipe.name, table, f"recipe {recipe.name!r}", allow_code, recipe.model)


def read_paper_section(name: str) -> Mapping[str, Any]:
    """Read the ``[paper]`` table of a recipe, without building the rest."""
    return _section(_read(name, ())[0], "paper", f"recipe {name!r}")


def read_title(name: str) -> str:
    """Read the title of a recipe, without building the rest."""
    table = _read(name, ())[0]
    return _title(str(table.get("title", name)), table.get("data", {}).get("validation", 0.0))


def _read(name: str, chain: tuple[Path, ...]) -> tuple[dict[str, Any], str]:
    """Return a recipe's table, merged with the recipes that it extends, and its name in error messages."""
    path = Path(name)
    if path.suffix != ".toml":
        path = ROOT / f"{name}.toml"
        if not is_file(path):
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
    table = _parse(text, f"the recipe {name!r}")
    for section in SECTIONS:
        _section(table, section, f"recipe {name!r}")
    _method_tables(table, f"recipe {name!r}")
    parents = table.pop("extends", [])
    base: dict[str, Any] = {}
    for parent in map(str, parents if isinstance(parents, list) else [parents]):
        # A path is relative to the file that names it.
        parent_name = str(path.parent / parent) if parent.endswith(".toml") else parent
        base = merge_tables(base, _read(parent_name, (*chain, path.resolve()))[0])
    return merge_tables(base, table), f"recipe {name!r}"


def _parse(text: str, where: str) -> dict[str, Any]:
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


def _select_methods(listed: list[dict[str, Any]], wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tables of these methods; a method that the recipe does not list gets its default options."""
    selected = []
    for name in wanted:
        selected.extend(rows_named(name, listed, _names) or [{"algorithm": name}])
    return selected


def _names(method: Mapping[str, Any]) -> tuple[str, str]:
    algorithm = str(method.get("algorithm", ""))
    if not (label := method.get("label")) and algorithm in algorithms():
        label = default_label(get_algorithm(algorithm))
    return str(label or ""), algorithm


def _build(
    name: str,
    table: dict[str, Any],
    where: str,
    allow_code: bool,
    model: Architecture | None = None,
    expanded: bool = True,
) -> Recipe:
    """Build a recipe from its table; a method with a grid stands in it once for each point, or once in all."""
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}.{did_you_mean(key, KEYS)}")
    sections = {section: dict(_section(table, section, where)) for section in SECTIONS}
    for (section, option), as_kept in GONE.items():
        if as_kept in (None, sections[section].get(option)):
            sections[section].pop(option, None)
    data, partition, network = sections["data"], sections["partition"], sections["model"]
    name_of_data, validation = data.pop("name", None), data.pop("validation", 0.0)
    weights, pretraining = network.pop("weights", ""), network.pop("pretraining", {})
    log = [given] if isinstance(given := table.get("log", []), str) else given
    for value, kind, expected in (
        (name_of_data, str, "[data] needs a name, a known data set, a Hub id or a path"),
        (weights, str, "model.weights is a path"),
        (pretraining, Mapping, "model.pretraining is a table, such as { passes = 6 }"),
        (log, list, 'log is a list of names, such as ["tensorboard"]'),
    ):
        if not isinstance(value, kind) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{where}: {expected}, not {value!r:.80}.")
    try:
        parts: dict[str, Any] = {name: build(cls, sections[name], f"[{name}]") for name, cls in OPTIONS.items()}
        return Recipe(
            name=name,
            title=_title(str(table.get("title", name)), validation),
            data=name_of_data,
            validation=validation,
            data_options=build(DataOptions, data, "[data]", ("name", "validation")),
            partition=build(get_scheme(partition.pop("scheme", "iid")), partition, "[partition]", ["scheme"]),
            model=model or read_model(network, "[model]", allow_code, INITIAL_MODEL),
            weights=weights,
            pretraining=build(PooledTraining, pretraining, "[model.pretraining]"),
            methods=tuple(one for entry in _method_tables(table, where) for one in _methods(entry, expanded)),
            seeds=table.get("seeds", [0]),
            client_models=read_client_models(table.get("client_models", []), allow_code),
            paper=_section(table, "paper", where),
            log=tuple(log),
            **parts,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _title(title: str, validation: Any) -> str:
    """Return a recipe's title, with a note if models are not evaluated on the test images."""
    note = f"evaluated on {validation:.0%} of the training images" if type(validation) is float and validation else ""
    return title if note in title else f"{title} ({note})"


def _section(table: Mapping[str, Any], section: str, where: str) -> Mapping[str, Any]:
    value = table.get(section, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {section} must be a table, [{section}].")
    return value


def _method_tables(table: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    entries = table.get("methods", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(
            f"{where}: methods must be tables, each under [[methods]]; there is no method to run otherwise."
        )
    return entries


def _methods(entry: Mapping[str, Any], expanded: bool) -> list[Method]:
    """Return the method that an entry of ``[[methods]]`` describes, or the points of its grid."""
    options = dict(entry)
    name, label, training = options.pop("algorithm", None), options.pop("label", None), options.pop("training", {})
    grid_of, grid = str(options.pop("grid_of", "")), options.pop("grid", {})
    if not isinstance(training, Mapping):
        raise ConfigError(f"training of a method is a table, such as {{ lr = 0.1 }}, not {training!r}.")
    if not isinstance(name, str):
        raise ConfigError(f"each of [[methods]] needs algorithm = one of: {', '.join(algorithms())}.")
    if not isinstance(grid, Mapping) or not all(isinstance(v, list) and v for v in grid.values()):
        raise ConfigError("the grid of a method is a table of lists, such as { mu = [0.1, 1.0] }.")
    cls = get_algorithm(name)
    method = Method(
        str(label or default_label(cls)),
        build(cls, options, f"method {name}", ("label", "training")),
        grid_of,
        training,
    )
    return expand(method, grid) if grid and expanded else [method]
