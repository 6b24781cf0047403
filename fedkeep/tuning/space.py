"""The values to try: grids of options, and the points of a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import tomli_w

from fedkeep.errors import ConfigError
from fedkeep.experiment.overrides import grid_label, parse_value, split_grid
from fedkeep.experiment.recipe import SECTIONS, Method, Recipe
from fedkeep.options import options_of, plain

Point = tuple[tuple[str, str], ...]
"""Options and their values as text, such as ``(("sfedkd.tau", "2"), ("training.lr", "0.1"))``."""


@dataclass(frozen=True)
class Dimension:
    """An option and what to try for it.

    ``path``: The option, written ``method.option``, ``algorithm.option`` or ``section.option``.
    ``values``: The values as text; empty for a range.
    ``low``, ``high``: The ends of a range, which only a search can sample.
    """

    path: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0

    @property
    def is_range(self) -> bool:
        """Whether it is a range instead of a list."""
        return not self.values

    @property
    def name(self) -> str:
        """The option without its section."""
        return self.path.rpartition(".")[2]

    def touches(self, method: Method) -> bool:
        """Return whether it changes a method's results.

        Returns: True for an option of the method, and for one of a section of the recipe.
        """
        section = self.path.rpartition(".")[0].casefold()
        if section == "algorithm":
            return self.name in options_of(type(method.algorithm))
        return section in SECTIONS or section in (method.label.casefold(), method.algorithm.name())


def read_space(grid: Mapping[str, Any] | Sequence[str]) -> tuple[Dimension, ...]:
    """Read what to try.

    ``grid``: By option, a list of values or a range as text: ``{"sfedkd.tau": [1, 2, 4]}``; or the same as text,
        ``"sfedkd.tau=1,2,4"`` and ``"training.lr=0.001..0.1"``.
    """
    if isinstance(grid, Mapping):
        lines = [(path, _texts(path, values)) for path, values in grid.items()]
    else:
        lines = [split_grid(line) for line in grid]
    found: dict[str, Dimension] = {}
    for path, values in lines:
        if path in found:
            raise ConfigError(f"the grid names {path} twice. Put its values into one list.")
        ends = values[0].split("..") if len(values) == 1 else []
        if len(ends) == 2:
            low, high = (parse_value(end) for end in ends)
            if not all(type(end) in (int, float) for end in (low, high)) or not low < high:
                raise ConfigError(f"the grid's range {path}={values[0]} needs two numbers, such as 0.001..0.1.")
            found[path] = Dimension(path, (), low, high)
        else:
            found[path] = Dimension(path, tuple(values))
    if not found:
        raise ConfigError("there is nothing to tune. Name values to try, such as --grid sfedkd.tau=1,2,4.")
    return tuple(found.values())


def points_of(space: Sequence[Dimension], recipe: Recipe, method: Method) -> list[Point]:
    """Return the points of a method's grid.

    ``method``: The method, to which only the options that touch it apply.
    Returns: All combinations of the values.
    """
    own = [dimension for dimension in space if dimension.touches(method)]
    ranges = [dimension.path for dimension in own if dimension.is_range]
    if ranges:
        raise ConfigError(f"{', '.join(ranges)} is a range, which a grid cannot list. Add --search 20, or list values.")
    return [
        tuple(zip((dimension.path for dimension in own), values, strict=True))
        for values in product(*(dimension.values for dimension in own))
    ]


def point_label(method: Method, point: Point) -> str:
    """Return a point in words, such as ``SFedKD (tau 2, lr 0.1)``."""
    return grid_label(method.label, {path.rpartition(".")[2]: parse_value(text) for path, text in point})


def settings_of(point: Point) -> list[str]:
    """Return a point as settings of a recipe.

    Returns: Such as ``["sfedkd.tau=2"]``.
    """
    return [f"{path}={text}" for path, text in point]


def _texts(path: str, values: Any) -> list[str]:
    values = plain(values)
    if isinstance(values, str):
        return split_grid(f"{path}={values}")[1]
    if not isinstance(values, list | tuple | range) or not len(values):
        raise ConfigError(f"the grid of {path} must be a list of values or a range such as '0.001..0.1'.")
    return [tomli_w.dumps({"v": plain(value)}).partition("=")[2].strip() for value in values]
