"""The result table: as a rich table for the terminal, as Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fedkeep.reporting.columns import METRICS, Metric, columns_for, rounds_covered
from fedkeep.reporting.differences import leaders
from fedkeep.reporting.summary import Row, Spread, deduplicate, trials_of
from fedkeep.reporting.trial import TrialResult

if TYPE_CHECKING:
    from rich.table import Table

NOTHING = "–"


def human_bytes(count: float) -> str:
    """Return a number of bytes in at most four characters and a decimal unit: ``"244 kB"``, ``"1.24 MB"``."""
    if math.isnan(count):
        return NOTHING
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    digits = 0 if units[0] == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {units[0]}"


def show(spread: Spread, unit: str, *, signed: bool = False) -> str:
    """Return a value with its standard deviation over seeds, if there is one, in few characters.

    Fractions (unit ``"%"``) are shown in percent, without the sign; a spread of bytes is left out, since what a client
    sends hardly varies.
    """
    if math.isnan(spread.mean):
        return NOTHING
    if unit == "bytes":
        return human_bytes(spread.mean)
    scale, digits = (100, 2) if unit == "%" else (1, 1)
    text = f"{scale * spread.mean:{'+' if signed else ''},.{digits}f}"
    return (
        text
        if math.isnan(spread.std) or spread.mean == spread.std == 0
        else f"{text} ±{scale * spread.std:,.{digits}f}"
    )


def show_value(row: Row, metric: Metric, rows: Sequence[Row]) -> str:
    """Return a value of a row as it stands in the table of all rows.

    Where the rows' windows differ, a value that covers one names its rounds.
    """
    text = show(row.value(metric), metric.unit)
    if text == NOTHING or not (metric.series or metric.windowed):
        return text
    covered = {rounds_covered(trial) for trial in trials_of(rows)}
    return f"{text} ({rounds_covered(row.trials[0])})" if len(covered) > 1 else text


def caption(rows: Sequence[Row]) -> str:
    """Say in a few sentences what the numbers are."""
    counts = sorted({len(row.seeds) for row in rows if row.finished})
    if not counts:
        seeds = "No method is finished yet: the rows are single seeds, as far as they got."
    else:
        number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        spread = "Mean ± standard deviation over" if counts[-1] > 1 else "From"
        seeds = f"{spread} {number} {'seed' if counts == [1] else 'seeds'}, accuracy and forgetting in %."
    trials = deduplicate(rows)
    lost = sum(len(trial.lost) for trial in trials)
    asked = sum(len(row.get("cohort", ())) for trial in trials for row in trial.rounds)
    refused = sum(len(trial.refused) for trial in trials)
    named = f", {refused:,} of them since their reply was refused" if refused else ""
    seeds += f" {lost:,} of {asked:,} clients asked were lost{named}; report.html says why." if lost else ""
    mixed = sum(len(trial.versions) > 1 for trial in trials)
    if mixed:
        seeds += f" Trials that another version continued, which report.html names: {mixed} of {len(trials)}."
    if any(trial.task_sizes for trial in trials):
        seeds += (
            " Accuracy is the mean over tasks of that on each task's classes, among all classes seen by then, over the"
            " rounds named and after the last round of each task."
            " Forgetting from the best: what old tasks have lost by the end since their best."
            " A task: what they lose with each new one, on average."
        )
    else:
        seeds += _window(rows)
        gaps = any((trial.evaluated[1:] - trial.evaluated[:-1] > 1).any() for trial in trials)
        seeds += " Forgetting is taken over the rounds that were evaluated." if gaps else ""
    if sum(row.finished for row in rows) > 1:
        seeds += " Bold: better than every other method by the 95 % interval of the difference, paired by seed"
        seeds += " (of one seed, from blocks of its evaluations)." if counts == [1] else "."
    seeds += " A method at chance has not learned, and is compared with no other." * any(
        not row.learned for row in rows if row.finished
    )
    rest = " Unfinished seeds stand in rows of their own." if counts and not all(row.finished for row in rows) else ""
    return seeds + rest


def _window(rows: Sequence[Row]) -> str:
    """Say how many evaluations the mean of a window is of; nothing where they differ."""
    counts = {len(trial.window_accuracies) for row in rows if row.finished for trial in row.trials}
    if len(counts) != 1 or counts == {0}:
        return ""
    count = counts.pop()
    return f" Over rounds: the mean of {count} evaluations." if count > 1 else " Over rounds: of one evaluation."


def frozen(trials: Iterable[TrialResult]) -> str:
    """Say which frozen networks trials rest on and what these had seen, after a space; empty where there was none.

    These are generators of images, and extractors that read them for the server or for clients.
    """
    drew, read = set(), set()
    for trial in trials:
        drew.add(trial.generator)
        read.add(trial.extractor)
    said = [f" Generator of images: {name}." for name in sorted(drew - {""})]
    return "".join([*said, *(f" Pre-trained extractor: {name}." for name in sorted(read - {""}))])


def _below(rows: Sequence[Row]) -> str:
    return caption(rows) + frozen(trial for row in rows for trial in row.trials)


def print_table(rows: Sequence[Row], title: str | None = None) -> Table:
    """Return the table for a terminal, to be given to a `rich.console.Console`; nothing is printed here."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=_below(rows), caption_justify="left")
    table.box, table.show_edge, table.pad_edge, table.collapse_padding = box.SIMPLE_HEAD, False, False, True
    table.add_column("method", overflow="fold")
    columns = columns_for(trials_of(rows))
    for metric in columns:
        # Headings in short lines, so that the width goes to the numbers and all fits 80 columns; there, a percentage
        # has its deviation on a second line.
        words = textwrap.wrap(
            metric.heading(trials_of(rows)).replace("tting", "t- ting").replace("accuracy", "accu- racy"), 7
        )
        table.add_column("\n".join(words), justify="right", overflow="fold", no_wrap=metric.unit != "%")
    best = [leaders(rows, metric) for metric in columns]
    uneven = len({len(row.seeds) for row in rows if row.finished}) > 1  # otherwise the caption says how many
    for i, row in enumerate(rows):
        values = [show_value(row, metric, rows) for metric in columns]
        marked = [f"[bold]{text}[/]" if i in best[j] else text for j, text in enumerate(values)]
        notes = row.note.split(", ") if row.note else [f"{len(row.seeds)} seeds"] * uneven
        name = "\n  ".join([escape(row.label), *notes])
        table.add_row(name, *marked, style=None if row.finished else "dim")
    return table


