"""Live progress of a run: a bar for each cell at work and one for all, or plain lines where nobody watches."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedkeep.experiment.run import Progress as Step


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
    """Shows steps as they come; a context manager.

    On a terminal: bars with rounds, the last accuracy and the time left. Elsewhere (a file, a CI log): a line now and
    then.
    """

    def __init__(self, console: Console, cells: dict[str, int]) -> None:
        self.console = console
        self.cells = cells  # cell name to its rounds
        self.live = console.is_terminal
        self.bars = bars(console, shown=self.live)
        self.done = dict.fromkeys(cells, 0)
        self.tasks: dict[str, TaskID] = {}
        self.all = self.bars.add_task("all rounds", total=sum(cells.values()), note="")
        self.said = time.monotonic()
        self.began: float | None = None  # the first step; before it processes start, which says nothing about the pace
        self.started_with = 0

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def __call__(self, step: Step) -> None:
        """Take notice of one step."""
        self.began = time.monotonic() if self.began is None else self.began
        if step.cell not in self.tasks:
            self.tasks[step.cell] = self.bars.add_task(step.cell, total=step.rounds, note="")
            self.started_with += step.done  # nor does what a resumed cell had done before
        self.done[step.cell] = step.done
        note = "" if step.record is None else f"accuracy {sum(step.record['correct']) / step.test_total:.3f}"
        note = "  ".join(part for part in (note, step.doing) if part)
        self.bars.update(self.tasks[step.cell], completed=step.done, note=note, visible=step.done < step.rounds)
        self.bars.update(self.all, completed=sum(self.done.values()))
        if not self.live and (step.done == step.rounds or time.monotonic() - self.said > 15):
            self._say(step, note)

    def _say(self, step: Step, note: str) -> None:
        self.said = time.monotonic()
        done, total = sum(self.done.values()), sum(self.cells.values())
        fresh = done - self.started_with
        took = self.said - (self.began or self.said)
        rest = f", about {took * (total - done) / fresh:.0f} s left" if fresh > 0.03 * total else ""
        self.console.print(
            f"{step.cell}: round {step.done}/{step.rounds}  {note}  ({done}/{total} rounds in all{rest})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
