"""``fedkeep reproduce``: reproduce a paper's table and compare it with the paper's numbers."""

import shlex
import sys
from argparse import Namespace
from pathlib import Path

from rich.console import Console

from fedkeep._utils.files import atomic_write
from fedkeep.cli.dry_run import dry_run
from fedkeep.cli.run import machine_of, run_with_progress
from fedkeep.cli.text import say
from fedkeep.errors import ConfigError
from fedkeep.experiment import reproduce as plan
from fedkeep.experiment.provenance import ARCHIVE_SUFFIX, is_finished, trial_folder
from fedkeep.reporting import reproduction as report
from fedkeep.reporting.html import write_all
from fedkeep.reporting.run_folder import open_run


def reproduce(options: Namespace, console: Console) -> int:
    """Reproduce the requested part of a paper's table, and show it beside the paper's numbers."""
    machine = machine_of(options)
    root = Path(options.out)
    if options.table is None:
        if options.page:
            return _page(root, options.page, console)
        raise ConfigError("name a table, such as sfedkd/table1. The tables are listed by: fedkeep recipes")
    table, recipes = plan.find_table(options.table)
    folder = root / (table.replace("/", "-") + ("" if options.rounds == 1 else f"-rounds-{options.rounds:g}"))
    changes = {name: getattr(options, name) for name in ("methods", "seeds", "settings", "grid", "allow_code")}
    requested = plan.select_columns(table, recipes, folder, options.columns or (), options.rounds, **changes)
    report.check_measured([column.recipe.paper for column in requested])
    if options.dry_run:
        done = {
            (column.name, method.label, seed)
            for column in requested
            for method in column.recipe.methods
            for seed in column.recipe.seeds
            if is_finished(trial_folder(column.folder, method, seed))
        }
        return dry_run({column.name: column.recipe for column in requested}, machine, console, done)
    plan.write_note(folder, table)
    command = ["fedkeep", *sys.argv[1:]]
    trials = [trial for column in requested for trial in plan.prepare(column, machine, command)]
    say(console, f"{len(trials)} trial{'s' * (len(trials) != 1)} to run, into {folder}")
    if trials and (stop := run_with_progress(trials, console, shlex.join(command), quiet=options.quiet)):
        return stop
    for begun in sorted(folder.glob("*/run.json")):
        write_all(begun.parent)
    reproduction = report.read_reproduction(folder)
    written = report.write(reproduction, folder)
    for column in reproduction.columns:
        console.print(report.column_table(column).terminal(column.run.title, width=8))
    say(console, f"\nwrote {written}")
    return _page(root, options.page, console) if options.page else 0


def _page(root: Path, target: str, console: Console) -> int:
    """Write one page of all reproductions under a folder."""
    found: dict[str, Path] = {}
    entries = root.iterdir() if root.is_dir() else ()
    for path in sorted(entries, key=lambda path: path.name.removesuffix(ARCHIVE_SUFFIX)):
        if (path.is_dir() or path.suffix == ARCHIVE_SUFFIX) and (open_run(path) / plan.NOTE).is_file():
            name = path.name.removesuffix(ARCHIVE_SUFFIX)
            if name in found:
                raise ConfigError(f"{root} holds {name!r} as a folder and as an archive. Remove one of them.")
            found[name] = path
    if not found:
        raise ConfigError(f"there is no reproduction in {root}. Begin: fedkeep reproduce sfedkd/table1 --out {root}")
    notes = report.read_notes(root, found, Path(target).parent)
    command = shlex.join(["fedkeep", "reproduce", "--out", str(root), "--page", target])
    reproductions = [(report.read_reproduction(path), notes.get(name, "")) for name, path in found.items()]
    atomic_write(Path(target), report.overview(reproductions, command))
    say(console, f"wrote {target}")
    return 0
