"""Tables: how values are shown, and what stands below; for a terminal, in Markdown and LaTeX, and CSV of all trials."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkeep._utils import escaping
from fedkeep._utils.escaping import csv_text
from fedkeep._utils.templates import template
from fedkeep.reporting import summary
from fedkeep.reporting.findings import findings
from fedkeep.reporting.metric import Metric, columns_for, headline, listed, main_metric, rounds_covered, show_number
from fedkeep.reporting.summary import Row, Spread, trials_of
from fedkeep.reporting.trial import TrialResult

if TYPE_CHECKING:
    from rich.table import Table

NOTHING = "–"
EXPLANATION = (
    "In brackets the 95 % interval of the mean difference: Student's t over the seeds that both have. With one seed, "
    "marked *, it is estimated from the means of blocks of the window's evaluations and says nothing of other seeds. "
    "Where it contains 0, the two are not separated."
)
SYLLABLES = {
    "tting": "t- ting",
    "accuracy": "accu- racy",
    "balanced": "bal- anced",
    "calibration": "cali- bration",
    "specificity": "speci- ficity",
    "difference": "differ- ence",
}
"""How long words of headings are divided in a terminal."""


@dataclass(frozen=True)
class TextTable:
    """A table as text, before it is Markdown, LaTeX, HTML or a terminal's.

    ``heads``: The titles of the columns; the first column is a label.
    ``lines``: The cells; what stands behind a line break is said of the value before it.
    ``note``: What the numbers are.
    ``bold``: The cells, as (line, column), that lead their columns.
    ``dim``: The lines that are not finished.
    ``name``: By which LaTeX refers to it.
    """

    heads: list[str]
    lines: list[list[str]]
    note: str = ""
    bold: set[tuple[int, int]] = field(default_factory=set)
    dim: set[int] = field(default_factory=set)
    name: str = "results"

    def markdown(self) -> str:
        """Return the table in Markdown, without the note."""
        lines = [list(map(escaping.markdown, self.heads)), [":--", *["--:"] * (len(self.heads) - 1)]]
        for i, (first, *cells) in enumerate(self.lines):
            shown = (cell.replace("\n", " ") for cell in cells)
            marked = (f"**{cell}**" if (i, j) in self.bold else cell for j, cell in enumerate(shown, start=1))
            lines.append([escaping.markdown(first), *marked])
        return "\n".join(f"| {' | '.join(line)} |" if i != 1 else f"|{'|'.join(line)}|" for i, line in enumerate(lines))

    def terminal(self, title: str = "", width: int = 0) -> Table:
        """Return the table for a `rich.console.Console`, with the note below.

        ``width``: Of the headings of numbers, which then stand on the right, in short lines; 0: all as it is.
        """
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=escape(title) or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.caption, table.caption_justify = escape(self.note) or None, "left"
        for place, head in enumerate(map(escape, self.heads)):
            for word, parts in SYLLABLES.items() if width else ():
                head = head.replace(word, parts)
            if place and width:
                table.add_column("\n".join(textwrap.wrap(head, width)), justify="right", overflow="fold")
            else:
                table.add_column(head, overflow="fold")
        for i, cells in enumerate(self.lines):
            shown = [
                f"[bold]{escape(text)}[/]" if (i, j) in self.bold else escape(text) for j, text in enumerate(cells)
            ]
            table.add_row(*shown, style="dim" if i in self.dim else None)
        return table


def human_bytes(count: float) -> str:
    """Return a number of bytes in at most four characters and a decimal unit: ``"244 kB"``, ``"1.24 MB"``."""
    if math.isnan(count):
        return NOTHING
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    digits = 0 if units[0] == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {units[0]}"


def show(spread: Spread, unit: str, *, own: bool = False) -> str:
    """Return a value with its standard deviation over seeds, if there is one, in few characters.

    Fractions (unit ``"%"``) are shown in percent, without the sign; a spread of bytes is left out, since what a client
    sends hardly varies.

    ``own``: Whether it is a user's own metric, whose numbers without a unit may be of any size.
    """
    if math.isnan(spread.mean):
        return NOTHING
    if unit == "bytes":
        return human_bytes(spread.mean)
    scale, digits = (100, 2) if unit == "%" else (1, 1)
    text, std = (
        show_number(value, unit) if own and not unit else f"{scale * value:,.{digits}f}"
        for value in (spread.mean, spread.std)
    )
    alone = math.isnan(spread.std) or spread.mean == spread.std == 0
    return text if alone else f"{text} ±{std}"


def show_value(row: Row, metric: Metric, rows: Sequence[Row]) -> str:
    """Return a value of a row as it stands in the table of all rows.

    Where the rows' windows differ, a value that covers one names its rounds.
    """
    text = show(row.value(metric), metric.unit, own=metric.is_custom)
    if text == NOTHING or not metric.covers_window:
        return text
    if len({rounds_covered(trial) for trial in trials_of(rows)}) == 1:
        return text
    covered = {rounds_covered(trial) for trial in row.trials}
    return f"{text} ({covered.pop() if len(covered) == 1 else 'rounds of each seed'})"


def caption(rows: Sequence[Row]) -> str:
    """Say in a few sentences what the numbers are, and on which frozen networks they rest."""
    finished, trials = [row for row in rows if row.finished], summary.deduplicate(trials_of(rows))
    counts, main = sorted({len(row.seeds) for row in finished}), main_metric(trials_of(rows))
    lost, refused = (sum(len(getattr(trial, name)) for trial in trials) for name in ("lost", "refused"))
    asked = sum(len(row.get("cohort", ())) for trial in trials for row in trial.rounds)
    mixed, tasks = sum(len(trial.versions) > 1 for trial in trials), any(trial.task_sizes for trial in trials)
    evaluations = {len(trial.window_accuracies) for trial in trials_of(finished)}
    count = evaluations.pop() if len(evaluations) == 1 and not tasks else 0
    gaps = not tasks and any((np.diff(trial.evaluated) > 1).any() for trial in trials)
    told = any(trial.client_history for trial in trials)
    private = told and any(not math.isnan(trial.epsilon) for trial in trials)
    numbers = {"counts": counts, "lost": lost, "refused": refused, "asked": asked, "mixed": mixed, "count": count}
    bold = any(summary.leaders(rows, metric) for metric in columns_for(trials_of(rows)))
    facts = {"main": main, "tasks": tasks, "gaps": gaps, "told": told, "private": private, "bold": bold}
    sentences = template("reporting", "caption.jinja").render(
        rows=rows, finished=finished, trials=trials, **numbers, **facts
    )
    return " ".join(sentences.splitlines()) + frozen(trials_of(rows))


def frozen(trials: Iterable[TrialResult]) -> str:
    """Say on which networks trials rest and what these had seen, after a space; empty where there was none.

    These are given initial models, generators of images, and extractors that read them for the server or for clients.
    """
    trials = list(trials)
    said = [f" Initial model: {began}."] if (began := initial_models(trials)) else []
    said += [f" Generator of images: {name}." for name in sorted({trial.generator for trial in trials} - {""})]
    return "".join(said + [f" Pre-trained extractor: {n}." for n in sorted({one.extractor for one in trials} - {""})])


def initial_models(trials: Iterable[TrialResult]) -> str:
    """Say how the models were made from which rounds began, and their accuracy; empty where nothing was given."""
    began: dict[str, list[float]] = {}
    for trial in trials:
        if trial.initial_model:
            began.setdefault(trial.initial_model, []).append(100 * trial.initial_accuracy)
    said = []
    for made_by, values in sorted(began.items()):
        ends = dict.fromkeys(f"{end:.1f}" for end in (min(values), max(values)))
        said.append(made_by if math.isnan(sum(values)) else f"{made_by}; accuracy {' to '.join(ends)} %")
    return "; ".join(said)


def _notes(row: Row) -> list[str]:
    """Return what a row's note says, a line each."""
    return row.note.split(", ") if row.note else []


