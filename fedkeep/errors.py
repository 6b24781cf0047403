"""The exceptions that FedKeep raises on purpose, and helpers for their messages."""

import difflib
import importlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires
from typing import Any


class FedKeepError(Exception):
    """Base class of all exceptions that FedKeep raises on purpose.

    Messages say what happened, what was expected and what to do.
    """


class ConfigError(FedKeepError, ValueError):
    """A recipe, an option or a command is not valid.

    ``problems``: What is wrong. Several are told together, a line each.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        one, listed = len(self.problems) == 1, "".join(f"\n- {problem}" for problem in self.problems)
        super().__init__(self.problems[0] if one else f"{len(self.problems)} problems.{listed}")

    def within(self, where: str) -> "ConfigError":
        """Return the error with the part that each problem is in; empty: as it is."""
        return ConfigError(*(f"{where}: {problem}" for problem in self.problems)) if where else self


class DataError(FedKeepError, ValueError):
    """A data set is missing, unreadable or not what the recipe says."""


class DataNotFound(DataError):
    """A data set is neither here nor to be had from the Hub; the message quotes none of it."""


class PartitionError(FedKeepError, ValueError):
    """A partition scheme cannot produce a partition with its settings."""


class ValueRefused(FedKeepError, ValueError):
    """A received value was refused: wrong names, shapes or types, or numbers that are not finite."""


class RunError(FedKeepError, RuntimeError):
    """A run folder or a running experiment is in a state that does not allow the requested operation."""


class MissingExtra(FedKeepError, ImportError):
    """Optional packages are not installed; the message contains the command that installs them.

    Parameters
    ----------
    what : str
        What needs the package, at the beginning of a sentence.
    extra : str
        The extra of FedKeep that installs it.
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs packages that are not installed. Install them: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, however FedKeep itself was installed.

    Parameters
    ----------
    extra : str
        The extra of FedKeep.

    Returns
    -------
    str
        The command, such as ``pip install 'pillow>=10.3'``, for a shell.
    """
    try:
        wanted = [line.partition(";") for line in requires("fedkeep") or ()]
    except PackageNotFoundError:  # the source alone is on the import path
        wanted = []
    packages = [
        f"'{name.strip()}'"
        for name, _, when in wanted
        if f"extra=='{extra}'" in re.sub(r"\s", "", when).replace('"', "'")
    ]
    return f"pip install {' '.join(packages) or repr(f'.[{extra}]') + ' (in the folder of the source)'}"


@contextmanager
def collect(problems: list[str]) -> Iterator[None]:
    """Add what a `ConfigError` says to problems that are told together."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def refuse(problems: Iterable[str]) -> None:
    """Raise `ConfigError` with all problems, if there is one."""
    if found := list(problems):
        raise ConfigError(*found)


def in_one_line(text: object, most: int = 1000) -> str:
    """Make text from an untrusted source safe for logs: one line of printable characters.

    Parameters
    ----------
    text : object
        The text.
    most : int
        Number of characters after which it is cut.

    Returns
    -------
    str
        The text, with a space for each character that is not printable.
    """
    return "".join(c if c.isprintable() else " " for c in str(text)[:most])


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; its kind if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the nearest known name, and all known names.

    Parameters
    ----------
    name : str
        The unknown name.
    known : Iterable[str]
        The known names.

    Returns
    -------
    str
        Such as ``" Did you mean 'x'? Known: x, y, z."``; empty if no name is known.
    """
    known = sorted(set(known))
    return f"{nearest(name, known)} Known: {', '.join(known)}." if known else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the nearest known name only.

    Parameters
    ----------
    name : str
        The unknown name.
    known : Iterable[str]
        The known names.

    Returns
    -------
    str
        Such as ``" Did you mean 'x'?"``; empty if no known name is similar.
    """
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def require_optional(module: str, what: str, extra: str) -> Any:
    """Import an optional module, with telemetry of the Hugging Face libraries turned off.

    ``what``: What needs it, for the error message.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DISABLE_TELEMETRY", "1")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(what, extra) from error
    if hasattr(found, "__path__") and not getattr(found, "__file__", None):  # a folder, such as W&B's own of its runs
        raise MissingExtra(what, extra)
    return found
