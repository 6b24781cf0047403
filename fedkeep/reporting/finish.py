"""What stands in a run folder at the end: the results as CSV, the table as Markdown, the report as HTML."""

from __future__ import annotations

from pathlib import Path

from fedkeep._utils.files import atomic_write
from fedkeep.reporting.html import write_report
from fedkeep.reporting.run_folder import Run, read_run
from fedkeep.reporting.table import cells_csv, markdown, summary


def is_reported(run_path: str | Path) -> bool:
    """Tell whether `finish` came to its end after the last of a run's cells was finished."""
    folder = Path(run_path)
    last = folder / "report.html"  # of what it writes
    results = [file.stat().st_mtime_ns for file in folder.glob("trials/*/result.json")]
    return last.is_file() and last.stat().st_mtime_ns >= max(results, default=0)


def finish(run_path: str | Path) -> Run:
    """Write results.csv, table.md and report.html into a run folder, each whole or not at all, and return the run.

    An unfinished run gets them too, with its unfinished cells marked; calling it again replaces them.

    Raises
    ------
    RunError
        If `run_path` is no run folder or is damaged.
    """
    run = read_run(run_path)
    rows = summary(run)
    atomic_write(run.path / "results.csv", cells_csv(rows))
    atomic_write(run.path / "table.md", markdown(rows))
    write_report(run, run.path / "report.html")
    return run
