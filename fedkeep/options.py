"""Options as fields of frozen dataclasses: documented where they are declared, checked where they are set.

Methods, partitions, architectures and training settings all declare their options with `option` and derive from
`Options`, so that Python code, a recipe and the command line meet the same checks and the same words.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import ConfigError, did_you_mean

T = TypeVar("T", bound="Options")


def option(default: Any, doc: str, *, low: float | None = None, high: float | None = None) -> Any:
    """Declare an option: its default, one sentence about it, and the closed range it may lie in."""
    return dataclasses.field(default=default, metadata={"doc": doc, "low": low, "high": high})


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of everything that is configured by fields; checks types and ranges when constructed."""

    def __post_init__(self) -> None:
        hints = annotations_of(type(self))
        for name, field in options_of(type(self)).items():
            value = _checked(getattr(self, name), hints[name], field, f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise `ConfigError` where options contradict each other; overridden where they can."""


def options_of(cls: type[Options]) -> dict[str, dataclasses.Field[Any]]:
    """Return the declared options of a class by name."""
    return {field.name: field for field in dataclasses.fields(cls) if "doc" in field.metadata}


def build(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """Construct `cls` from a table of a recipe.

    Raises
    ------
    ConfigError
        For a name that is not an option (with the nearest that is), a value of the wrong type, or one out of range.
    """
    known = options_of(cls)
    for name in table:
        if name not in known:
            raise ConfigError(f"{where}: there is no option {name!r}.{did_you_mean(name, known)}")
    try:
        return cls(**table)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def as_table(value: Options) -> dict[str, Any]:
    """Return the options as a table that `build` takes and TOML can hold (``None`` is left out)."""
    table = {name: getattr(value, name) for name in options_of(type(value))}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in table.items() if v is not None}


def _checked(value: Any, hint: Any, field: dataclasses.Field[Any], where: str) -> Any:
    value = _typed(value, hint, where)
    low, high = field.metadata["low"], field.metadata["high"]
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not ((low is None or number >= low) and (high is None or number <= high)):
            bounds = f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
            raise ConfigError(f"{where} must be {bounds}, not {number}.")
    return value


def _typed(value: Any, hint: Any, where: str) -> Any:
    """Return `value` as the annotation says, or raise."""
    origin = get_origin(hint)
    if origin is Literal:
        choices = get_args(hint)
        if value in choices:
            return value
        raise ConfigError(f"{where} cannot be {value!r}.{did_you_mean(str(value), map(str, choices))}")
    if origin in (Union, types.UnionType):
        alternatives = get_args(hint)
        if type(None) in alternatives and (value is None or (value == "none" and str not in alternatives)):
            return None  # TOML has no word for it
        for alternative in alternatives:
            if alternative is not type(None):
                try:
                    return _typed(value, alternative, where)
                except ConfigError as error:
                    reason = error
        raise reason
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(item, get_args(hint)[0], where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    if (
        origin is None
        and isinstance(hint, type)
        and isinstance(value, hint)
        and (hint is bool or not isinstance(value, bool))
    ):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where} must be a finite number, not {value}.")
        return value
    raise ConfigError(f"{where} must be {describe_type(hint)}, not {value!r}.")


def describe_type(hint: Any) -> str:
    """Return an option's type in plain words, for errors and the `methods` command."""
    origin = get_origin(hint)
    if origin is Literal:
        return " | ".join(map(str, get_args(hint)))
    if origin in (Union, types.UnionType):
        return " or ".join("none" if a is type(None) else describe_type(a) for a in get_args(hint))
    if origin is tuple:
        return f"a list of {describe_type(get_args(hint)[0])}"
    words = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))
