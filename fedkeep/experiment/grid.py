"""Grids in recipes: a method once for each combination of values that a paper tuned."""

from __future__ import annotations

from itertools import product
from typing import Any

from fedkeep.errors import ConfigError
from fedkeep.interface import get_algorithm
from fedkeep.options import build


def expand_grids(entries: list[dict[str, Any]], grid: bool, where: str) -> list[dict[str, Any]]:
    """Return the methods' tables without their grids, or with one table for each allowed combination in a grid."""
    result: list[dict[str, Any]] = []
    for entry in entries:
        plain = {key: value for key, value in entry.items() if key != "grid"}
        values = entry.get("grid", {})
        if not isinstance(values, dict) or not all(isinstance(v, list) and v for v in values.values()):
            raise ConfigError(f"{where}: the grid of a method is a table of lists, such as {{ mu = [0.1, 1.0] }}.")
        if not (grid and values):
            result.append(plain)
            continue
        result.extend(_points(plain, values, where))
    return result


def _points(entry: dict[str, Any], values: dict[str, list[Any]], where: str) -> list[dict[str, Any]]:
    """Return one table for each combination of options; those that contradict each other are left out.

    A value that no combination can have is an error.
    """
    cls = get_algorithm(str(entry.get("algorithm")))
    label, common = entry.get("label") or cls.title or cls.__name__, {k: v for k, v in entry.items() if k != "label"}
    found: list[dict[str, Any]] = []
    unseen = {(name, repr(value)) for name, listed in values.items() for value in listed}
    error: ConfigError | None = None
    for point in product(*values.values()):
        options = dict(zip(values, point, strict=True))
        try:
            build(cls, {k: v for k, v in (common | options).items() if k != "algorithm"}, f"{where}, grid of {label}")
        except ConfigError as reason:
            error = reason
            continue
        unseen -= {(name, repr(value)) for name, value in options.items()}
        words = ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in options.items()
        )
        found.append(common | options | {"label": f"{label} ({words})", "point_of": label})
    if unseen and error:
        raise error
    return found
