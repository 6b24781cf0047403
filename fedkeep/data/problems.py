"""Problems of a data set, collected so that one error tells all of them, with the lines of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fedkeep.errors import DataError

SINGLE_LABEL = "FedKeep does single-label classification only: one class for each example, an integer or a text."
_SHOWN = 5


@dataclass(frozen=True)
class Where:
    """What errors call a split; with `line`, the line of a file on which a row stands."""

    name: str
    line: Callable[[int], str] | None = None

    def __str__(self) -> str:
        return self.name


def at(where: Where | str, rows: Sequence[int]) -> str:
    """Return the places of rows in words: the first few, and how many more."""
    line = where.line if isinstance(where, Where) else None
    shown = [f"row {row}" if line is None else line(int(row)) for row in rows[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else "")


@dataclass
class Problems:
    """Errors about one data set, raised as one; and notes on what was changed."""

    found: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep a `DataError` for later."""
        try:
            yield
        except DataError as error:
            self.found.append(str(error))

    def check(self, where: Where | str) -> None:
        """Raise all that was collected, if anything was; what collects that error has each problem once."""
        found, self.found = list(dict.fromkeys(self.found)), []
        if len(found) == 1:
            raise DataError(found[0])
        if found:
            listed = "".join(f"\n- {one.removeprefix(f'{where}: ')}" for one in found)
            raise DataError(f"{where}: {len(found)} problems.{listed}")
