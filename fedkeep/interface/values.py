"""What travels and what a state holds: tensors, numbers and text in lists, ordered dicts and dataclasses, never changed
in place. This file walks, copies, counts and checks such values; `fedkeep.interface.codec` writes them down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
_LEAVES = (Tensor, bool, int, float, str, type(None))  # made once: values are walked for every message


@dataclass(frozen=True)
class Each:
    """An argument that differs from client to client (see `each`)."""

    values: Mapping[str, Any]


def each(values: Mapping[str, T]) -> T:
    """Give each client its own argument: ``cohort.ask(step, each({"3": a, "7": b}))`` reaches clients 3 and 7 only.

    To the type checker the result is one client's value, so that the call is checked against the step.
    """
    return cast(T, Each(values))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every tensor, number, text and None in a value, in order.

    Raises
    ------
    TypeError
        For anything that is not a value, with the path where it was found.
    """
    if isinstance(value, _LEAVES):
        yield path, value
    elif isinstance(value, (dict, Mapping)):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}[{number}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
    else:
        raise TypeError(
            f"{path or 'this'} is a {type(value).__name__}: only tensors, numbers, text, lists, dicts and dataclasses "
            "of these can travel or be kept in a state"
        )


def payload(value: Any) -> int:
    """Return the bytes of a value on the wire, without framing: tensors as they are, numbers 8, text in UTF-8.

    A tensor that occurs twice in a message travels once.
    """
    total, seen = 0, set()
    for _, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            total += 0 if id(leaf) in seen else leaf.nbytes
            seen.add(id(leaf))
        elif isinstance(leaf, str):
            total += len(leaf.encode())
        elif leaf is not None:
            total += 8
    return total


def found_in(value: Any, kind: type[Any]) -> Iterator[Any]:
    """Yield every dataclass or mapping of a kind in a value, the outer before the inner."""
    items: Iterable[Any] = ()
    if isinstance(value, _LEAVES):
        return
    if isinstance(value, kind):
        yield value
    if isinstance(value, (dict, Mapping)):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name) for field in fields(value))
    for item in items:
        yield from found_in(item, kind)


def not_finite(value: Any) -> str | None:
    """Return the path of the first tensor or number that is not finite, or None."""
    found = [(path, leaf) for path, leaf in leaves(value) if isinstance(leaf, float) or _has_fractions(leaf)]
    # A sum is finite only of finite numbers, and one look at all sums is quicker than one at each tensor.
    sums = [leaf.sum().abs().float() for _, leaf in found if isinstance(leaf, Tensor)]
    numbers = [leaf for _, leaf in found if isinstance(leaf, float)]
    together = torch.stack([one.to(sums[0].device) for one in sums]) if sums else torch.zeros(1)
    if all(map(math.isfinite, numbers)) and bool(torch.isfinite(together).all()):
        return None
    for path, leaf in found:  # finite numbers may overflow a sum
        if not (math.isfinite(leaf) if isinstance(leaf, float) else bool(torch.isfinite(leaf).all())):
            return path or "the value"
    return None


def _has_fractions(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def copied(value: T) -> T:
    """Return a value with its own containers and the same tensors: enough, since tensors are never changed in place."""
    result: Any = value
    if isinstance(value, dict):
        result = {key: copied(item) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        result = type(value)(copied(item) for item in value)
    elif is_dataclass(value) and not isinstance(value, type) and not value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        changes = {field.name: copied(getattr(value, field.name)) for field in fields(value)}
        result = replace(cast(Any, value), **changes)
    return cast(T, result)
