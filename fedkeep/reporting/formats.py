"""Results as text: Markdown and LaTeX with intervals and with differences paired by seed, and CSV of all trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from fedkeep._utils import escaping
from fedkeep._utils.escaping import csv_text
from fedkeep.reporting.metric import Metric, columns_for, headline, listed
from fedkeep.reporting.summary import EXPLANATION, Row, differences, leaders, show_difference, show_interval, trials_of
from fedkeep.reporting.table import NOTHING, TextTable, full_caption, show_value

INTERVALS = (
    " In brackets the 95 % interval of a mean over seeds; of one seed, marked *, over blocks of its evaluations."
)


def result_table(rows: Sequence[Row], columns: Sequence[Metric] = ()) -> TextTable:
    """Return the table of results: what methods are compared by has its interval; bold is what `leaders` finds.

    ``columns``: By default those of results.
    """
    trials = trials_of(rows)
    columns, intervals = columns or columns_for(trials), headline(trials)
    lines: list[list[str]] = []
    for row in rows:
        cells = ["\n".join([row.label, *[f"({row.note})"] * bool(row.note)])]
        cells.append(str(len(row.seeds)) if row.finished else NOTHING)
        for metric in columns:
            interval = show_interval(row.interval(metric)) if metric in intervals and row.finished else ""
            cells.append("\n".join([show_value(row, metric, rows), *[interval] * bool(interval)]))
        lines.append(cells)
    bold = {(i, j) for j, metric in enumerate(columns, start=2) for i in leaders(rows, metric)}
    note = full_caption(rows) + INTERVALS * any("\n" in cell for line in lines for cell in line[2:])
    heads = ["method", "seeds", *(metric.heading(trials) for metric in columns)]
    return TextTable(heads, lines, note, bold, {i for i, row in enumerate(rows) if not row.finished})


def difference_table(rows: Sequence[Row], against: str = "") -> TextTable | None:
    """Return each finished method's differences to one of them; None if there is only one.

    By default it is the first that can be compared.
    """
    reference = against or _reference(rows)
    if not reference:
        return None
    columns = headline(trials_of(rows))
    found = [differences(rows, reference, metric) for metric in columns]
    reference = found[0][0].reference if found[0] else reference
    heads = [f"minus {reference}", *(metric.heading(trials_of(rows)) for metric in columns), "seeds"]
    lines = [
        [of_row[0].label, *map(show_difference, of_row), ", ".join(map(str, of_row[0].seeds)) or NOTHING]
        for of_row in zip(*found, strict=True)
    ]
    return TextTable(heads, lines, f"Difference to {reference}, paired by seed, in percentage points. {EXPLANATION}")


def _reference(rows: Sequence[Row]) -> str:
    """Return the first finished method that can be compared, or else the first; empty where it is the only one."""
    finished = [row for row in rows if row.finished]
    return next((row.label for row in finished if not row.trouble), finished[0].label) if len(finished) > 1 else ""


def target_table(rows: Sequence[Row], target: float) -> TextTable:
    """Return the first round in which each finished method reaches an accuracy, in percent."""
    lines = []
    for row in (row for row in rows if row.finished):
        reached = [trial.rounds_to(target / 100) for trial in row.trials]
        each = ", ".join("never" if math.isnan(value) else f"{value:.0f}" for value in reached)
        mean = NOTHING if any(map(math.isnan, reached)) else f"{sum(reached) / len(reached):.0f}"
        lines.append([row.label, mean, each])
    return TextTable(["method", "first round", "each seed"], lines, f"Rounds to {target:g} %.")


def tables(rows: Sequence[Row], against: str = "", target: float | None = None) -> list[TextTable]:
    """Return the results, the differences if there are any, and the rounds to a target if there is one."""
    found = [result_table(rows), difference_table(rows, against)]
    found += [] if target is None else [target_table(rows, target)]
    return [table for table in found if table is not None]


def markdown(rows: Sequence[Row], against: str = "", target: float | None = None) -> str:
    """Return `tables` as Markdown, each with its note below."""
    found = tables(rows, against, target)
    return "\n".join(f"{table.markdown()}\n\n{escaping.markdown(table.note)}\n" for table in found)


def latex(rows: Sequence[Row], against: str = "", target: float | None = None) -> str:
    r"""Return `tables` as LaTeX for ``\usepackage{booktabs}``, each in an environment of its own.

    The result table has accuracy and forgetting only: what training costs is no column of a paper's table of results.
    """
    from jinja2 import Environment

    shown, costs = [], {metric.title for metric in columns_for(trials_of(rows)) if metric.unit != "%"}
    for place, table in enumerate(tables(rows, against, target)):
        columns = [j for j, head in enumerate(table.heads) if place or head not in costs]
        lines = []
        for i, cells in enumerate(table.lines):
            texts = ((j, _latex_text(cells[j])) for j in columns)
            lines.append([f"\\textbf{{{text}}}" if (i, j) in table.bold else text for j, text in texts])
        name = "differences" if table.heads[0].startswith("minus") else "target" if place else "results"
        heads = [_latex_text(table.heads[j]) for j in columns]
        shown.append({"name": name, "note": _latex_text(table.note), "heads": heads, "lines": lines})
    template = files("fedkeep.reporting").joinpath("tables.tex.jinja").read_text(encoding="utf-8")
    environment = Environment(  # LaTeX has escapes of its own
        variable_start_string="<<", variable_end_string=">>", trim_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(template).render(tables=shown)


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "τ": r"$\tau$", "–": "--", "\n": " ", "*": r"$^{*}$",
}  # fmt: skip


def _latex_text(text: str) -> str:
    """Keep a label from being read as LaTeX."""
    return "".join(_LATEX.get(character, character) for character in escaping.printable(text))


def trials_csv(rows: Sequence[Row]) -> str:
    """Return one CSV line per method and seed at full precision, so that any other statistic can be computed."""
    columns, lines = listed(trials_of(rows)), list[dict[str, Any]]()
    for trial in trials_of(rows):
        first, last = trial.window_rounds
        line: dict[str, Any] = {"method": trial.label, "algorithm": trial.algorithm, "sequential": trial.sequential}
        line |= {"seed": trial.seed, "finished": trial.finished, "rounds": trial.rounds_done}
        line |= {"rounds_planned": trial.rounds_planned, "window_first": first, "window_last": last}
        line |= {metric.name: metric.of(trial) for metric in columns}
        line |= {"evaluations": len(trial.evaluated), "lost_clients": len(trial.lost)}
        line |= {"refused_replies": len(trial.refused), "rolled_back_rounds": len(trial.rolled_back)}
        lines.append(line | {"total_bytes": trial.traffic})
    return csv_of(lines)


def csv_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return lines, which have the same names, as CSV; what was not measured (NaN) is empty."""
    return csv_text([[*lines[0]], *(map(_csv_cell, line.values()) for line in lines)] if lines else [])


def _csv_cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if isinstance(value, float) and math.isnan(value) else str(value)


TEXTS: dict[str, Callable[[Sequence[Row], str, float | None], str]] = {
    "markdown": markdown,
    "latex": latex,
    "csv": lambda rows, against, target: trials_csv(rows),
}
"""By format, what writes results as text."""
SUFFIXES = {"markdown": ".md", "latex": ".tex", "csv": ".csv"}
