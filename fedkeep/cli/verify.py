"""``fedkeep verify``: check the files of runs against their digests."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console

from fedkeep.cli.text import say
from fedkeep.reporting.verification import verify_run


def verify(options: Namespace, console: Console) -> int:
    """Check every file of some runs, and print a line for each trial.

    Returns: The exit code: 1 if a file is damaged.
    """
    damaged = False
    for run in options.runs:
        say(console, run, "bold")
        for found in verify_run(run):
            damaged |= found.status == "damaged"
            style = "red" if found.status == "damaged" else ""
            line = f"  {found.name}: {found.status}: {' '.join(found.details)}"
            say(console, line, style)
    return int(damaged)
