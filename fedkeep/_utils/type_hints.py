"""Evaluated type annotations, cached because every message needs them."""

import typing
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any


def annotations_of(thing: type | Callable[..., Any]) -> dict[str, Any]:
    """Return the evaluated type annotations of a class or function.

    Returns: The annotations of fields, or of parameters and, under ``"return"``, of the result. The dict is shared
        between calls: do not change it.
    """
    return _evaluated(thing)


@cache
def _evaluated(thing: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(thing)
