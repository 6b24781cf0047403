"""Where the time of a run went, a line per method."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.trial import TrialResult

if TYPE_CHECKING:
    from rich.table import Table

PARTS = {
    "training": "train",
    "teachers": "teachers",
    "server": "server",
    "evaluation": "evaluate",
    "saving": "checkpoint",
}


def shares(trial: TrialResult) -> dict[str, float]:
    """Return the seconds of each part of a trial, of everything else, and of the whole.

    The server's is its half of the method: fusion, and choosing teachers. Everything else is messages and books.
    Training and teachers are summed over worker processes, which may together take longer than the whole; then
    everything else is 0.
    """
    parts = {name: trial.seconds(key) for name, key in PARTS.items()}
    whole = trial.seconds("round_seconds") + parts["saving"]
    return parts | {"the rest": max(whole - sum(parts.values()), 0.0), "whole": whole}


def profile_table(run: Run) -> Table:
    """Return a table for a terminal, a line per part: seconds by method, summed over seeds, and shares of the whole."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    totals: dict[str, dict[str, float]] = {}
    for trial in {trial.path: trial for trial in reversed(run.trials)}.values():  # averages took none
        sums = totals.setdefault(trial.label, {})
        for name, seconds in shares(trial).items():
            sums[name] = sums.get(name, 0.0) + seconds
    table = Table("seconds", title="where the time went", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    labels = [label for label in run.labels if label in totals]
    for label in labels:
        table.add_column(escape(label), justify="right")
    for part in (*PARTS, "the rest", "whole"):
        table.add_row(part, *(_text(totals[label], part) for label in labels))
    return table


def step_table(run: Run) -> Table:
    """Return a table for a terminal: the seconds of each step and of the server, summed over seeds, a column per task.

    A step is what a method asks of clients, by the name that it has there; its seconds are those in which its reply was
    waited for, summed over clients. Its training and teachers are in it, and in `profile_table` too. The server's half
    also draws images, where a method has any drawn.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    trials = list({trial.path: trial for trial in reversed(run.trials)}.values())
    tasks = max((len(trial.task_seconds("server")) for trial in trials), default=0)
    table = Table("seconds", "step", title="by task", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for task in range(1, tasks + 1):
        table.add_column(f"task {task}", justify="right")
    for label in run.labels:
        ours = [trial for trial in trials if trial.label == label]
        parts = dict.fromkeys(f"step {step}" for trial in ours for step in trial.steps)
        for part in (*parts, "server"):
            sums = map(sum, zip_longest(*(trial.task_seconds(part) for trial in ours), fillvalue=0.0))
            table.add_row(escape(label), part.removeprefix("step "), *(f"{seconds:.1f}" for seconds in sums))
    return table


def _text(total: dict[str, float], part: str) -> str:
    share = "" if part == "whole" else f" {100 * total[part] / (total['whole'] or 1.0):3.0f} %"
    return f"{total[part]:.1f}{share}"
