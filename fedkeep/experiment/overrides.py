"""Changes to a recipe's tables before it is built: recipes that extend others, ``--set``, and grids of options."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

from fedkeep.data.catalog import is_known
from fedkeep.data.partition import schemes
from fedkeep.errors import ConfigError, did_you_mean
from fedkeep.interface import get_algorithm
from fedkeep.models import architectures
from fedkeep.options import build, options_of

Row = TypeVar("Row")

SECTIONS = (
    "data",
    "auxiliary",
    "public",
    "generator",
    "augmentation",
    "partition",
    "tasks",
    "model",
    "training",
    "run",
    "defense",
    "privacy",
    "attack",
)
"""The sections of a recipe."""
INITIAL_MODEL = ("weights", "pretraining")
"""What of ``[model]`` says from which model rounds begin, whatever the network."""


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
    kind = {"partition": "scheme", "paper": "table"}.get(section, "name")
    if section == "data" and not is_known(str(over.get("name", ""))) and not is_known(str(old.get("name", ""))):
        return merge_tables(old, over)
    if kind in over and over[kind] != old.get(kind):
        known = {"partition": schemes, "model": architectures}.get(section, dict)().get(str(over[kind]).lower())
        common = {*(options_of(known) if known else ()), *(INITIAL_MODEL if section == "model" else ())}
        old = {name: value for name, value in old.items() if name in common}
    return merge_tables(old, over)


def apply_overrides(table: dict[str, Any], settings: Iterable[str]) -> None:
    """Apply settings to a recipe's table, in place.

    ``settings``: The settings, each written ``section.option=value``.
    """
    # The kinds of data, partition and model are set first, since they decide which options there are.
    kinds = ("data.name", "partition.scheme", "model.name")
    for setting in sorted(settings, key=lambda setting: setting.partition("=")[0].strip() not in kinds):
        path, equals, text = _split_setting(setting, table)
        section, _, name = path.strip().rpartition(".")
        if not (equals and section.strip(".") and name):
            raise ConfigError(f"cannot read --set {setting!r}: write section.option=value, such as training.lr=0.05.")
        value = parse_value(text.strip())
        if section == "model.pretraining":
            section, name, value = "model", "pretraining", {name: value}
        if section in SECTIONS:
            table[section] = _merge_section(section, table.get(section, {}), {name: value})
        else:
            _apply_to_methods(table, section, name, value)


def _split_setting(setting: str, table: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the path, the equals sign and the value of a setting; a method's label may hold equals signs itself."""
    labels = (str(entry.get("label", "")) for entry in table.get("methods", []))
    known = [label for label in labels if label and setting.strip().lower().startswith(f"{label.lower()}.")]
    start = len(max(known, key=len, default=""))
    setting = setting.strip()
    rest, equals, text = setting[start:].partition("=")
    return setting[:start] + rest, equals, text


def _apply_to_methods(table: dict[str, Any], section: str, name: str, value: Any) -> None:
    entries = table.get("methods", [])
    of_training, section = section.endswith(".training"), section.removesuffix(".training")
    if section == "algorithm" and not of_training:
        chosen = [e for e in entries if name in options_of(get_algorithm(str(e.get("algorithm"))))]
        if entries and not chosen:
            known = {n for e in entries for n in options_of(get_algorithm(str(e.get("algorithm"))))}
            raise ConfigError(
                f"--set algorithm.{name}: no method of this recipe has the option.{did_you_mean(name, known)}"
            )
    else:
        keys = {str(e.get(key, "")).lower() for e in entries for key in ("algorithm", "label")} - {""}
        chosen = [
            e for e in entries if section.lower() in (str(e.get("algorithm")).lower(), str(e.get("label")).lower())
        ]
        if not chosen:
            raise ConfigError(
                f"--set {section}.{name}: unknown section.{did_you_mean(section, {*SECTIONS, 'algorithm', *keys})}"
            )
    if name == "algorithm":
        raise ConfigError(f"--set {section}.algorithm: choose methods with --methods.")
    for entry in chosen:
        if of_training:
            entry["training"] = {**entry.get("training", {}), name: value}
        else:
            entry[name] = value


def expand_grids(entries: list[dict[str, Any]], grid: bool, where: str) -> list[dict[str, Any]]:
    """Return the tables of a recipe's methods with their grids expanded, or removed.

    ``entries``: The tables. A table's ``grid`` holds, by option, the values that a paper tuned.
    ``grid``: Return one table for each combination of the values; otherwise only the tables without their grids.
    ``where``: What error messages call the recipe.
    """
    result: list[dict[str, Any]] = []
    for entry in entries:
        plain = {key: value for key, value in entry.items() if key != "grid"}
        values = entry.get("grid", {})
        if not isinstance(values, dict) or not all(isinstance(v, list) and v for v in values.values()):
            raise ConfigError(f"{where}: the grid of a method is a table of lists, such as {{ mu = [0.1, 1.0] }}.")
        if not (grid and values):
            result.append(plain)
            continue
        result.extend(_grid_points(plain, values, where))
    return result


