"""Options as fields of frozen dataclasses: documented where they are declared, checked where they are set.

Methods, partitions, architectures, sections of a recipe and the recipe itself declare their options with `option` and
derive from `Options`, so that Python code, recipes and the command line have the same names, checks and messages.
"""

import dataclasses
import datetime
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING
from operator import attrgetter
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import ConfigError, collect, did_you_mean, refuse

T = TypeVar("T", bound="Options")

SMALLEST, LARGEST = 1e-37, 1e38
"""The smallest and the largest number of an option but 0: those beyond are 0 or infinite in float32."""


def option(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    kw_only: bool = False,
    at: str | None = None,
    kind: tuple[str, Callable[[str], type[Any]]] | None = None,
    brief: bool = False,
    only: tuple[str, *tuple[Any, ...]] | None = None,
) -> Any:
    """Declare an option of a dataclass that derives from `Options`.

    Parameters
    ----------
    default : object
        The default value; a class stands for a new object of it, and `dataclasses.MISSING` for none.
    doc : str
        A short description, for help texts and documentation.
    low, high : float, optional
        Smallest and largest allowed number, inclusive; in a tuple they hold for each item.
    kw_only : bool
        In Python it is given by name only, so that a subclass's own options come first.
    at : str, optional
        Its place in a table, such as ``data.name``; default: its own name. Empty: its options stand among the others.
    kind : tuple[str, Callable], optional
        Of options of several classes: under which name a table says the class, and what finds the class.
    brief : bool
        At its default it is left out of tables.
    only : tuple, optional
        Another option's name and its values with which this one counts; with others it does nothing.

    Returns
    -------
    object
        A dataclass field.
    """
    if isinstance(default, list | dict | set):
        right = f"tuple, {tuple(default)!r}" if isinstance(default, list) else f"class, {type(default).__name__}"
        raise ConfigError(f"an option's default cannot be {default!r}, which would be one for all. Give a {right}.")
    metadata = {"doc": doc, "low": low, "high": high, "at": at, "kind": kind, "brief": brief, "only": only}
    how: dict[str, Any] = {"metadata": metadata} | ({"kw_only": True} if kw_only else {})
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, hash=default is not dict, **how)
    return dataclasses.field(default=default, **how)


@dataclasses.dataclass(frozen=True)
class Options:
    """Base class of everything that is configured by fields; checks their types and ranges on construction."""

    def __post_init__(self) -> None:
        refuse(undeclared(type(self)))
        for name, value in _all_checked({name: getattr(self, name) for name in options_of(type(self))}, type(self)):
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Check combinations of options; override it where options can contradict each other."""

    def idle_options(self) -> list[str]:
        """Return which options were set and do nothing, because of another option."""
        found = []
        for name, field in options_of(type(self)).items():
            if field.metadata["only"] and getattr(self, name) != default_of(field):
                other, *values = field.metadata["only"]
                if getattr(self, other) not in values:
                    found.append(f"{name} counts only with {other} = {' or '.join(map(str, values))}")
        return found


TOML_TYPES = (bool, int, float, str, list, dict, datetime.datetime, datetime.date, datetime.time)
"""What a value of a recipe can be."""
NO_OPTION: Mapping[str, Any] = MappingProxyType({"option": False})
"""The metadata of a field of `Options` that tables shall not hold."""


def undeclared(cls: type[Options]) -> list[str]:
    """Return what is wrong with fields that are no options, so that recipes and records would lose them."""
    return [
        f"{cls.__qualname__}.{field.name} is no option, so that recipes, records and a resumed run would lose it. "
        f'Write: {field.name}: {_as_written(field.type)} = option(..., "what it is"); or leave the '
        "annotation out, if it is a fact about the class."
        for field in dataclasses.fields(cls)
        if field.init and "doc" not in field.metadata and field.metadata.get("option") is not False
    ]


def unwritable(cls: type[Options], hints: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with options whose annotated type no value of a recipe can be read as.

    ``hints``: The evaluated annotations of the class.
    """
    return [
        f"{cls.__qualname__}: the option {name}: {_as_written(field.type)} cannot stand in a recipe. Write "
        "tuple[float, ...] for a list, collections.abc.Mapping[str, float] for a table and str for a path; else int, "
        "float, bool, str, a Literal[...] of texts, or one of these | None."
        for name, field in options_of(cls).items()
        if not _is_writable(hints[name])
    ]


