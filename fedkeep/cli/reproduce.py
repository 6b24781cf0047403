"""``fedkeep reproduce``: reproduce a paper's table and compare it with the paper's numbers."""

from __future__ import annotations

import shlex
import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fedkeep._utils.files import atomic_write
from fedkeep.cli.dry_run import dry_run
from fedkeep.cli.run import machine_of, run_with_progress
from fedkeep.cli.text import plain_table, say
from fedkeep.errors import ConfigError
from fedkeep.experiment import reproduce as plan
from fedkeep.experiment.experiment import Trial
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.provenance import ARCHIVE_SUFFIX, is_finished, trial_folder
from fedkeep.experiment.runtime import Machine
from fedkeep.reporting import reproduction as report
from fedkeep.reporting.html import write_all
from fedkeep.reporting.reproduction import Reproduction, read_reproduction
from fedkeep.reporting.run_folder import open_run


def reproduce(options: Namespace, console: Console) -> int:
    """Reproduce the requested part of a paper's table, and show it beside the paper's numbers."""
    machine = machine_of(options)
    import_user_code(machine.use)
    root = Path(options.out)
    if options.table is None:
        if options.page:
            return _page(root, options.page, console)
        raise ConfigError("name a table, such as sfedkd/table1. The tables are listed by: fedkeep recipes")
    table, recipes = plan.find_table(options.table)
    folder = plan.reproduction_folder(table, root, options.rounds)
    requested = plan.select_columns(
        table,
        recipes,
        folder,
        columns=options.columns,
        methods=options.methods,
        seeds=options.seeds,
        fraction=options.rounds,
        grid=options.grid,
        settings=options.settings,
        allow_code=machine.allow_code,
    )
    if options.dry_run:
        return _dry_run(requested, machine, console)
    plan.write_note(folder, table)
    prepared = [plan.prepare(column, machine, ["fedkeep", *sys.argv[1:]]) for column in requested]
    pairs = zip(requested, prepared, strict=True)
    trials = [trial for pair in pairs for trial in plan.requested_trials(*pair, machine)]
    return _run_trials(trials, options, folder, machine, console)


def _run_trials(trials: Sequence[Trial], options: Namespace, folder: Path, machine: Machine, console: Console) -> int:
    again = shlex.join(["fedkeep", *sys.argv[1:]])
    say(console, f"{len(trials)} trial{'s' * (len(trials) != 1)} to run, into {folder}")
    if trials and (stop := run_with_progress(trials, console, again, quiet=options.quiet)):
        return stop
    for column in plan.existing_columns(folder, allow_code=machine.allow_code):
        write_all(column.folder)
    reproduction = read_reproduction(folder)
    written = report.write(reproduction, folder)
    _show(reproduction, console)
    say(console, f"\nwrote {written}")
    return _page(Path(options.out), options.page, console) if options.page else 0


def _dry_run(columns: Sequence[plan.Column], machine: Machine, console: Console) -> int:
    """List the trials that would be run, with what each is expected to take."""
    by_name = {column.name: column for column in columns}

    def is_done(name: str, label: str, seed: int) -> bool:
        column = by_name[name]
        return is_finished(trial_folder(column.folder, column.recipe.method(label), seed))

    return dry_run({name: column.recipe for name, column in by_name.items()}, machine, console, is_done)


def _show(reproduction: Reproduction, console: Console) -> None:
    for column in reproduction.columns:
        found = report.column_table(column)
        words = [head.replace("tting", "t- ting").replace("ference", "f- erence") for head in found.heads]
        heads = ["\n".join(textwrap.wrap(head.replace("minus the paper's", "minus paper"), 8)) for head in words]
        table = plain_table(*heads, title=column.run.title)
        for table_column in table.columns[1:]:
            table_column.justify = "right"
        for line in found.lines:
            table.add_row(*map(escape, line))
        table.caption, table.caption_justify = escape(found.note), "left"
        console.print(table)


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
    reproductions = [(read_reproduction(path), notes.get(name, "")) for name, path in found.items()]
    atomic_write(Path(target), report.overview(reproductions, command))
    say(console, f"wrote {target}")
    return 0