def print_table(rows: Sequence[Row], width: int = 80) -> Table:
    """Return the table for a terminal, under the first of what it says, to be given to a `rich.console.Console`.

    ``width``: The columns of the terminal. Where they do not suffice, seconds and bytes are left out, and then scores
        beside the main metric.
    """
    columns = everything = columns_for(trials_of(rows))
    lines = [line for row in rows for line in (row.label, *(f"  {note}" for note in _notes(row)))]
    room, each = width - min(max(map(len, lines), default=0), 30), 10 if any(len(row.seeds) > 1 for row in rows) else 8
    if room < max(68, each * len(columns)):
        columns = tuple(metric for metric in columns if metric.unit == "%" or metric is everything[0])
    if room < each * len(columns):
        columns = tuple(metric for metric in columns if metric.shown != "scored" or metric is everything[0])
    left_out = " What has no room here is in the report and in CSV files." if columns != everything else ""
    uneven = len({len(row.seeds) for row in rows if row.finished}) > 1  # otherwise the caption says how many
    cells = []
    for row in rows:
        name = "\n  ".join([row.label, *(_notes(row) or [f"{len(row.seeds)} seeds"] * uneven)])
        cells.append([name, *(show_value(row, metric, rows) for metric in columns)])
    heads = ["method", *(metric.heading(trials_of(rows)) for metric in columns)]
    unfinished = {i for i, row in enumerate(rows) if not row.finished}
    found = TextTable(heads, cells, caption(rows) + left_out, _bold(rows, columns, 1), unfinished)
    # Headings in short lines, so that the width goes to the numbers and all fits 80 columns; there, a percentage has
    # its deviation on a second line.
    table = found.terminal("\n".join(findings(rows)[:2]), width=7)
    table.title_style, table.show_edge, table.collapse_padding = "bold", False, True
    for column, metric in zip(table.columns[1:], columns, strict=True):
        column.no_wrap = metric.unit != "%"
    return table


