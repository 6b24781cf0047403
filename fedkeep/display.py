"""Progress of a run: bars in a terminal, a line every few seconds in a log, a text that changes in a notebook."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from html import escape
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from fedkeep._utils.escaping import printable
from fedkeep.experiment.runtime import Progress as Report

LINE_SECONDS = 15.0
"""Seconds between two lines where there is no terminal."""


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook: of Jupyter or what is built on it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class Display:
    """Shows how far the trials of a run are, and for how long they will go on; a context manager.

    ``trials``: The number of rounds of each trial, by its name; others may come.
    ``unit``: What is counted.
    """

    def __init__(
        self, console: Console, trials: Mapping[str, int], *, unit: str = "round", quiet: bool = False
    ) -> None:
        self.console, self.trials, self.unit, self.quiet = console, dict(trials), unit, quiet
        self.notebook = NotebookText() if in_notebook() else None
        self.live = console.is_terminal and self.notebook is None and not quiet
        whole = Column(no_wrap=True)  # on a narrow terminal the words are cut, and the numbers are not
        self.bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(overflow="ellipsis")),
            BarColumn(bar_width=24),
            MofNCompleteColumn(table_column=whole),
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(overflow="ellipsis")),
            TimeRemainingColumn(elapsed_when_finished=True, table_column=whole.copy()),
            console=console,
            disable=not self.live,
            speed_estimate_period=600,  # seconds; a round may take minutes
        )
        self.tasks: dict[str, TaskID] = {}
        self.all = self.bars.add_task(f"all {unit}s", total=sum(self.trials.values()), note="")
        self.printed = time.monotonic()
        self.began: float | None = None  # time of the first report: starting processes is not part of the pace
        self.earlier = 0.0  # rounds that were done before then

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # the terminal may be closed
            self.bars.stop()

    def count(self, done: int, total: int, note: str = "") -> None:
        """Show how far a single task is that is no trial."""
        self(Report(f"{self.unit}s", done, total, None, activity=note))

    def __call__(self, report: Report) -> None:
        """Show how far one trial is."""
        if self.quiet:
            return
        now, done = time.monotonic(), report.done + report.share
        self.trials[report.trial] = report.rounds
        if report.trial not in self.tasks:
            self.tasks[report.trial] = self.bars.add_task(printable(report.trial), total=report.rounds, note="")
            # A trial that is first heard of after a round has just done this one, unless nothing was heard before.
            fresh = report.share if report.activity else 1
            self.earlier += done - (fresh if self.began is not None else 0)
            self.began = now if self.began is None else self.began
        note = "  ".join(part for part in (*_learning(report), report.activity) if part)
        total, single = sum(self.trials.values()), len(self.trials) == 1
        shown = report.done < report.rounds and not single
        self.bars.update(self.tasks[report.trial], completed=done, note=note, visible=shown)
        self.bars.update(self.all, completed=self._done(), total=total, note=note if single else "")
        line = f"{report.trial}: {self.unit} {report.done}/{report.rounds}  {note}"
        if self.notebook is not None:
            left = self._left(now) if report.done < report.rounds else ""  # a finished trial's line stays as it is
            self.notebook.show(report.trial, line + left)
        elif not self.live and (report.done == report.rounds or now - self.printed > LINE_SECONDS):
            self.printed = now
            text = f"{line}  ({int(self._done())}/{total} {self.unit}s in all{self._left(now)})"
            self.console.print(Text(printable(text)), soft_wrap=True)

    def _done(self) -> float:
        return sum(task.completed for task in self.bars.tasks if task.id != self.all)

    def _left(self, now: float) -> str:
        """Return the time that is left at the pace so far, after a comma; empty before anything was done."""
        done, total = self._done(), sum(self.trials.values())
        fresh = done - self.earlier
        if self.began is None or fresh <= 0 or now - self.began < 1 or done >= total:
            return ""
        return f", about {duration((now - self.began) * (total - done) / fresh)} left"


class NotebookText:
    """A text under the cell of a notebook: a line for each trial, which is replaced."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}
        self._handle: Any = None

    def show(self, trial: str, line: str) -> None:
        """Replace the line of a trial."""
        self._lines[trial] = line
        text = "\n".join(self._lines.values())
        shown = {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def duration(seconds: float) -> str:
    """Return a time in about two digits and a unit, such as ``"50 s"``, ``"12 min"`` or ``"3.4 h"``."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _learning(report: Report) -> Iterator[str]:
    """Yield the last accuracy, and what says that nothing is learned; any trial may guess in its first quarter."""
    if report.record is not None and report.test_total:
        guesses = " (at chance)" if report.at_chance and 4 * report.done >= report.rounds else ""
        yield f"accuracy {sum(report.record['correct']) / report.test_total:.3f}{guesses}"
    if report.not_finite:
        yield f"{report.not_finite:,} local trainings not finite: lower training.lr"
