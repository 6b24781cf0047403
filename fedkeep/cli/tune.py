"""``fedkeep tune``: choose options on held-out training examples."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedkeep.cli.run import machine_of
from fedkeep.cli.text import say
from fedkeep.display import progress_bars
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.runtime import Progress
from fedkeep.tuning import best_recipes, table_of, tune


def run(options: Namespace, console: Console) -> int:
    """Run all points of a grid, and show the best."""
    machine = machine_of(options)
    import_user_code(machine.use)
    bars = progress_bars(console, console.is_terminal and not options.quiet)
    tasks = {}

    def show(report: Progress) -> None:
        if report.trial not in tasks:
            tasks[report.trial] = bars.add_task(report.trial, total=report.rounds, note="")
        bars.update(tasks[report.trial], completed=report.done, note=report.activity)

    try:
        with bars:
            tuning = tune(
                options.recipe,
                options.grid,
                methods=options.methods,
                seeds=options.seeds,
                rounds=options.rounds,
                validation=options.validation,
                settings=options.settings,
                metric=options.metric,
                search=options.search,
                reported_seeds=options.reported_seeds,
                out=options.out,
                machine=machine,
                on_progress=show,
            )
    except KeyboardInterrupt:
        console.print("\nstopped; finished rounds are saved. The same command with the same --out continues.")
        return 130
    table = Table("", "method", tuning.metric.title, "seeds", box=box.SIMPLE_HEAD, pad_edge=False)
    for verdict, label, value, seeds in table_of(tuning):
        table.add_row(verdict, escape(label), value, seeds, style="bold" if verdict else "")
    console.print(table)
    say(console, f"folder: {tuning.path}")
    for name in best_recipes(tuning):
        own = "".join(f" --use {shlex.quote(file)}" for file in options.use)
        command = f"fedkeep run {shlex.quote(str(Path(tuning.path) / name))}{own}"
        say(console, f"now with the reported seeds, on the test examples: {command}")
    sys.stdout.flush()
    return 0
