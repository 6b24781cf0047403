"""Changes to a recipe's tables before it is built: what extends another, and what ``--set`` says."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from fedkeep.data.partition import schemes
from fedkeep.errors import ConfigError, did_you_mean
from fedkeep.interface import get_algorithm
from fedkeep.models import architectures
from fedkeep.options import options_of

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
)


def merge_tables(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the entries of ``over``, tables merged (see `_changed`)."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = _changed(key, old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _changed(section: str, old: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with changes.

    Another scheme or model has other options: what both have stays, such as the number of clients or Dirichlet's alpha.
    Other data and another table of a paper have nothing in common.
    """
    kind = {"partition": "scheme", "paper": "table"}.get(section, "name")
    if kind in over and over[kind] != old.get(kind):
        known = {"partition": schemes, "model": architectures}.get(section, dict)().get(str(over[kind]).lower())
        kept = options_of(known) if known else ()
        old = {name: value for name, value in old.items() if name in kept}
    return merge_tables(old, over)


def apply_overrides(table: dict[str, Any], settings: Iterable[str]) -> None:
    """Change a recipe's table in place as settings say, each written ``section.option=value``.

    Raises
    ------
    ConfigError
        For what is not written so, or names no section or option that there is.
    """
    # What kind of partition or model it is comes first: it decides which options there are.
    kinds = ("partition.scheme", "model.name")
    for setting in sorted(settings, key=lambda setting: setting.partition("=")[0].strip() not in kinds):
        path, equals, text = setting.partition("=")
        parts = path.strip().split(".")
        if not equals or len(parts) < 2 or not all(parts):
            raise ConfigError(f"cannot read --set {setting!r}: write section.option=value, such as training.lr=0.05.")
        section, name = ".".join(parts[:-1]), parts[-1]
        value = parse_value(text.strip())
        if section in SECTIONS:
            table[section] = _changed(section, table.get(section, {}), {name: value})
        else:
            _apply_to_methods(table, section, name, value)


def _apply_to_methods(table: dict[str, Any], section: str, name: str, value: Any) -> None:
    entries = table.get("methods", [])
    if section == "algorithm":
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
        entry[name] = value


def parse_value(text: str) -> Any:
    """Read a value as TOML would; what is no TOML value is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