def markdown(rows: Sequence[Row]) -> str:
    """Return the table as Markdown, with its caption below; a value is bold where `leaders` says so."""
    columns = columns_for(trials_of(rows))
    best = [leaders(rows, metric) for metric in columns]
    lines = [
        "| method | seeds | " + " | ".join(metric.heading(trials_of(rows)) for metric in columns) + " |",
        "|:--|--:|" + "--:|" * len(columns),
    ]
    for i, row in enumerate(rows):
        values = [show_value(row, metric, rows) for metric in columns]
        marked = [f"**{text}**" if i in best[j] else text for j, text in enumerate(values)]
        seeds = str(len(row.seeds)) if row.finished else NOTHING
        lines.append("| " + " | ".join([_markdown_text(row.name), seeds, *marked]) + " |")
    return "\n".join([*lines, "", _below(rows), ""])


def rows_csv(rows: Sequence[Row]) -> str:
    """Return the table as CSV: one line per row, each metric's mean, standard deviation and number of seeds.

    The first and last round of the window stand beside them.

    Numbers are at full precision: fractions, seconds, bytes; what was not measured is empty.
    """
    header = ["method", "finished", "seeds", "rounds", "rounds_planned", "window_first", "window_last"]
    header += [f"{name}{part}" for name in METRICS for part in ("", "_std", "_n")]
    lines: list[list[str]] = [header]
    for row in rows:
        rounds = [
            _range(trial.rounds_done for trial in row.trials),
            _range(trial.rounds_planned for trial in row.trials),
        ]
        line = [row.label, _yes(row.finished), " ".join(map(str, row.seeds)), *rounds]
        line += map(str, row.trials[0].window_rounds)
        for metric in METRICS.values():
            spread = row.value(metric)
            line += [_number(spread.mean), _number(spread.std), str(spread.n)]
        lines.append(line)
    return _csv(lines)


def trials_csv(rows: Sequence[Row]) -> str:
    """Return one CSV line per method and seed at full precision, so that any other statistic can be computed."""
    header = ["method", "algorithm", "schedule", "seed", "finished", "rounds", "rounds_planned"]
    header += ["window_first", "window_last", *METRICS]
    counts = ["evaluations", "lost_clients", "refused_replies", "rolled_back_rounds", "total_bytes"]
    lines: list[list[str]] = [[*header, *counts]]
    for trial in (trial for row in rows for trial in row.trials):
        line = [trial.label, trial.algorithm, trial.schedule, str(trial.seed), _yes(trial.finished)]
        line += map(str, (trial.rounds_done, trial.rounds_planned, *trial.window_rounds))
        line += [_number(metric.of(trial)) for metric in METRICS.values()]
        line += [
            str(len(trial.evaluated)),
            str(len(trial.lost)),
            str(len(trial.refused)),
            str(len(trial.rolled_back)),
            str(trial.traffic),
        ]
        lines.append(line)
    return _csv(lines)


def _csv(lines: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _number(value: float) -> str:
    return "" if math.isnan(value) else repr(float(value))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _range(values: object) -> str:
    known = sorted(set(values))  # type: ignore[call-overload]
    return str(known[0]) if len(known) == 1 else f"{known[0]}-{known[-1]}"


def _markdown_text(text: str) -> str:
    """Keep a label from being read as Markdown or HTML."""
    for character in "\\`*_[]|":
        text = text.replace(character, "\\" + character)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
