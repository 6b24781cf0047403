"""Arguments of commands as values: those that options declare, and those that several commands share."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, get_origin

from fedkeep._utils.type_hints import annotations_of
from fedkeep.experiment.runtime import Machine
from fedkeep.options import Options, options_of

Argument = tuple[str, dict[str, Any]]
"""The name of an argument, and how argparse describes it; its ``group`` is that of the help."""


def arg(
    flag: str, help: str, kind: Callable[[str], Any] | None = None, metavar: str | None = None, **more: Any
) -> Argument:
    """Describe an argument: its name, help text, type and placeholder; the help text ends in the default."""
    default = more.get("default")
    if default and not isinstance(default, list | tuple):
        help += f" (default: {default})"
    elif default:
        help += f" (default: {','.join(map(str, default))})"
    options = {"help": help, "type": kind, "metavar": metavar, **more}
    return flag, {name: value for name, value in options.items() if value is not None}


def switch(flag: str, help: str, **more: Any) -> Argument:
    """Describe an argument without a value."""
    return arg(flag, help, action="store_true", **more)


def several(flag: str, help: str, metavar: str, **more: Any) -> Argument:
    """Describe an argument that may be given more than once."""
    return arg(flag, f"{help}; may be repeated", metavar=metavar, action="append", default=[], **more)


def add_arguments(command: argparse.ArgumentParser, arguments: Iterable[Argument]) -> None:
    """Add arguments to a command; of those whose group begins with "one " only one may be given."""
    groups: dict[str, argparse._ActionsContainer] = {"": command}
    for flag, options in arguments:
        group = options.get("group", "")
        if group not in groups:
            one = group.startswith("one ")
            groups[group] = command.add_mutually_exclusive_group() if one else command.add_argument_group(group)
        groups[group].add_argument(flag, **{name: value for name, value in options.items() if name != "group"})


def one_of(dest: str, **flags: tuple[str, str]) -> list[Argument]:
    """Describe arguments of which one may be given: the value of each, its name and its help text."""
    more: dict[str, Any] = {"dest": dest, "action": "store_const", "group": f"one {dest}"}
    return [arg(flag, text, const=value, **more) for value, (flag, text) in flags.items()]


def number(kind: Callable[[str], Any], low: float, high: float, what: str) -> Callable[[str], Any]:
    """Return what reads a number in a range; errors say what it must be."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


natural = number(int, 0, math.inf, "a whole number from 0 on")
positive = number(int, 1, math.inf, "a whole number from 1 on")
percent = number(float, 0, 100, "an accuracy in percent, such as 80")
share = number(float, sys.float_info.min, 1, "a share, such as 0.2 (above 0, at most 1)")
inches = number(float, 1, 20, "a number of inches from 1 to 20")


def names(text: str) -> list[str]:
    """Read names, separated by commas."""
    if found := [part.strip() for part in text.split(",") if part.strip()]:
        return found
    raise argparse.ArgumentTypeError(f"{text!r} names nothing; give names with commas between them, such as a,b")


def numbers(text: str) -> list[int]:
    """Read whole numbers from 0, separated by commas."""
    return [natural(part.strip()) for part in text.split(",")]


def declared(cls: type[Options], *wanted: str, group: str = "", **defaults: Any) -> list[Argument]:
    """Return the arguments of options, as their class declares them.

    ``**defaults``: Defaults of the command line that are not those of the class.
    """
    found = []
    for name in wanted:
        field, hint, flag = options_of(cls)[name], annotations_of(cls)[name], f"--{name.replace('_', '-')}"
        text, default, metavar = field.metadata["doc"], defaults.get(name, field.default), name.split("_")[-1].upper()
        text += f" (default: {default})" if name in defaults and not default else ""
        if hint is bool:
            found.append(switch(flag, text, group=group))
        elif get_origin(hint) is tuple:
            found.append(several(flag, text, "FILE", group=group))
        elif get_origin(hint) is Literal:
            found.append(arg(flag, text, default=default, choices=get_args(hint), group=group))
        else:
            kind = None if hint is not int else positive if field.metadata["low"] else natural
            found.append(arg(flag, text, kind, metavar, default=default, group=group))
    return found


def settings(example: str) -> Argument:
    """Return ``--set``."""
    return several("--set", f"change an option, such as {example}", "SECTION.OPTION=VALUE", dest="settings")


def grid(example: str) -> Argument:
    """Return ``--grid``."""
    return several("--grid", f"try several values of an option, such as {example}", "METHOD.OPTION=A,B")


QUIET = switch("--quiet", "show no progress")
PROFILE = switch("--profile", "show at the end how the time was spent")
DATA, USE, CODE = declared(Machine, "data_dir"), declared(Machine, "use"), declared(Machine, "allow_code", "use")
DEVICE = declared(Machine, "device", "threads", "stack", "compile")
MACHINE = [
    *declared(Machine, "workers", "executor", "address", "data_dir", "allow_code", "use", group="machine", workers=0),
    QUIET,
]
RECIPE = "a recipe's name, or a path to a .toml file"
CHANGES = [
    settings("training.lr=0.05 or algorithm.teachers=3"),
    arg(
        "--methods",
        "methods to run instead of the recipe's; a label as the recipe writes it, such as FedSeq, is one row, a "
        "method's name, such as fedseq, each of its rows",
        names,
        "A,B",
    ),
    arg("--seeds", "seeds to run instead of the recipe's", numbers, "0,1"),
    arg("--rounds", "rounds to run instead of the recipe's", positive),
]