def _bold(rows: Sequence[Row], columns: Sequence[Metric], first: int = 0) -> set[tuple[int, int]]:
    """Return the cells, as (line, column), that lead their columns, which are counted from ``first``."""
    return {(i, j) for j, metric in enumerate(columns, start=first) for i in summary.leaders(rows, metric)}


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
            interval = (
                summary.show_interval(row.interval(metric), metric.unit) if metric in intervals and row.finished else ""
            )
            cells.append("\n".join([show_value(row, metric, rows), *[interval] * bool(interval)]))
        lines.append(cells)
    note = caption(rows) + INTERVALS * any("\n" in cell for line in lines for cell in line[2:])
    heads = ["method", "seeds", *(metric.heading(trials) for metric in columns)]
    return TextTable(heads, lines, note, _bold(rows, columns, 2), {i for i, row in enumerate(rows) if not row.finished})


def difference_table(rows: Sequence[Row], against: str = "") -> TextTable | None:
    """Return each finished method's differences to one of them; None if there is only one.

    By default it is the first that can be compared.
    """
    finished = [row for row in rows if row.finished]
    if not against and len(finished) < 2:
        return None
    reference = against or next((row.label for row in finished if not row.trouble), finished[0].label)
    columns = headline(trials_of(rows))
    found = [summary.differences(rows, reference, metric) for metric in columns]
    reference = found[0][0].reference if found[0] else reference
    heads = [f"minus {reference}", *(metric.heading(trials_of(rows)) for metric in columns), "seeds"]
    lines = [
        [of_row[0].label, *map(summary.show_difference, of_row), ", ".join(map(str, of_row[0].seeds)) or NOTHING]
        for of_row in zip(*found, strict=True)
    ]
    others = "".join(f", {metric.title} in its own numbers" for metric in columns if metric.unit != "%")
    note = f"Difference to {reference}, paired by seed, in percentage points{others}. {EXPLANATION}"
    return TextTable(heads, lines, note, name="differences")


def target_table(rows: Sequence[Row], target: float) -> TextTable:
    """Return the first round in which each finished method reaches an accuracy, in percent."""
    lines = []
    for row in (row for row in rows if row.finished):
        reached = [trial.rounds_to(target / 100) for trial in row.trials]
        each = ", ".join("never" if math.isnan(value) else f"{value:.0f}" for value in reached)
        mean = NOTHING if any(map(math.isnan, reached)) else f"{sum(reached) / len(reached):.4g}"
        lines.append([row.label, mean, each])
    return TextTable(["method", "first round", "each seed"], lines, f"Rounds to {target:g} %.", name="target")


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
    shown, costs = [], {metric.title for metric in columns_for(trials_of(rows))[1:] if metric.unit != "%"}
    for place, table in enumerate(tables(rows, against, target)):
        columns = [j for j, head in enumerate(table.heads) if place or head not in costs]
        lines = []
        for i, cells in enumerate(table.lines):
            texts = ((j, _latex_text(cells[j])) for j in columns)
            marked = [f"\\textbf{{{text}}}" if (i, j) in table.bold else text for j, text in texts]
            lines.append(["{}" * marked[0].startswith("[") + marked[0], *marked[1:]])  # \\[ would be a length
        heads = [_latex_text(table.heads[j]) for j in columns]
        shown.append({"name": table.name, "note": _latex_text(table.note), "heads": heads, "lines": lines})
    # LaTeX has escapes of its own.
    document = template("reporting", "tables.tex.jinja", variable_start_string="<<", variable_end_string=">>")
    return document.render(tables=shown)


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
    return csv_text([[*lines[0]], *(map(_csv_cell, line.values()) for line in lines)] if lines else [])


def _csv_cell(value: Any) -> str:
    """Return a value as text; what was not measured (NaN) is empty."""
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
