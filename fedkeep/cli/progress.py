"""A counter of steps on the console, and what is said of a run that was stopped."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console

from fedkeep._utils.signals import Terminated
from fedkeep.cli.text import say
from fedkeep.display import LINE_SECONDS, duration, progress_bars


def say_stopped(stop: KeyboardInterrupt | Terminated, command: str, console: Console) -> int:
    """Say that a run was stopped and how it goes on, and return the exit code.

    ``console``: Where to print. It may be a terminal that was closed.
    Returns: The exit code: 128 plus the number of the signal that stopped it.
    """
    by, code = (f" by {stop.signal}", int(stop.code or 1)) if isinstance(stop, Terminated) else ("", 130)
    with suppress(OSError):
        text = (
            f"\nstopped{by}; finished rounds are saved; the round that was going begins again. Continue with: {command}"
        )
        say(console, text)
    return code


class Counter:
    """Shows how many steps of a task are done; a context manager.

    ``unit``: What is counted, such as ``"steps"``.
    """

    def __init__(self, console: Console, unit: str, quiet: bool = False) -> None:
        self.console, self.unit, self.quiet = console, unit, quiet
        self.bars = progress_bars(console, shown=console.is_terminal and not quiet)
        self.bar = self.bars.add_task(unit, total=None, note="")
        self.began = self.printed = time.monotonic()
        self.first: int | None = None  # what a resumed task had done before is not part of the pace

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show how much is done.

        ``total``: The number of all steps.
        ``note``: A short text beside the numbers.
        """
        now = time.monotonic()
        if self.first is None:
            self.first, self.began = done, now
        self.bars.update(self.bar, completed=done, total=total, note=note)
        if self.quiet or self.console.is_terminal or (done < total and now - self.printed < LINE_SECONDS):
            return
        self.printed = now
        fresh = done - self.first
        seconds = (now - self.began) * (total - done) / fresh if fresh else 0
        left = f", about {duration(seconds)} left" if fresh and done < total else ""
        say(self.console, f"{done}/{total} {self.unit}  {note}{left}")
