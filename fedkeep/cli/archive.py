"""``fedkeep archive`` and ``fedkeep verify``: records in a compressed file, and files that are whole."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rich.console import Console

from fedkeep.cli.text import say
from fedkeep.errors import RunError
from fedkeep.experiment.paths import ARCHIVE_SUFFIX
from fedkeep.experiment.reproduce import NOTE
from fedkeep.reporting.archive import open_run, write_archive
from fedkeep.reporting.run_folder import read_run, verify_run


def archive(options: Namespace, console: Console) -> int:
    """Write the records of a run, or of all columns of a reproduction, into a compressed file."""
    source, out = Path(options.run), Path(options.out)
    name, of_several = source.resolve().name, out.suffix == ARCHIVE_SUFFIX
    target = out if of_several else out / f"{name}{ARCHIVE_SUFFIX}"
    further: dict[str, bytes] = {}
    if (source / "run.json").is_file():
        if of_several and (open_run(target) / NOTE).is_file():
            raise RunError(
                f"{target} is the archive of a reproduction, and a run would become one of its columns. Choose another "
                "--out."
            )
        runs = {name if of_several else "": source}
    elif (source / NOTE).is_file():
        if of_several:
            raise RunError(f"a reproduction is an archive of its own. Name its folder: --out {out.parent}")
        runs = {path.parent.name: path.parent for path in source.glob("*/run.json")}
        further = {NOTE: (source / NOTE).read_bytes()}
    else:
        raise RunError(f"{source} is neither a run folder nor a reproduction: it holds no run.json and no {NOTE}.")
    for run in runs.values():
        read_run(run)  # raises an error for a damaged file: an archive holds nothing that was not checked
    say(console, f"wrote {write_archive(runs, target, further)}")
    return 0


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