def _grid_points(entry: dict[str, Any], values: dict[str, list[Any]], where: str) -> list[dict[str, Any]]:
    """Return one table for each valid combination; raise `ConfigError` for a value that is in none of them."""
    cls = get_algorithm(str(entry.get("algorithm")))
    label, common = entry.get("label") or cls.title or cls.__name__, {k: v for k, v in entry.items() if k != "label"}
    points: list[dict[str, Any]] = []
    unused = {(name, repr(value)) for name, listed in values.items() for value in listed}
    error: ConfigError | None = None
    for point in product(*values.values()):
        options = dict(zip(values, point, strict=True))
        try:
            given = {k: v for k, v in (common | options).items() if k not in ("algorithm", "training")}
            build(cls, given, f"{where}, grid of {label}")
        except ConfigError as reason:
            error = reason
            continue
        unused -= {(name, repr(value)) for name, value in options.items()}
        points.append(common | options | {"label": grid_label(label, options), "grid_of": label})
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


def join_labels(parts: Sequence[str], labels: Iterable[str]) -> list[str]:
    """Put labels together that contain commas, after a list of names was split at its commas.

    ``parts``: What stood between the commas.
    ``labels``: The known labels. The longest that fits is taken; upper and lower case are the same.
    Returns: Names and labels; a part that begins no known label is a name of its own.
    """
    known = {tuple(part.strip().lower() for part in label.split(",")): label for label in labels}
    longest = max(map(len, known), default=1)
    names: list[str] = []
    position = 0
    while position < len(parts):
        for end in range(min(position + longest, len(parts)), position, -1):
            label = known.get(tuple(part.lower() for part in parts[position:end]))
            if label is not None or end == position + 1:
                # One word stays as it was typed: upper and lower case tell a label from the name of a method.
                names.append(parts[position] if label is None or end == position + 1 else label)
                position = end
                break
    return names


def rows_named(wanted: str, rows: Sequence[Row], names: Callable[[Row], Iterable[str]]) -> list[Row]:
    """Return the rows that have a name: exactly as it is written, or else in upper and lower case.

    So ``FedSeq`` is the row with this label, and ``fedseq``, the name of a method, is each row of that method.

    ``rows``: Methods, or their tables in a recipe.
    Returns: The rows, in their order; empty if none has this name.
    """
    exact = [row for row in rows if wanted in names(row)]
    return exact or [row for row in rows if wanted.lower() in (name.lower() for name in names(row))]


def split_grid(line: str) -> tuple[str, list[str]]:
    """Split a grid of one option into the option and its values.

    ``line``: Such as ``"sfedkd.tau=1,2,4"``; commas within brackets and quotes do not separate values.
    """
    path, equals, text = line.partition("=")
    path = path.strip()
    values, depth, quote = [""], 0, ""
    for letter in text.strip():
        quote = "" if letter == quote else quote or (letter if letter in "\"'" else "")
        depth += 0 if quote else (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    values = [value.strip() for value in values]
    if not equals or not all(path.rpartition(".")[::2]) or not all(values):
        raise ConfigError(f"cannot read the grid {line!r}: write method.option=values, such as sfedkd.tau=1,2,4.")
    if len(set(values)) < len(values):
        raise ConfigError(f"the grid {line!r} names a value twice. Each is run only once.")
    return path, values


def add_grids(table: dict[str, Any], lines: Iterable[str]) -> bool:
    """Add grids to the methods of a recipe's table, in place.

    ``lines``: The grids, each written ``method.option=value,value``.
    Returns: Whether there was a line.
    """
    added = False
    for line in lines:
        path, values = split_grid(line)
        section, _, name = path.rpartition(".")
        if section.removesuffix(".pretraining") in SECTIONS:
            raise ConfigError(
                f"--grid {line}: the methods of one run share [{section}]. Vary it with fedkeep tune, or in several "
                f"runs with --set {path}."
            )
        probe = {"methods": [dict(entry) for entry in table.get("methods", [])]}
        _apply_to_methods(probe, section, name, values)
        for entry, changed in zip(table["methods"], probe["methods"], strict=True):
            if changed.get(name) is values:
                entry["grid"] = {**entry.get("grid", {}), name: [parse_value(value) for value in values]}
        added = True
    return added


def parse_value(text: str) -> Any:
    """Parse a value as TOML does; text that is not a TOML value is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, an integer of thousands of digits, or nested too deeply
        return text
