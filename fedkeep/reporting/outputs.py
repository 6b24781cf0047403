"""What is written of a run: the results as CSV, the table as Markdown, the report as HTML."""

from __future__ import annotations

from pathlib import Path

from fedkeep._utils.files import atomic_write
from fedkeep.experiment.paths import ARCHIVE_SUFFIX, TRIALS
from fedkeep.reporting.formats import markdown, trials_csv
from fedkeep.reporting.html import write_report
from fedkeep.reporting.run_folder import Run, read_run
from fedkeep.reporting.summary import summary

REPORT = "report.html"


def is_reported(folder: str | Path) -> bool:
    """Tell whether `write_all` came to its end after the last trial of a run folder was finished."""
    last = Path(folder) / REPORT  # of what it writes
    results = [file.stat().st_mtime_ns for file in Path(folder).glob(f"{TRIALS}/*/result.json")]
    return last.is_file() and last.stat().st_mtime_ns >= max(results, default=0)


def write_all(path: str | Path, out: str | Path | None = None) -> Run:
    """Write results.csv, table.md and report.html of a run, each whole or not at all, and return the run.

    An unfinished run gets them too, with its unfinished trials marked; calling it again replaces them.

    ``path``: A run folder, an archive of one, or a folder in an archive.
    ``out``: The folder to write into: by default the run folder, and `default_out` of an archive.
    """
    run = read_run(path)
    rows = summary(run)
    folder = Path(out) if out is not None else default_out(run.path)
    atomic_write(folder / "results.csv", trials_csv(rows))
    atomic_write(folder / "table.md", markdown(rows))
    write_report(run, folder / REPORT)
    return run


def default_out(path: Path) -> Path:
    """Return where a run's report is written: into its folder, or, of an archive, into one of its own under runs/."""
    return path if path.is_dir() else Path("runs") / f"report-{path.name.removesuffix(ARCHIVE_SUFFIX)}"