def _is_writable(hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return all(map(_is_writable, arguments))
    if origin is tuple:
        return bool(arguments) and _is_writable(arguments[0])
    if isinstance(hint, type) and not arguments and any(issubclass(kind, hint) for kind in (*TOML_TYPES, type(None))):
        return True
    return origin in (Literal, Mapping) or _is_options(hint)


def _as_written(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def named_subclasses(base: type[T], name_of: Callable[[type[T]], str | None], advice: str) -> dict[str, type[T]]:
    """Return by name all classes derived from a base that have one; raise `ConfigError` with advice if two share it.

    A class that is defined again, as in a notebook's cell, replaces itself; one that is gone gives its name away.
    """
    found: dict[str, type[T]] = {}
    pending = list(base.__subclasses__())
    for cls in pending:
        pending.extend(cls.__subclasses__())
        if (name := name_of(cls)) is None:
            continue
        other = found.get(name, cls)
        alike = _is_there(other) == _is_there(cls) and (_is_there(cls) or cls.__module__ != other.__module__)
        if full_name(other) != full_name(cls) and alike:
            raise ConfigError(f"{full_name(other)} and {full_name(cls)} are both named {name!r}. {advice}")
        if _is_there(cls) or not _is_there(other):
            found[name] = cls
    return found


def _is_there(cls: type) -> bool:
    """Tell whether a class's name still stands for it, as far as it can be looked up."""
    if "<" in cls.__qualname__ or cls.__module__ not in sys.modules:
        return True
    try:
        return attrgetter(cls.__qualname__)(sys.modules[cls.__module__]) is cls
    except AttributeError:
        return False


def full_name(cls: type) -> str:
    """Return a class's name with its module's."""
    return f"{cls.__module__}.{cls.__qualname__}"


def find_named(name: str, known: Mapping[str, type[T]], kind: str, advice: str) -> type[T]:
    """Return the class with a name, in upper or lower case; raise `ConfigError` with the nearest name and advice."""
    if name.lower() not in known:
        raise ConfigError(f"there is no {kind} {name!r}.{did_you_mean(name.lower(), known)} {advice}")
    return known[name.lower()]


def options_of(cls: type[Options]) -> dict[str, dataclasses.Field[Any]]:
    """Return the options that a class declares.

    Returns: The options by name.
    """
    return {field.name: field for field in dataclasses.fields(cls) if "doc" in field.metadata}


def place_of(field: dataclasses.Field[Any]) -> str:
    """Return where an option stands in a table; empty for options that stand among the others."""
    at: str | None = field.metadata["at"]
    return field.name if at is None else at


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of an option; `dataclasses.MISSING` if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def build(
    cls: type[T],
    table: Mapping[str, Any],
    where: str = "",
    also: Iterable[str] = (),
    problems: Iterable[str] = (),
    **more: Any,
) -> T:
    """Construct an object from a table of a recipe.

    ``table``: The values by name of option.
    ``where``: What error messages begin with.
    ``also``: What else its section may name, for the error message.
    ``problems``: What is known to be wrong already; it is told with the rest.
    ``**more``: Fields that are no options.
    """
    values, found = _read(cls, table, also)
    try:
        if problems := [*problems, *found]:
            with collect(problems):
                _all_checked(values, cls)
            raise ConfigError(*problems)
        return cls(**values, **more)
    except ConfigError as error:
        raise error.within(where) from None


def check_values(cls: type[Options], table: Mapping[str, Any], where: str) -> None:
    """Check each value of a table that other values will complete, but not whether they contradict each other."""
    values, problems = _read(cls, table, ())
    with collect(problems):
        _all_checked(values, cls)
    if problems:
        raise ConfigError(*problems).within(where)


def _read(cls: type[Options], table: Mapping[str, Any], also: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return by option what a table gives; and what it lacks or has too many."""
    known, problems = options_of(cls), list[str]()
    rest = {name: dict(part) if isinstance(part, Mapping) else part for name, part in table.items()}
    values: dict[str, Any] = {}
    places = {name: place_of(field) for name, field in known.items()}
    # What stands in a section is taken out of it before the section, and what has no place of its own comes last.
    for name in sorted(places, key=lambda name: (not places[name], -places[name].count("."))):
        field, (section, _, last) = known[name], places[name].rpartition(".")
        inner: Any = rest.get(section) if section else rest
        if last and isinstance(inner, dict) and last in inner:
            values[name] = inner.pop(last)
        elif not last:
            values[name], rest = rest, {}
        elif default_of(field) is MISSING:
            place = f"[{section}] needs {last}" if section else f"{name} is missing"
            problems.append(f"{place}: {field.metadata['doc']}.")
    if rest:
        names = [*also, *(place.partition(".")[0] for place in places.values())]
        problems += (f"there is no option {name!r}.{did_you_mean(name, dict.fromkeys(names))}" for name in rest)
    return values, problems


def build_kind(
    field: dataclasses.Field[Any], cls: type[T], table: Mapping[str, Any], where: str, also: Iterable[str] = ()
) -> T:
    """Construct options of the class that their table names; in place of the name it may hold the object itself."""
    (key, find), rest = field.metadata["kind"], dict(table)
    named = rest.pop(key, getattr(default_of(field), "name", None))
    if named is None:
        raise ConfigError(f"{where} needs {key}: {field.metadata['doc']}.".lstrip())
    if not isinstance(named, cls):
        found: type[T] = find(_typed(named, str, f"{where}.{key}".lstrip(".")))
        return build(found, rest, f"{where} {named}".lstrip(), [key, *also])
    if rest:
        raise ConfigError(f"{where}: {getattr(named, 'name', key)!r} is your own, and takes no {', '.join(rest)}.")
    return named


def as_table(value: Options) -> dict[str, Any]:
    """Return an object's options as a table, from which `build` can construct it again.

    Returns: The values by name, as TOML can represent them; options that are None are left out.
    """
    table: dict[str, Any] = {}
    for name, field in options_of(type(value)).items():
        part, (*section, last) = getattr(value, name), place_of(field).split(".")
        if part is None or (field.metadata["brief"] and part == default_of(field)):
            continue
        inner, written = table.setdefault(section[0], {}) if section else table, _written(part)
        if field.metadata["kind"]:
            written = {field.metadata["kind"][0]: part.name() if callable(part.name) else part.name, **written}
        if last:
            written = {last: inner.get(last, {}) | written if isinstance(written, dict) else written}
        inner |= written
    return table


def _written(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_written(item) for item in value]
    return as_table(value) if isinstance(value, Options) else dict(value) if isinstance(value, Mapping) else value


def _all_checked(values: Mapping[str, Any], owner: type[Options]) -> list[tuple[str, Any]]:
    """Return checked values by name; raise `ConfigError` with all that is wrong."""
    hints, known, problems, checked = annotations_of(owner), options_of(owner), list[str](), []
    for name, value in values.items():
        with collect(problems):
            checked.append((name, _checked(value, hints[name], known[name], owner)))
    refuse(problems)
    return checked


def _checked(value: Any, hint: Any, field: dataclasses.Field[Any], owner: type[Options]) -> Any:
    if _is_options((*get_args(hint), hint)[0] if get_origin(hint) is tuple else hint):
        return _options(value, hint, field, owner)
    where = field.metadata["at"] or f"{owner.__name__}.{field.name}"
    value = _typed(value, hint, where)
    low, high = field.metadata["low"], field.metadata["high"]
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not ((low is None or number >= low) and (high is None or number <= high)):
            raise ConfigError(f"{where} must be {describe_bounds(field)}, not {number}.")
        if isinstance(number, float) and number and not SMALLEST <= abs(number) <= LARGEST:
            raise ConfigError(f"{where} must be 0 or {SMALLEST} to {LARGEST} in size, as float32 holds, not {number}.")
    return value


def _is_options(hint: Any) -> bool:
    cls = get_origin(hint) or hint
    return isinstance(cls, type) and issubclass(cls, Options)


def _options(value: Any, hint: Any, field: dataclasses.Field[Any], owner: type[Options]) -> Any:
    """Return options, or a tuple of options, of what may be tables of them."""
    place, cls = place_of(field), get_origin(hint) or hint
    section = f"{place}." if place else ""
    beside = [other for other in map(place_of, options_of(owner).values()) if other and other.startswith(section)]
    also = [other.removeprefix(section) for other in beside]

    def convert_one(value: Any, cls: Any, where: str) -> Any:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where or field.name} must be a table or a {cls.__name__}, not {value!r:.80}.")
        return build_kind(field, cls, value, where, also) if field.metadata["kind"] else build(cls, value, where, also)

    if cls is tuple:
        found, problems = [], list[str]()
        for number, each in enumerate(value, start=1):
            with collect(problems):
                found.append(convert_one(each, get_args(hint)[0], f"[[{place}]] {number}"))
        refuse(problems)
        return tuple(found)
    return convert_one(value, cls, f"[{place}]" if place else "")


def plain(value: Any) -> Any:
    """Return what NumPy's sweeps and searches give as Python's numbers, texts and lists, and paths as texts."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value] if value.ndim else plain(value[()])
    if isinstance(value, np.generic):  # float32's 0.1 is 0.1, not 0.10000000149
        return float(str(value)) if isinstance(value, np.floating) else value.item()
    return str(value) if isinstance(value, PurePath) else value


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
        reasons = []
        for alternative in alternatives:
            if alternative is not type(None):
                try:
                    return _typed(value, alternative, where)
                except ConfigError as error:
                    reasons.append(error)
        raise reasons[0 if isinstance(value, str) and get_origin(alternatives[0]) is Literal else -1]
    if origin is tuple and isinstance(value, list | tuple | str):
        value = (value,) if isinstance(value, str) else value
        return tuple(_typed(item, get_args(hint)[0], where) for item in value)
    if origin is Mapping and isinstance(value, Mapping):
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where} must be a finite number, not {value}.")
        return value
    raise ConfigError(f"{where} must be {describe_type(hint)}, not {value!r}.")


def describe_bounds(field: dataclasses.Field[Any]) -> str:
    """Return the smallest and the largest number that an option may have, in words; empty without either."""
    low, high = field.metadata["low"], field.metadata["high"]
    if high is None:
        return "" if low is None else f"at least {low}"
    return f"at most {high}" if low is None else f"{low} to {high}"


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
    if origin is Mapping:
        return "a table"
    words = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))
