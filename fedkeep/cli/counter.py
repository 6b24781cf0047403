"""Progress of one long job: a bar with the time left, or a line now and then where nobody watches."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console

from fedkeep.cli.progress import bars

_EVERY = 15.0  # seconds from line to line


class Counter:
    """Shows how much is done; a context manager.

    Parameters
    ----------
    what : is counted, such as ``"steps"``.
    quiet : show nothing.
    """

    def __init__(self, console: Console, what: str, quiet: bool = False) -> None:
        self.console, self.what, self.quiet = console, what, quiet
        self.bars = bars(console, shown=console.is_terminal and not quiet)
        self.bar = self.bars.add_task(what, total=None, note="")
        self.began = self.said = time.monotonic()
        self.first: int | None = None  # what was done before the first call says nothing about the pace

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Take notice of what is done."""
        now = time.monotonic()
        if self.first is None:
            self.first, self.began = done, now
        self.bars.update(self.bar, completed=done, total=total, note=note)
        if self.quiet or self.console.is_terminal or (done < total and now - self.said < _EVERY):
            return
        self.said = now
        fresh = done - self.first
        left = f", about {(now - self.began) * (total - done) / fresh:.0f} s left" if fresh and done < total else ""
        self.console.print(f"{done}/{total} {self.what}  {note}{left}", highlight=False, markup=False, soft_wrap=True)
