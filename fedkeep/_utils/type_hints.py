"""Annotations of classes and functions, evaluated once: they are asked for with every message."""

from __future__ import annotations

import typing
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any


def annotations_of(thing: type | Callable[..., Any]) -> dict[str, Any]:
    """Return what a class annotates its fields with, or a function its parameters and, under ``return``, its result.

    The dict is shared: do not change it.
    """
    return _evaluated(thing)


@cache
def _evaluated(thing: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(thing)
