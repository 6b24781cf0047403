"""Commands that only read: list methods, data sets and recipes, compare runs, write reports."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedkeep._utils.type_hints import annotations_of
from fedkeep.data import known_datasets
from fedkeep.errors import RunError
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.recipe_loader import PaperTable, load_recipe, paper_tables, recipe_names
from fedkeep.interface import Algorithm, algorithms, get_algorithm
from fedkeep.interface.algorithm import describe_replies
from fedkeep.options import describe_type, options_of
from fedkeep.reporting.columns import headline
from fedkeep.reporting.differences import EXPLANATION, differences, show_difference
from fedkeep.reporting.outputs import REPORT, default_out, write_all
from fedkeep.reporting.plots import curves, save_png
from fedkeep.reporting.run_folder import read_run
from fedkeep.reporting.summary import Row, summary, trials_of
from fedkeep.reporting.table import markdown, print_table, rows_csv


def methods(options: Namespace, console: Console) -> int:
    """List all methods, or describe one with its options.

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
    import_user_code(options.use)
    if options.name:
        _method(get_algorithm(options.name), console)
        return 0
    table = _table("method", "schedule", "what leaves a client", "paper")
    for name, cls in algorithms().items():
        table.add_row(name, cls.schedule, escape("; ".join(describe_replies(cls))), escape(cls.paper))
    console.print(table)
    console.print("options of one: fedkeep methods NAME", highlight=False)
    return 0


def _method(cls: type[Algorithm[Any, Any]], console: Console) -> None:
    console.print(f"[bold]{cls.name()}[/]  ({cls.schedule})", highlight=False)
    console.print(escape(f"{cls.paper}\n\n{_docstring(cls)}\n"), highlight=False, soft_wrap=True)
    console.print("[bold]what leaves a client[/]", highlight=False)
    for line in describe_replies(cls):
        console.print(f"  {escape(line)}", highlight=False)
    method_options = options_of(cls)
    if method_options:
        hints = {name: describe_type(hint) for name, hint in annotations_of(cls).items()}
        table = _table("option", "default", "values", "meaning")
        for name, field in method_options.items():
            table.add_row(name, escape(str(field.default)), escape(hints[name]), escape(field.metadata["doc"]))
        console.print(table)


def _docstring(cls: type) -> str:
    import inspect

    return inspect.cleandoc(cls.__doc__ or "")


def datasets(options: Namespace, console: Console) -> int:
    """List the known data sets.

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
    table = _table("data set", "classes", "image", "local", "Hub", "note")
    for name, entry in known_datasets(options.data_dir).items():
        image = "x".join(map(str, entry.shape))
        found = entry.num_local_classes
        local = "-" if not entry.location else "yes" if found in (None, entry.num_classes) else f"{found} classes"
        table.add_row(name, str(entry.num_classes), image, local, entry.hub or "-", escape(entry.note))
    console.print(table)
    console.print(
        "local: found in --data-dir or FEDKEEP_DATA. Other data sets are downloaded from the Hub when they are used.",
        highlight=False,
    )
    console.print("Also: any Hub id, a folder of Parquet splits, or a folder of images per class.", highlight=False)
    return 0


def recipes(options: Namespace, console: Console) -> int:
    """List the recipes and the papers' tables, show the columns of one table, or print one recipe.

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
    tables = paper_tables()
    if (options.name or "").rstrip("/") in tables:
        _paper_table(tables[options.name.rstrip("/")], console)
    elif options.name:
        console.print(load_recipe(options.name).to_toml(), highlight=False, markup=False, soft_wrap=True)
    else:
        _recipe_list(tables, console)
    return 0


def _recipe_list(tables: Mapping[str, PaperTable], console: Console) -> None:
    """Show one entry for each recipe outside a table, and one for each table, with the names of its columns."""
    entries = {name: Text(load_recipe(name).title) for name in recipe_names() if name.rpartition("/")[0] not in tables}
    for name, table in tables.items():
        columns = ", ".join(column.rpartition("/")[2] for column in table.columns)
        entries[name] = Text(table.title).append(f": {columns}", "dim")
    folders: dict[str, list[str]] = {}
    for name in entries:
        folders.setdefault(name.rpartition("/")[0], []).append(name)
    for folder in sorted(folders):
        if folder:
            console.print(f"\n[bold]{escape(folder)}/[/]", highlight=False)
        grid = Table.grid(padding=(0, 2, 0, 0))
        for name in folders[folder]:
            grid.add_row("  " * bool(folder) + name.rpartition("/")[2], entries[name])
        console.print(grid)
    console.print(
        "\na table and its columns: fedkeep recipes sfedkd/table1\n"
        "one recipe, in full:     fedkeep recipes sfedkd/table1/cifar10-2-0.5",
        highlight=False,
    )


def _paper_table(table: PaperTable, console: Console) -> None:
    console.print(f"[bold]{escape(table.table)}[/]  {escape(table.title)}", highlight=False)
    if table.notes:
        console.print(Text(f"\n{table.notes}"))
    columns = _table("recipe", "what it runs")
    for name in table.columns:
        columns.add_row(name, escape(load_recipe(name).title.removeprefix(f"{table.table}: ")))
    console.print(columns)


def compare(options: Namespace, console: Console) -> int:
    """Show several runs in one table.

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
    rows = summary([read_run(run) for run in options.runs])
    if not rows:
        raise RunError("there is nothing to compare: these runs have no trial with a finished round.")
    if options.format != "table":
        text = markdown(rows) if options.format == "markdown" else rows_csv(rows)
        console.print(text, highlight=False, markup=False, soft_wrap=True, end="")
        return 0
    console.print(print_table(rows))
    finished = [row.label for row in rows if row.finished]
    if options.against or len(finished) > 1:
        _differences(rows, options.against or finished[0], console)
    if options.target is not None:
        table = _table("method", "first round", "each seed", title=f"rounds to {options.target:g} %")
        for row in (row for row in rows if row.finished):
            reached = [trial.rounds_to(options.target / 100) for trial in row.trials]
            each = ", ".join("never" if math.isnan(value) else f"{value:.0f}" for value in reached)
            mean = "-" if any(map(math.isnan, reached)) else f"{sum(reached) / len(reached):.0f}"
            table.add_row(escape(row.label), mean, each)
        console.print(table)
    return 0


def _differences(rows: list[Row], against: str, console: Console) -> None:
    """Show each method's difference to one of them, in the main metrics."""
    metrics = headline(trials_of(rows))
    headings = [metric.heading(trials_of(rows)) for metric in metrics]
    table = _table("method", *headings, "seeds", title=f"difference to {against}, paired by seed, in percentage points")
    for by_metric in zip(*(differences(rows, against, metric) for metric in metrics), strict=True):
        table.add_row(
            escape(by_metric[0].label), *map(escape, map(show_difference, by_metric)), _comma_list(by_metric[0].seeds)
        )
    table.caption, table.caption_justify = EXPLANATION, "left"
    console.print(table)


def _comma_list(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def report(options: Namespace, console: Console) -> int:
    """Write a run's table and report again.

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
    out = Path(options.out) if options.out else default_out(Path(options.run))
    run = write_all(options.run, out)
    if options.png:
        trials = [trial for row in summary(run) for trial in row.trials]
        save_png(curves(trials, "accuracy"), options.png)
        console.print(f"wrote {options.png}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"report: {(out / REPORT).resolve().as_uri()}", highlight=False, soft_wrap=True)
    return 0


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for column in table.columns:
        column.overflow = "fold"
    return table
