"""Ranges of numbers, declared where a field is declared, and checked before a reply is used."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from math import inf
from typing import Any, get_args

from torch import Tensor

from fedkeep.interface.pytree import tree_nodes

LARGEST_SHOWN = 1e300
"""Larger numbers are not shown: an integer may be of any length, and formatting one beyond floats fails."""


@dataclass(frozen=True)
class Range:
    """The smallest and the largest number that a field of a reply may hold, both inclusive.

    A reply with a number outside is refused before the method sees it. In tensors and containers the range holds for
    every number.

    A step whose reply has a share of its examples::

        @dataclass(frozen=True, eq=False)
        class FitWithShare(Fit):
            share: Annotated[float, Range(0, 1)]

    ``low``, ``high``: The bounds.
    """

    low: float = -inf
    high: float = inf


def find_out_of_range(reply: Any) -> str | None:
    """Find a number outside the range that its field declares.

    Returns: The field, the number and the range; None if all numbers are inside.
    """
    for node, is_leaf in tree_nodes(reply):
        kind: Any = type(node)
        for name, allowed in () if is_leaf else _ranges(kind).items():
            for leaf, _ in tree_nodes(getattr(node, name)):
                worst = _outside(leaf, allowed)
                if worst is not None:
                    return f"{name} {in_short(worst)}, which must be {allowed.low:g} to {allowed.high:g}"
    return None


def in_short(number: float) -> str:
    """Return a number as text of a few characters, also an integer that is too large for a float.

    ``number``: The number, which may come from a client.
    """
    if abs(number) > LARGEST_SHOWN:
        return f"beyond {'-' if number < 0 else ''}{LARGEST_SHOWN:g}"
    return f"{number:g}"


def _outside(leaf: Any, allowed: Range) -> float | None:
    """Return a number outside the range; None if there is none."""
    if isinstance(leaf, Tensor):
        bounds = [float(leaf.min()), float(leaf.max())] if leaf.numel() else []
    else:
        bounds = [leaf] if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else []
    return next((number for number in bounds if not allowed.low <= number <= allowed.high), None)


@cache
def _ranges(cls: Any) -> Mapping[str, Range]:
    """Return the ranges that a dataclass declares, by field; cached, since every reply is checked."""
    if not is_dataclass(cls):
        return {}
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:  # a class inside a function may name others there; it can be used in this process only
        return {}
    found = {name: [extra for extra in get_args(hint)[1:] if isinstance(extra, Range)] for name, hint in hints.items()}
    return {name: ranges[0] for name, ranges in found.items() if ranges}
