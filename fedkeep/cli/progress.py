"""Live progress: bars on a terminal, or a line now and then where nobody watches."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedkeep.experiment.runtime import Progress as Report

EVERY = 15.0
"""Seconds from line to line where nobody watches."""


def bars(console: Console, shown: bool) -> Progress:
    """Return bars with a note and the time left; they are drawn once they are started."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        disable=not shown,
    )


class Display:
    """Shows the progress of a run's trials; a context manager.

    On a terminal: bars with rounds, the last accuracy and the time left. Elsewhere (a file, a CI log): a line now and
    then.
    """

    def __init__(self, console: Console, trials: dict[str, int]) -> None:
        self.console = console
        self.trials = trials  # name to rounds
        self.live = console.is_terminal
        self.bars = bars(console, shown=self.live)
        self.done = dict.fromkeys(trials, 0)
        self.tasks: dict[str, TaskID] = {}
        self.all = self.bars.add_task("all rounds", total=sum(trials.values()), note="")
        self.printed = time.monotonic()
        self.began: float | None = (
            None  # the first report; before it processes start, which says nothing about the pace
        )
        self.started_with = 0

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def __call__(self, report: Report) -> None:
        """Take notice of one report."""
        self.began = time.monotonic() if self.began is None else self.began
        if report.trial not in self.tasks:
            self.tasks[report.trial] = self.bars.add_task(report.trial, total=report.rounds, note="")
            self.started_with += report.done  # nor does what a resumed trial had done before
        self.done[report.trial] = report.done
        note = "" if report.record is None else f"accuracy {sum(report.record['correct']) / report.test_total:.3f}"
        note = "  ".join(part for part in (note, report.activity) if part)
        self.bars.update(
            self.tasks[report.trial], completed=report.done, note=note, visible=report.done < report.rounds
        )
        self.bars.update(self.all, completed=sum(self.done.values()))
        if not self.live and (report.done == report.rounds or time.monotonic() - self.printed > EVERY):
            self._print(report, note)

    def _print(self, report: Report, note: str) -> None:
        self.printed = time.monotonic()
        done, total = sum(self.done.values()), sum(self.trials.values())
        fresh = done - self.started_with
        took = self.printed - (self.began or self.printed)
        rest = f", about {took * (total - done) / fresh:.0f} s left" if fresh > 0.03 * total else ""
        self.console.print(
            f"{report.trial}: round {report.done}/{report.rounds}  {note}  ({done}/{total} rounds in all{rest})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


class Counter:
    """Shows how much is done; a context manager.

    Parameters
    ----------
    console : Console
        Where to.
    what : str
        Is counted, such as ``"steps"``.
    quiet : bool
        Show nothing.
    """

    def __init__(self, console: Console, what: str, quiet: bool = False) -> None:
        self.console, self.what, self.quiet = console, what, quiet
        self.bars = bars(console, shown=console.is_terminal and not quiet)
        self.bar = self.bars.add_task(what, total=None, note="")
        self.began = self.printed = time.monotonic()
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
        if self.quiet or self.console.is_terminal or (done < total and now - self.printed < EVERY):
            return
        self.printed = now
        fresh = done - self.first
        left = f", about {(now - self.began) * (total - done) / fresh:.0f} s left" if fresh and done < total else ""
        self.console.print(f"{done}/{total} {self.what}  {note}{left}", highlight=False, markup=False, soft_wrap=True)
