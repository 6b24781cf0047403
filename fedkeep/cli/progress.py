"""Progress on the console: bars on a terminal, or a line every few seconds elsewhere, such as in a log file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from fedkeep._utils.signals import Terminated
from fedkeep.cli.text import say
from fedkeep.experiment.runtime import Progress as Report

LINE_SECONDS = 15.0
"""Seconds between two lines where there is no terminal."""


def progress_bars(console: Console, shown: bool) -> Progress:
    """Return progress bars with a note and the time left, not started yet."""
    whole = Column(no_wrap=True)  # on a narrow terminal the words are cut, and the numbers are not
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="ellipsis")),
        BarColumn(bar_width=24),
        MofNCompleteColumn(table_column=whole),
        TextColumn("{task.fields[note]}", markup=False, table_column=Column(overflow="ellipsis")),
        TimeRemainingColumn(elapsed_when_finished=True, table_column=whole.copy()),
        console=console,
        disable=not shown,
    )


class Display:
    """Shows the progress of a run's trials; a context manager.

    A terminal shows bars with rounds, the last accuracy and the time left. Elsewhere, such as in a file, a line is
    printed every few seconds.
    """

    def __init__(self, console: Console, trials: dict[str, int]) -> None:
        self.console = console
        self.trials = trials
        self.live = console.is_terminal
        self.bars = progress_bars(console, shown=self.live)
        self.done = dict.fromkeys(trials, 0)
        self.tasks: dict[str, TaskID] = {}
        self.all = self.bars.add_task("all rounds", total=sum(trials.values()), note="")
        self.printed = time.monotonic()
        self.began: float | None = None  # time of the first report: starting processes is not part of the pace
        self.resumed_rounds = 0  # rounds that resumed trials had finished before

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # the terminal may be closed
            self.bars.stop()

    def __call__(self, report: Report) -> None:
        """Show one report.

        ``report``: How far one trial is.
        """
        self.began = time.monotonic() if self.began is None else self.began
        if report.trial not in self.tasks:
            self.tasks[report.trial] = self.bars.add_task(report.trial, total=report.rounds, note="")
            self.resumed_rounds += report.done
        self.done[report.trial] = report.done
        note = "  ".join(part for part in (*_learning(report), report.activity) if part)
        self.bars.update(
            self.tasks[report.trial], completed=report.done, note=note, visible=report.done < report.rounds
        )
        self.bars.update(self.all, completed=sum(self.done.values()))
        if not self.live and (report.done == report.rounds or time.monotonic() - self.printed > LINE_SECONDS):
            self._print(report, note)

    def _print(self, report: Report, note: str) -> None:
        self.printed = time.monotonic()
        done, total = sum(self.done.values()), sum(self.trials.values())
        fresh = done - self.resumed_rounds
        elapsed = self.printed - (self.began or self.printed)
        left = f", about {elapsed * (total - done) / fresh:.0f} s left" if fresh > 0.03 * total else ""
        say(
            self.console,
            f"{report.trial}: round {report.done}/{report.rounds}  {note}  ({done}/{total} rounds in all{left})",
        )


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


def _learning(report: Report) -> Iterator[str]:
    """Yield the last accuracy, and what says that nothing is learned; any trial may guess in its first quarter."""
    if report.record is not None:
        guesses = " (at chance)" if report.at_chance and 4 * report.done >= report.rounds else ""
        yield f"accuracy {sum(report.record['correct']) / report.test_total:.3f}{guesses}"
    if report.not_finite:
        yield f"{report.not_finite:,} local trainings not finite: lower training.lr"


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
        left = f", about {(now - self.began) * (total - done) / fresh:.0f} s left" if fresh and done < total else ""
        say(self.console, f"{done}/{total} {self.unit}  {note}{left}")
