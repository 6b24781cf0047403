"""Values of one form: the same but for the numbers inside their tensors, so that they can be stacked.

An objective is a tree of dataclasses, mappings and lists with tensors at its leaves. Those named in an objective's
``columns`` hold a row for each example, and may differ in length too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fedkeep.losses import Objective


def form(value: Any, column: bool = False) -> Hashable:
    """Return all of a value but the numbers inside its tensors, and how long they are if they are columns.

    What cannot be looked into is equal to nothing but itself, or to nothing at all.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.shape[1:] if column else value.shape
    if isinstance(value, Mapping):
        return tuple((key, form(item, column)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), *(form(item, column) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        known = {field.name for field in fields(value)}
        hidden = object() if vars(value).keys() - known else None
        return type(value), hidden, *(form(item, inside) for _, item, inside in _fields(value, column))
    return value if isinstance(value, Hashable) else object()


def tensors(value: Any) -> list[tuple[Tensor, bool]]:
    """Return a value's tensors in order, and which of them are columns."""
    found: list[tuple[Tensor, bool]] = []

    def note(tensor: Tensor, column: bool) -> Tensor:
        found.append((tensor, column))
        return tensor

    _mapped(value, note, False)
    return found


def filled(value: Any, given: Sequence[Tensor]) -> Any:
    """Return a value with other tensors, in the order of `tensors`."""
    following = iter(given)
    return _mapped(value, lambda tensor, column: next(following), False)


def together(values: Sequence[Any]) -> list[Tensor]:
    """Stack values of one form: their tensors in order, each with a leading dimension.

    Columns are filled up to the longest with rows that nobody reads. What is one tensor for all is stacked too: that it
    is one is not certain after a resume, and another way to compute would round otherwise.
    """
    return [_stack(place) for place in zip(*map(tensors, values), strict=True)]


def _stack(place: Sequence[tuple[Tensor, bool]]) -> Tensor:
    parts = [tensor for tensor, _ in place]
    if place[0][1]:
        longest = max(map(len, parts))
        parts = [torch.cat((part, part.new_zeros(longest - len(part), *part.shape[1:]))) for part in parts]
    return torch.stack(parts)


def _mapped(value: Any, function: Callable[[Tensor, bool], Tensor], column: bool) -> Any:
    """Return a value with every tensor replaced; the function is told which tensors are columns."""
    if isinstance(value, Tensor):
        return function(value, column)
    if isinstance(value, Mapping):
        return {key: _mapped(item, function, column) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, function, column) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)  # not made anew: a user's own class may do anything when it is
        for name, item, inside in _fields(value, column):
            object.__setattr__(twin, name, _mapped(item, function, inside))
        return twin
    return value


def _fields(value: Any, column: bool) -> Iterator[tuple[str, Any, bool]]:
    """Yield the fields of a dataclass: name, content, and whether it holds columns."""
    named = value.columns if isinstance(value, Objective) else ()
    return ((field.name, getattr(value, field.name), column or field.name in named) for field in fields(value))
