"""``fedkeep verify``: check that the files of runs are whole, and belong to their runs."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console

from fedkeep.cli.text import say
from fedkeep.reporting.verification import verify_run


def verify(options: Namespace, console: Console) -> int:
    """Check every file of some runs, and print a line for each trial.

    Returns: The exit code: 1 if a file is damaged or foreign.
    """
    wrong = False
    for run in options.runs:
        say(console, run, "bold")
        for found in verify_run(run):
            is_wrong = found.status in ("damaged", "foreign")
            say(console, f"  {found.name}: {found.status}: {'; '.join(found.details)}", "red" if is_wrong else "")
            wrong |= is_wrong
    return int(wrong)
