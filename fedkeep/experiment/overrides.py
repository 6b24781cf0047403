"""Changes to a recipe's tables before it is built: recipes that extend others, ``--set``, and grids of options."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from fedkeep.data.catalog import is_known
from fedkeep.data.partition import schemes
from fedkeep.errors import ConfigError, did_you_mean
from fedkeep.experiment.recipe import SECTIONS, Method
from fedkeep.interface import get_algorithm
from fedkeep.models import architectures
from fedkeep.options import Options, as_table, build, options_of, plain

INITIAL_MODEL = ("weights", "pretraining")
"""What of ``[model]`` says from which model rounds begin, whatever the network."""
TRAINING = "training."
"""What an option of local training begins with in the grid of a method."""
KINDS = {"partition": "scheme", "paper": "table"}
"""The option of a section that decides which other options there are; of all others it is the name."""


def merge_tables(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with the entries of another, which take precedence. Tables in them are merged too."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = _merge_section(key, old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _merge_section(section: str, old: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with changes.

    If the partition scheme or the model changes, options that the new one has too stay, such as the number of clients
    or Dirichlet's alpha. Columns and sizes stay for other data of one's own. If a data set that is known by name comes,
    or the paper's table changes, nothing stays.
    """
    kind = KINDS.get(section, "name")
    own_data = section == "data" and not any(is_known(str(table.get("name", ""))) for table in (old, over))
    if not own_data and kind in over and over[kind] != old.get(kind):
        known = {"partition": schemes, "model": architectures}.get(section, dict)().get(str(over[kind]).lower())
        common = {*(options_of(known) if known else ()), *(INITIAL_MODEL if section == "model" else ())}
        if over[kind] == "column":
            common -= {"num_clients"}  # each value of the column is a client
        old = {name: value for name, value in old.items() if name in common}
    return merge_tables(old, over)


def read_setting(setting: str, labels: Iterable[str] = ()) -> tuple[str, str, Any]:
    """Split ``section.option=value`` into its parts; a method's label may hold dots and equals signs itself."""
    setting = setting.strip()
    start = max((len(each) for each in labels if setting.lower().startswith(f"{each.lower()}.")), default=0)
    rest, equals, text = setting[start:].partition("=")
    section, _, name = (setting[:start] + rest).strip().rpartition(".")
    if not (equals and section.strip(".") and name):
        raise ConfigError(f"cannot read --set {setting!r}: write section.option=value, such as training.lr=0.05.")
    return section, name, parse_value(text.strip())


def read_settings(
    settings: Iterable[str], sections: Mapping[str, type[Options]], defaults: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, Options]:
    """Return the options of each section of a command that runs no recipe, with the changes of ``--set``.

    ``defaults``: By section, defaults that replace those of the class.
    """
    tables = {name: dict((defaults or {}).get(name, {})) for name in sections}
    for section, name, value in map(read_setting, settings):
        if section not in sections:
            raise ConfigError(
                f"--set {section}.{name}: this command has no section {section!r}.{did_you_mean(section, sections)}"
            )
        tables[section][name] = value
    return {name: build(cls, tables[name], name) for name, cls in sections.items()}


def apply_overrides(table: dict[str, Any], settings: Iterable[str]) -> None:
    """Apply settings, each written ``section.option=value``, to a recipe's table, in place."""
    # The kinds of data, partition and model are set first, since they decide which options there are.
    kinds = ("data.name", "partition.scheme", "model.name")
    for setting in sorted(settings, key=lambda setting: setting.partition("=")[0].strip() not in kinds):
        section, name, value = read_setting(setting, (str(e.get("label", "")) for e in table.get("methods", [])))
        if section == "model.pretraining":
            section, name, value = "model", "pretraining", {name: value}
        if section in SECTIONS:
            table[section] = _merge_section(section, table.get(section, {}), {name: value})
            continue
        for entry in _entries_with(table, section, name):
            if section.endswith(".training"):
                entry["training"] = {**entry.get("training", {}), name: value}
            else:
                entry[name] = value


