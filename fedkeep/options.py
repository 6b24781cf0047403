"""Options as fields of frozen dataclasses: documented where they are declared, checked where they are set.

Methods, partitions, architectures and training settings declare their options with `option` and derive from `Options`,
so that Python code, recipes and the command line have the same names, checks and error messages.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import ConfigError, did_you_mean

T = TypeVar("T", bound="Options")

SMALLEST, LARGEST = 1e-37, 1e38
"""The smallest and the largest number of an option but 0: those beyond are 0 or infinite in float32."""


def option(
    default: Any, doc: str, *, low: float | None = None, high: float | None = None, kw_only: bool = False
) -> Any:
    """Declare an option of a dataclass that derives from `Options`.

    Parameters
    ----------
    default : object
        The default value.
    doc : str
        A short description, for help texts and documentation.
    low, high : float, optional
        Smallest and largest allowed number, inclusive; in a tuple they hold for each item.
    kw_only : bool
        In Python it is given by name only, so that a subclass's own options come first.

    Returns
    -------
    object
        A dataclass field.
    """
    return dataclasses.field(default=default, kw_only=kw_only, metadata={"doc": doc, "low": low, "high": high})


@dataclasses.dataclass(frozen=True)
class Options:
    """Base class of everything that is configured by fields; checks their types and ranges on construction."""

    def __post_init__(self) -> None:
        hints = annotations_of(type(self))
        for name, field in options_of(type(self)).items():
            value = _checked(getattr(self, name), hints[name], field, f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Check combinations of options; override it where options can contradict each other."""


def options_of(cls: type[Options]) -> dict[str, dataclasses.Field[Any]]:
    """Return the options that a class declares.

    Returns: The options by name.
    """
    return {field.name: field for field in dataclasses.fields(cls) if "doc" in field.metadata}


def build(cls: type[T], table: Mapping[str, Any], where: str, also: Iterable[str] = ()) -> T:
    """Construct an object from a table of a recipe.

    ``table``: The values by name of option.
    ``also``: What else its section may name, for the error message.
    """
    known = options_of(cls)
    if unknown := [name for name in table if name not in known]:
        hints = (f"there is no option {name!r}.{did_you_mean(name, [*also, *known])}" for name in unknown)
        raise ConfigError(f"{where}: {' '.join(hints)}")
    try:
        return cls(**table)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def as_table(value: Options) -> dict[str, Any]:
    """Return an object's options as a table, from which `build` can construct it again.

    Returns: The values by name, as TOML can represent them; options that are None are left out.
    """
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
        if isinstance(number, float) and number and not SMALLEST <= abs(number) <= LARGEST:
            raise ConfigError(f"{where} must be 0 or {SMALLEST} to {LARGEST} in size, as float32 holds, not {number}.")
    return value


def plain(value: Any) -> Any:
    """Return what NumPy's sweeps and searches give as Python's numbers, texts and lists; all else as it is."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value] if value.ndim else plain(value[()])
    if isinstance(value, np.generic):  # float32's 0.1 is 0.1, not 0.10000000149
        return float(str(value)) if isinstance(value, np.floating) else value.item()
    return value


def _typed(value: Any, hint: Any, where: str) -> Any:
    """Convert a value to the type of an annotation; raise `ConfigError` if that is not possible."""
    value = plain(value)
    origin = get_origin(hint)
    if origin is Literal:
        choices = get_args(hint)
        if value in choices:
            return value
        raise ConfigError(f"{where} cannot be {value!r}.{did_you_mean(str(value), map(str, choices))}")
    if origin in (Union, types.UnionType):
        alternatives = get_args(hint)
        if type(None) in alternatives and (value is None or (value == "none" and str not in alternatives)):
            return None  # TOML has no null value
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
    """Describe an option's type in plain words, for error messages and the command line.

    Returns: Such as ``a list of an integer`` or ``none or a number``.
    """
    origin = get_origin(hint)
    if origin is Literal:
        return " | ".join(map(str, get_args(hint)))
    if origin in (Union, types.UnionType):
        return " or ".join("none" if a is type(None) else describe_type(a) for a in get_args(hint))
    if origin is tuple:
        return f"a list of {describe_type(get_args(hint)[0])}"
    words = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))
