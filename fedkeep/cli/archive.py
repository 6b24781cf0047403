"""``fedkeep archive``: write the records of runs into compressed files."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

from rich.console import Console

from fedkeep._utils.files import atomic_write
from fedkeep.cli.text import say
from fedkeep.errors import RunError
from fedkeep.experiment.paths import ARCHIVE_SUFFIX
from fedkeep.experiment.reproduce import NOTE
from fedkeep.reporting.archive import write_archive
from fedkeep.reporting.comparison import read_reproduction
from fedkeep.reporting.reproduction import markdown
from fedkeep.reporting.run_folder import read_run


def archive(options: Namespace, console: Console) -> int:
    """Write the records of a run, or of each column of a reproduction, into compressed files.

    Parameters
    ----------
    options : Namespace
        The command's arguments.
    console : Console
        Where to print.

    Returns
    -------
    int
        The exit code.
    """
    source, out = Path(options.run), Path(options.out)
    for run in sorted(path.parent for path in (source / "run.json", *source.glob("*/run.json")) if path.is_file()):
        read_run(run)  # raises an error for a damaged file: an archive holds nothing that was not checked
    if (source / "run.json").is_file():
        written = [write_archive(source, out / f"{source.resolve().name}{ARCHIVE_SUFFIX}")]
    elif (source / NOTE).is_file():
        written = _reproduction(source, out / source.resolve().name)
    else:
        raise RunError(f"{source} is neither a run folder nor a reproduction: it holds no run.json and no {NOTE}.")
    for path in written:
        say(console, f"wrote {path}")
    return 0


def _reproduction(source: Path, out: Path) -> list[Path]:
    """Write an archive of each column, the table, and the notes that somebody wrote about it."""
    note = {NOTE: (source / NOTE).read_bytes()}
    columns = sorted(path.parent for path in source.glob("*/run.json"))
    written = [write_archive(column, out / f"{column.name}{ARCHIVE_SUFFIX}", note) for column in columns]
    if (source / "notes.md").is_file():
        shutil.copyfile(source / "notes.md", out / "notes.md")
    written.append(atomic_write(out / "table.md", markdown(read_reproduction(out), level=1)))
    return written
