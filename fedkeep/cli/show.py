"""Commands that only read: list methods and data sets, compare runs, write reports."""

import inspect
from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fedkeep._utils.files import atomic_write
from fedkeep._utils.type_hints import annotations_of
from fedkeep.cli.text import say
from fedkeep.data.catalog import CATALOG, CatalogEntry, known_datasets
from fedkeep.errors import RunError
from fedkeep.experiment.plugins import import_user_code
from fedkeep.interface import Algorithm, algorithms, get_algorithm
from fedkeep.interface.algorithm import describe_replies, describe_reply, send_label_counts
from fedkeep.options import default_of, describe_bounds, describe_type, options_of
from fedkeep.reporting.figures import COLUMN, check_suffix, curves, save_figure
from fedkeep.reporting.findings import warnings
from fedkeep.reporting.html import REPORT, default_out, write_all, write_report
from fedkeep.reporting.run_folder import read_run
from fedkeep.reporting.summary import Row, differing_settings, summary, trials_of
from fedkeep.reporting.table import SUFFIXES, TEXTS, TextTable, print_table, tables
from fedkeep.training.client_test import client_test


def methods(options: Namespace, console: Console) -> int:
    """List all methods, or describe one with its options."""
    import_user_code(options.use)
    if options.name:
        _method(get_algorithm(options.name), console)
        return 0
    lines = [[name, _order(cls), "; ".join(describe_replies(cls)), cls.paper] for name, cls in algorithms().items()]
    console.print(TextTable(["method", "clients train", "what leaves a client", "paper"], lines).terminal())
    console.print("options of one: fedkeep methods NAME")
    return 0


def _order(cls: type[Algorithm[Any, Any]]) -> str:
    return "one by one" if cls.sequential else "in parallel"


def _method(cls: type[Algorithm[Any, Any]], console: Console) -> None:
    console.print(f"[bold]{cls.name()}[/]  (clients train {_order(cls)})")
    say(console, f"{cls.paper}\n")
    made_up = (cls.__doc__ or "").startswith(f"{cls.__name__}(")  # by `dataclass`
    say(console, "" if made_up else f"{inspect.cleandoc(cls.__doc__ or '')}\n", paragraphs=True)
    console.print("[bold]what leaves a client[/]")
    for line in (*describe_replies(cls), describe_reply(client_test)):
        say(console, f"  {line}")
    say(console, f"  {describe_reply(send_label_counts, 'with defense.loss_check, send_label_counts')}")
    method_options = options_of(cls)
    if method_options:
        hints = annotations_of(cls)
        values = {
            name: ", ".join(filter(None, (describe_type(hints[name]), describe_bounds(of))))
            for name, of in method_options.items()
        }
        lines = [[name, str(default_of(of)), values[name], of.metadata["doc"]] for name, of in method_options.items()]
        console.print(TextTable(["option", "default", "values", "meaning"], lines).terminal())


def datasets(options: Namespace, console: Console) -> int:
    """List the known data sets."""
    lines = []
    for name, entry in known_datasets(options.data_dir).items():
        image = "x".join(map(str, entry.shape))
        hub = CATALOG[entry.made_from].hub if entry.made_from else entry.hub
        lines.append([name, str(entry.num_classes), image, _local_copy(entry), hub or "-", entry.note])
    console.print(TextTable(["data set", "classes", "image", "local", "Hub", "note"], lines).terminal())
    console.print("local: found in --data-dir or FEDKEEP_DATA. Others that the Hub has are downloaded when used.")
    console.print("Also: any Hub id, and files of your own: tables, texts, arrays, images (docs/data.md).")
    return 0


def _local_copy(entry: CatalogEntry) -> str:
    """Return what is known about the local copy of a data set, in a word or two."""
    if not entry.location:
        return "-"
    if entry.damage:
        return f"damaged: {entry.damage}"
    found = entry.num_local_classes
    return "yes" if found in (None, entry.num_classes) else f"{found} classes"


def compare(options: Namespace, console: Console) -> int:
    """Show several runs in one table."""
    import_user_code(options.use)
    _check_page(options)
    if options.out and options.format == "table":
        raise RunError("--out writes a file: choose its --format, one of markdown, latex, csv and html.")
    if options.format == "html" and not options.out:
        raise RunError("--format html writes a page. Name it: --out comparison.html")
    runs = [read_run(run) for run in options.runs]
    rows = summary(runs)
    if not rows:
        raise RunError("there is nothing to compare: these runs have no trial with a finished round.")
    _figures(options, rows, console)
    if options.format == "html":
        say(console, f"wrote {write_report(runs, options.out)}")
    elif options.format != "table":
        _text(options, rows, Path(options.out) if options.out else None, console)
    else:
        _, *others = tables(rows, options.against or "", options.target)  # or an error, before anything is shown
        console.print(print_table(rows, width=console.width))
        for table in others:
            console.print(table.terminal())
        if any(f"(run {run.path.name})" in row.label for run in runs for row in rows):
            say(console, f"What differs, {' | '.join(run.path.name for run in runs)}:")
            for line in differing_settings(runs):
                say(console, f"  {line}")
        for line in (line for run in runs for line in warnings(run.trials, run.settings)):
            console.print(f"warning: {line}", style="yellow", markup=False)
    return 0


def report(options: Namespace, console: Console) -> int:
    """Write a run's tables and report again, or one of them."""
    import_user_code(options.use)
    _check_page(options)
    run = read_run(options.run)
    rows = summary(run)
    out = Path(options.out) if options.out else default_out(run.path)
    _figures(options, rows, console)
    if options.format in TEXTS:
        _text(options, rows, out / f"table{SUFFIXES[options.format]}" if options.out else None, console)
        return 0
    if options.format == "html":
        write_report([run], out / REPORT)
    else:
        write_all(options.run, out)
    say(console, f"report: {(out / REPORT).resolve().as_uri()}")
    return 0


def _check_page(options: Namespace) -> None:
    """Raise `RunError` for an option that the chosen format would ignore."""
    if options.format in ("markdown", "latex", "table"):
        return
    for name in ("against", "target"):
        if getattr(options, name) is not None:
            shown = " The page shows all differences." if name == "against" and options.format != "csv" else ""
            raise RunError(f"--{name} is for tables: choose --format markdown or latex.{shown}")


def _text(options: Namespace, rows: list[Row], path: Path | None, console: Console) -> None:
    """Print results in a text format, or write them into a file."""
    text = TEXTS[options.format](rows, options.against or "", options.target)
    if path is None:
        console.print(Text(text), soft_wrap=True, end="")
    else:
        say(console, f"wrote {atomic_write(path, text)}")


def _figures(options: Namespace, rows: list[Row], console: Console) -> None:
    """Write the figures that were asked for."""
    for name in ("curve", "width"):
        if getattr(options, name) is not None and not options.figure:
            raise RunError(f"--{name} is for a figure: add --figure FILE, as .pdf, .svg or .png.")
    for path in options.figure:
        check_suffix(path)
    for path in options.figure:
        figure = curves(trials_of(rows), options.curve or "accuracy", width=options.width or COLUMN)
        say(console, f"wrote {save_figure(figure, path)}")
