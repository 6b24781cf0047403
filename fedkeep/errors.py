"""What goes wrong, said so that the reader knows what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedKeepError(Exception):
    """Base of every error that FedKeep raises on purpose: what happened, what was expected, what to do."""


class ConfigError(FedKeepError, ValueError):
    """A recipe, an option or a command that cannot be carried out as written."""


class DataError(FedKeepError, ValueError):
    """A data set that is missing, unreadable or not what the recipe says."""


class PartitionError(FedKeepError, ValueError):
    """A partition that its scheme and settings cannot produce."""


class ValueRefused(FedKeepError, ValueError):
    """A value that the border does not let through: wrong names, shapes, types, or not finite."""


class RunError(FedKeepError, RuntimeError):
    """A run folder or a running experiment in a state that does not allow what was asked."""


class MissingExtra(FedKeepError, ImportError):
    """An optional package is not installed; the message holds the install line."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs packages that are not installed. Install them: pip install 'fedkeep[{extra}]'")


def in_one_line(text: object, most: int = 1000) -> str:
    """Return what somebody else said as one line of printable characters, which can forge nothing in a log."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:most])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'? Known: a, b, c."``, the nearest first, for the end of an error."""
    known = sorted(known)
    return f"{nearest(name, known)} Known: {', '.join(known)}." if known else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"``, for the end of an error where too much is known to be listed."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
