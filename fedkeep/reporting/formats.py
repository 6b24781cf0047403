"""Results as text: Markdown, LaTeX and CSV, each with intervals and with differences paired by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedkeep._utils import escaping
from fedkeep._utils.escaping import csv_text
from fedkeep.metrics import Interval
from fedkeep.reporting.differences import EXPLANATION, differences, leaders, show_difference, show_interval
from fedkeep.reporting.metric import METRICS, columns_for, headline, of_callbacks
from fedkeep.reporting.summary import Row, trials_of
from fedkeep.reporting.table import NOTHING, full_caption, show_value

INTERVALS = (
    " In brackets the 95 % interval of a mean over seeds; of one seed, marked *, over blocks of its evaluations."
)


@dataclass(frozen=True)
class TextTable:
    """A table as text, before it is Markdown or LaTeX.

    ``heads``: The titles of the columns; the first column is a label.
    ``lines``: The cells.
    ``note``: What the numbers are.
    ``bold``: The cells, as (line, column), that lead their columns.
    """

    heads: list[str]
    lines: list[list[str]]
    note: str
    bold: set[tuple[int, int]] = field(default_factory=set)


def result_table(rows: Sequence[Row]) -> TextTable:
    """Return the table of results: what methods are compared by has its interval; bold is what `leaders` finds."""
    trials = trials_of(rows)
    columns, intervals = columns_for(trials), headline(trials)
    lines: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    for row in rows:
        cells = [row.name, str(len(row.seeds)) if row.finished else NOTHING]
        for metric in columns:
            interval = show_interval(row.interval(metric)) if metric in intervals and row.finished else ""
            cells.append(" ".join([show_value(row, metric, rows), *[interval] * bool(interval)]))
        lines.append(cells)
    for j, metric in enumerate(columns):
        bold |= {(i, j + 2) for i in leaders(rows, metric)}
    note = full_caption(rows) + (INTERVALS if any("[" in cell for line in lines for cell in line[2:]) else "")
    return TextTable(["method", "seeds", *(metric.heading(trials) for metric in columns)], lines, note, bold)


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
    parts = []
    for table in tables(rows, against, target):
        lines = [
            _markdown_line([escaping.markdown(head) for head in table.heads]),
            "|:--|" + "--:|" * (len(table.heads) - 1),
        ]
        for i, cells in enumerate(table.lines):
            marked = [f"**{cell}**" if (i, j) in table.bold else cell for j, cell in enumerate(cells)]
            shown = escaping.markdown(cells[0])
            lines.append(_markdown_line([shown, *marked[1:]]))
        parts.append("\n".join([*lines, "", escaping.markdown(table.note), ""]))
    return "\n".join(parts)


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def latex(rows: Sequence[Row], against: str = "", target: float | None = None) -> str:
    r"""Return `tables` as LaTeX for ``\usepackage{booktabs}``, each in an environment of its own.

    The result table has accuracy and forgetting only: what training costs is no column of a paper's table of results.
    """
    parts = ["% needs \\usepackage{booktabs}, and a source encoded in UTF-8"]
    for name, table in zip(("results", "differences", "target"), tables(rows, against, target), strict=False):
        columns = list(range(len(table.heads)))
        if name == "results":
            costs = {metric.title for metric in columns_for(trials_of(rows)) if metric.unit != "%"}
            columns = [j for j in columns if table.heads[j] not in costs]
        elif table.heads[0] == "method":
            name = "target"
        lines = []
        for i, cells in enumerate(table.lines):
            texts = [_latex_text(cells[j]) for j in columns]
            marked = [
                f"\\textbf{{{text}}}" if (i, j) in table.bold else text for text, j in zip(texts, columns, strict=True)
            ]
            lines.append("  " + " & ".join(marked) + r" \\")
        parts.append(
            "\n".join(
                [
                    r"\begin{table}",
                    r"\centering",
                    rf"\caption{{{_latex_text(table.note)}}}",
                    rf"\label{{tab:{name}}}",
                    rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
                    r"  \toprule",
                    "  " + " & ".join(_latex_text(table.heads[j]) for j in columns) + r" \\",
                    r"  \midrule",
                    *lines,
                    r"  \bottomrule",
                    r"\end{tabular}",
                    r"\end{table}",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "τ": r"$\tau$", "–": "--", "\n": " ", "*": r"$^{*}$",
}  # fmt: skip


def _latex_text(text: str) -> str:
    """Keep a label from being read as LaTeX."""
    return "".join(_LATEX.get(character, character) for character in escaping.printable(text))


def rows_csv(rows: Sequence[Row], against: str = "", target: float | None = None) -> str:
    """Return the table as CSV: one line per row, each metric's mean, its interval, deviation and number of seeds.

    The first and last round of the window stand beside them, and in the metrics by which methods are compared the
    difference to one of them, by default the first that can be compared, with its interval and number of seeds. With a
    target accuracy, in percent, there is also the mean of the first rounds that reach it.

    Numbers are at full precision: fractions, seconds, bytes; what was not measured is empty.
    """
    headline_metrics = headline(trials_of(rows))
    reference = against or _reference(rows)
    gains = {
        (found.label, metric.name): found
        for metric in headline_metrics
        for found in (differences(rows, reference, metric) if reference else [])
    }
    header = ["method", "finished", "learned", "seeds", "rounds", "rounds_planned", "window_first", "window_last"]
    columns = [*METRICS.values(), *of_callbacks(trials_of(rows))]
    header += [f"{metric.name}{part}" for metric in columns for part in ("", "_std", "_n", "_low", "_high")]
    if reference:
        parts = ("", "_low", "_high", "_n")
        header += ["reference", *(f"{metric.name}_difference{part}" for metric in headline_metrics for part in parts)]
    header += ["rounds_to_target"] * (target is not None)
    lines: list[list[str]] = [header]
    for row in rows:
        rounds = [
            _range(trial.rounds_done for trial in row.trials),
            _range(trial.rounds_planned for trial in row.trials),
        ]
        line = [row.label, _yes(row.finished), _yes(row.learned), " ".join(map(str, row.seeds)), *rounds]
        line += map(str, row.trials[0].window_rounds)
        for metric in columns:
            spread, interval = row.value(metric), row.interval(metric)
            line += [_number(spread.mean), _number(spread.std), str(spread.n), *_ends(interval)]
        if reference:
            mine = [gains.get((row.label, metric.name)) if row.finished else None for metric in headline_metrics]
            line.append(next((found.reference for found in mine if found), ""))
            for found in mine:
                line += (
                    [_number(found.interval.mean), *_ends(found.interval), str(len(found.seeds))] if found else [""] * 4
                )
        if target is not None:
            line.append(_number(sum(trial.rounds_to(target / 100) for trial in row.trials) / len(row.trials)))
        lines.append(line)
    return csv_text(lines)


def _ends(interval: Interval) -> list[str]:
    return [_number(interval.low), _number(interval.high)]


def trials_csv(rows: Sequence[Row]) -> str:
    """Return one CSV line per method and seed at full precision, so that any other statistic can be computed."""
    header = ["method", "algorithm", "sequential", "seed", "finished", "rounds", "rounds_planned"]
    columns = [*METRICS.values(), *of_callbacks(trials_of(rows))]
    header += ["window_first", "window_last", *(metric.name for metric in columns)]
    counts = ["evaluations", "lost_clients", "refused_replies", "rolled_back_rounds", "total_bytes"]
    lines: list[list[str]] = [[*header, *counts]]
    for trial in (trial for row in rows for trial in row.trials):
        line = [trial.label, trial.algorithm, _yes(trial.sequential), str(trial.seed), _yes(trial.finished)]
        line += map(str, (trial.rounds_done, trial.rounds_planned, *trial.window_rounds))
        line += [_number(metric.of(trial)) for metric in columns]
        line += [
            str(len(trial.evaluated)),
            str(len(trial.lost)),
            str(len(trial.refused)),
            str(len(trial.rolled_back)),
            str(trial.traffic),
        ]
        lines.append(line)
    return csv_text(lines)


def _number(value: float) -> str:
    return "" if math.isnan(value) else repr(float(value))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _range(values: object) -> str:
    known = sorted(set(values))  # type: ignore[call-overload]
    return str(known[0]) if len(known) == 1 else f"{known[0]}-{known[-1]}"


TEXTS: dict[str, Callable[[Sequence[Row], str, float | None], str]] = {
    "markdown": markdown,
    "latex": latex,
    "csv": rows_csv,
}
"""By format, what writes results as text."""
SUFFIXES = {"markdown": ".md", "latex": ".tex", "csv": ".csv"}