def _entries_with(table: Mapping[str, Any], section: str, name: str) -> list[dict[str, Any]]:
    """Return the tables of the methods that a setting changes: those of a name or a label, or all with the option."""
    entries, who = table.get("methods", []), section.removesuffix(".training").lower()
    if name == "algorithm":
        raise ConfigError(f"--set {section}.algorithm: choose methods with --methods.")
    if section == "algorithm":
        known = [options_of(get_algorithm(str(entry.get("algorithm")))) for entry in entries]
        chosen = [entry for entry, options in zip(entries, known, strict=True) if name in options]
        if entries and not chosen:
            hint = did_you_mean(name, {option for options in known for option in options})
            raise ConfigError(f"--set algorithm.{name}: no method of this recipe has the option.{hint}")
        return chosen
    names = [[str(entry.get(key, "")).lower() for key in ("algorithm", "label")] for entry in entries]
    chosen = [entry for entry, own in zip(entries, names, strict=True) if who in own]
    if not chosen:
        hint = did_you_mean(who, {*SECTIONS, "algorithm", *(each for own in names for each in own if each)})
        raise ConfigError(f"--set {section}.{name}: unknown section.{hint}")
    return chosen


def expand(method: Method, grid: Mapping[str, list[Any]]) -> list[Method]:
    """Return a method once for each valid combination of values; raise `ConfigError` for a value that is in none.

    ``grid``: By option, its values. Options of local training are named such as ``training.lr``.
    """
    points: list[Method] = []
    unused = {(name, repr(value)) for name, values in grid.items() for value in values}
    error: ConfigError | None = None
    for point in product(*grid.values()):
        options = dict(zip(grid, point, strict=True))
        training = {name.removeprefix(TRAINING): v for name, v in options.items() if name.startswith(TRAINING)}
        own = {name: value for name, value in options.items() if not name.startswith(TRAINING)}
        try:
            table = as_table(method.algorithm) | own
            algorithm = build(type(method.algorithm), table, f"the grid of {method.label}")
        except ConfigError as reason:
            error = reason
            continue
        unused -= {(name, repr(value)) for name, value in options.items()}
        label = grid_label(method.label, {name.removeprefix(TRAINING): value for name, value in options.items()})
        points.append(Method(label, algorithm, method.label, {**method.training, **training}))
    if unused and error:
        raise error
    return points


def grid_label(label: str, options: Mapping[str, Any]) -> str:
    """Return the label of a point of a grid.

    Returns: Such as ``SFedKD (tau 2, teachers 3)``.
    """
    values = (f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in options.items())
    text = ", ".join(values)
    return f"{label} ({text})" if text else label


def _split_grid(line: str) -> tuple[str, list[Any]]:
    """Split a grid of one option, such as ``sfedkd.tau=1,2,4``, into the option and its values."""
    path, _, text = (part.strip() for part in line.partition("="))
    try:
        values: list[Any] = tomllib.loads(f"values = [{text}]")["values"]  # commas may stand in brackets and quotes
    except ValueError:
        values = [parse_value(part.strip()) for part in text.split(",")]
    if not all(path.rpartition(".")[::2]) or not values or "" in values:
        raise ConfigError(f"cannot read the grid {line!r}: write method.option=values, such as sfedkd.tau=1,2,4.")
    if any(value in values[:place] for place, value in enumerate(values)):
        raise ConfigError(f"the grid {line!r} names a value twice. Each is run only once.")
    return path, values


def read_grid(grid: Mapping[str, Any] | Iterable[str]) -> dict[str, list[Any]]:
    """Return by option what to try, of lines such as ``sfedkd.tau=1,2,4`` or of a table of lists."""
    found: dict[str, list[Any]] = {}
    if isinstance(grid, Mapping):
        for path, values in grid.items():
            if not isinstance(plain(values), list | tuple | range) or not len(values):
                raise ConfigError(f"the grid of {path} must be a list of values, such as [1, 2], not {values!r:.80}.")
            found[path] = [plain(value) for value in values]
        return found
    for line in grid:
        path, values = _split_grid(line)
        if path in found:
            raise ConfigError(f"the grid names {path} twice. Put its values into one list.")
        found[path] = values
    return found


def add_grids(table: dict[str, Any], grid: Mapping[str, Any] | Iterable[str]) -> bool:
    """Add grids (see `read_grid`) to the methods of a recipe's table; return whether there was one."""
    found = read_grid(grid)
    for path, values in found.items():
        section, _, name = path.rpartition(".")
        of_training = section == "training" or section.endswith(".training")
        if not of_training and section.removesuffix(".pretraining") in SECTIONS:
            raise ConfigError(
                f"a grid is of options of methods and of local training, and the methods of one run share [{section}]. "
                f"Vary it in several runs, with --set {path}."
            )
        entries = table["methods"] if section == "training" else _entries_with(table, section, name)
        for entry in entries:
            entry["grid"] = {**entry.get("grid", {}), f"{TRAINING * of_training}{name}": values}
    return bool(found)


def parse_value(text: str) -> Any:
    """Parse a value as TOML does; text that is not a TOML value is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, an integer of thousands of digits, or nested too deeply
        return text
