"""A reproduced table as it is shown: in Markdown, CSV and HTML, and on a page of several."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedkeep._utils import escaping
from fedkeep._utils.files import atomic_write
from fedkeep.errors import ConfigError, did_you_mean
from fedkeep.reporting.comparison import ColumnResult, MethodResult, Reproduction, spread_of
from fedkeep.reporting.differences import EXPLANATION, show_difference
from fedkeep.reporting.metric import metric_of
from fedkeep.reporting.run_folder import method_of
from fedkeep.reporting.summary import Spread
from fedkeep.reporting.table import NOTHING, frozen, show
from fedkeep.reporting.templates import page

NOTES = "notes.md"
"""The file beside reproductions in which a person says something about them, under their names."""
CAPTION = (
    "Accuracy in %. Ours is the mean over the rounds that the head names, mean ± standard deviation over seeds, and "
    "the last evaluation beside it; ours minus the paper's is of the first. The last model of a sequence swings by "
    "several points. "
)
AVERAGES = (
    " Rounds to the paper's: the first evaluated round in which a model, or an average of a method's models, reached "
    "the accuracy that the paper has for the method."
)
TASKS = (
    "Accuracy in %. Ours is measured after each task, as the head of the column says, among all classes seen by then; "
    "mean ± standard deviation over seeds. The last is the share of all test images in the last evaluation. The "
    "difference to a method is of the mean over the rounds that the head before it names. "
)


def heads(column: ColumnResult) -> list[str]:
    """Return the titles of a column's table."""
    titles = ["method", "paper", f"ours, {column.heading}", "ours, last", "ours minus the paper's"]
    if column.deciding is not metric_of(column.measured[0]):
        titles.append(f"ours, {column.deciding.heading(column.run.trials)}")
    against = [] if column.reference is None else [f"minus {_label(column.reference)}, 95 %"]
    return [*titles, *against, "seeds", *further_heads(column)]


def caption(reproduction: Reproduction) -> str:
    """Say what the numbers are."""
    explained = EXPLANATION if any(column.reference is not None for column in reproduction.columns) else ""
    if any(column.has_tasks for column in reproduction.columns):
        return (TASKS + explained).strip()
    return (CAPTION + explained + AVERAGES * any(column.has_averages for column in reproduction.columns)).strip()


def texts(column: ColumnResult, line: MethodResult) -> list[str]:
    """Return a line as it is shown, under `heads`."""
    row = line.row
    done = f" ({row.note})" if row is not None and row.note else ""
    ours = [NOTHING, NOTHING] if row is None else [show(row.value(m), metric_of(m).unit) for m in (line.metric, "last")]
    to_paper = NOTHING if line.difference is None else f"{line.difference:+.2f}"
    gain = column.gain(line)
    against = [] if column.reference is None else [NOTHING if gain is None else show_difference(gain)]
    seeds = ", ".join(map(str, row.seeds)) if row is not None and row.finished else NOTHING
    decides = [] if row is None else [show(row.value(column.deciding), column.deciding.unit)]
    decides = (decides or [NOTHING]) * (column.deciding is not metric_of(column.measured[0]))
    start = [_label(line) + done, _paper(line.paper), *ours, to_paper]
    return [*start, *decides, *against, seeds, *further_texts(column, line)]


def _label(line: MethodResult) -> str:
    return line.label if line.row is None else line.row.label


def markdown(reproduction: Reproduction, level: int = 2) -> str:
    """Return the reproduction as Markdown, a section per column."""
    parts = [f"{'#' * level} {reproduction.title}", ""]
    if reproduction.notes:
        parts += [reproduction.notes, ""]
    for column in reproduction.columns:
        titles = [escaping.markdown(head) for head in heads(column)]
        parts += [f"{'#' * (level + 1)} {escaping.markdown(column.run.title)}", "", about(column), ""]
        shown = [texts(column, line) for line in column.lines]
        parts += ["| " + " | ".join(titles) + " |", "|:--|" + "--:|" * (len(titles) - 1)]
        parts += [f"| {' | '.join([escaping.markdown(first), *others])} |" for first, *others in shown]
        parts.append("")
    return "\n".join([*parts, caption(reproduction), ""])


def about(column: ColumnResult) -> str:
    """Say how far a column is, how its order compares, and which frozen networks it rests on."""
    return f"{column.scale}. {column.verdict}{frozen(column.run.trials)}"


def as_csv(reproduction: Reproduction) -> str:
    """Return the reproduction as CSV, one line per method and column, in percent at full precision."""
    measured = [name for column in reproduction.columns for name in column.measured]
    names = list(dict.fromkeys(("window_mean", "last", "best", "forgetting", *measured)))
    header = ["table", "column", "method", "finished", "seeds", "rounds", "window_first", "window_last"]
    header += ["paper", "paper_std", "difference", "against", "gain", "gain_low", "gain_high", "gain_from"]
    lines: list[list[str]] = [[*header, *(f"{name}{part}" for name in names for part in ("", "_std"))]]
    for column in reproduction.columns:
        for line in column.lines:
            row = line.row
            head = [reproduction.name, column.name, line.label if row is None else row.label]
            head += ["" if row is None else "yes" if row.finished else "no"]
            head += ["" if row is None else " ".join(map(str, row.seeds))]
            head += ["" if row is None else str(min(trial.rounds_done for trial in row.trials))]
            head += ["", ""] if row is None else map(str, row.trials[0].window_rounds)
            paper = [math.nan, math.nan] if line.paper is None else [line.paper.mean, line.paper.std]
            spreads = [row.value(name) if row else Spread.of(()) for name in names]
            ours = [100 * value for s in spreads for value in (s.mean, s.std)]
            to_paper = math.nan if line.difference is None else line.difference
            gain = column.gain(line)
            against = ["", "", "", "", ""]
            if gain is not None:
                ends = _numbers(100 * value for value in (gain.interval.mean, gain.interval.low, gain.interval.high))
                against = [gain.reference, *ends, "blocks" if gain.interval.blocks else "seeds"]
            lines.append([*head, *_numbers([*paper, to_paper]), *against, *_numbers(ours)])
    return escaping.csv_text(lines)


def _numbers(values: Iterable[float]) -> list[str]:
    return ["" if math.isnan(value) else repr(value) for value in values]


def html(reproduction: Reproduction) -> str:
    """Return the reproduction as one self-contained HTML page."""
    columns = [
        {"column": c, "about": about(c), "heads": heads(c), "lines": [texts(c, line) for line in c.lines]}
        for c in reproduction.columns
    ]
    return page(
        "reproduction.html.jinja", {"table": reproduction, "columns": columns, "caption": caption(reproduction)}
    )


def write(reproduction: Reproduction, folder: Path) -> None:
    """Write the reproduction into its folder: ``table.md``, ``table.csv`` and ``table.html``."""
    atomic_write(folder / "table.md", markdown(reproduction, level=1))
    atomic_write(folder / "table.csv", as_csv(reproduction))
    atomic_write(folder / "table.html", html(reproduction))


def overview(reproductions: Sequence[tuple[Reproduction, str]], command: str) -> str:
    """Return a page of several reproductions, each with what a person wrote about it, as Markdown."""
    parts = ["# Reproduction", ""]
    parts += [f"Written by `{command}` from the records in that folder; do not edit. What a person has to say about a"]
    parts += ["table stands in `notes.md` there.", ""]
    for reproduction, notes in reproductions:
        parts += [markdown(reproduction)]
        parts += [notes.strip(), ""] if notes.strip() else []
    return "\n".join(parts).rstrip() + "\n"


def read_notes(root: Path, names: Iterable[str], page: Path) -> dict[str, str]:
    """Return what a person wrote about reproductions: the sections of ``notes.md`` beside them.

    ``page``: The folder of the page that quotes the notes; relative links are written anew for it.
    """
    path, known = root / NOTES, list(names)
    _, *sections = re.split(r"^## ", f"\n{path.read_text(encoding='utf-8')}" if path.is_file() else "", flags=re.M)

    def moved(link: re.Match[str]) -> str:
        return link[0] if "://" in link[1] else f"]({Path(os.path.relpath(root / link[1], page)).as_posix()}"

    notes = {}
    for section in sections:
        name, _, text = section.partition("\n")
        if name.strip() not in known:
            hint = did_you_mean(name.strip(), known)
            raise ConfigError(f"{path} has a section {name.strip()!r}, but {root} holds no such reproduction.{hint}")
        notes[name.strip()] = re.sub(r"\]\(([^)#\s]+)", moved, text).strip()
    return notes


def further_heads(column: ColumnResult) -> list[str]:
    """Return the titles of the columns after the accuracies."""
    titles = []
    if "forgetting" in column.paper:
        titles += ["forgetting, paper", "forgetting, ours"]
    if "local_accuracy" in column.paper:
        titles += ["clients' models, paper", "clients' models, ours"]
    if column.forgets:
        titles.append("forgetting")
    if "rounds_to" in column.paper:
        titles += [f"rounds to {column.paper.get('target'):g} %, paper", "ours"]
    if "speedup" in column.paper:
        titles += [f"times as fast to {column.paper.get('target'):g} %, paper", "ours"]
    return titles + ["rounds to the paper's"] * column.has_averages


def further_texts(column: ColumnResult, line: MethodResult) -> list[str]:
    """Return what stands under `further_heads`."""
    texts = []
    for name in ("forgetting", "local_accuracy"):
        if name in column.paper:
            metric = column.measured[1] if name == "forgetting" else "local_last"
            ours = NOTHING if line.row is None else show(line.row.value(metric), "%")
            texts += [_paper(spread_of(column.paper[name], line.label)), ours]
    if column.forgets:
        texts.append(NOTHING if line.row is None else show(line.row.value(column.measured[1]), "%"))
    for name in ("rounds_to", "speedup"):
        if name in column.paper:
            paper = spread_of(column.paper[name], line.label)
            ours = _rounds_to(line, column.target) if name == "rounds_to" else _speedup(column, line)
            texts += [NOTHING if paper is None else f"{paper.mean:g}", ours]
    if column.has_averages:
        paper = spread_of(column.paper.get("accuracy", {}), method_of(line.label))
        texts.append(NOTHING if paper is None else _rounds_to(line, paper.mean / 100))
    return texts


def _rounds_to(line: MethodResult, target: float) -> str:
    """Return when a line first reached an accuracy, on average over the seeds that did."""
    trials = line.row.trials if line.row else ()
    reached = Spread.of(trial.rounds_to(target) for trial in trials)
    if not reached.n:
        return "not reached" if trials else NOTHING
    return f"{reached.mean:g}" + (f" ({reached.n} of {len(trials)} seeds)" if reached.n < len(trials) else "")


def _speedup(column: ColumnResult, line: MethodResult) -> str:
    """Return how many times as fast as the row with which the paper compares a line reached the target."""
    others = {
        trial.seed: trial
        for row in column.rows
        if column.paper["speedup"].get(row.label) == [1.0]
        for trial in row.trials
    }
    trials = line.row.trials if line.row else ()
    pairs = [(others[trial.seed], trial) for trial in trials if trial.seed in others]
    times = Spread.of(other.seconds_to(column.target) / trial.seconds_to(column.target) for other, trial in pairs)
    if not times.n:
        return NOTHING
    return f"{times.mean:.2f}" + (f" ({times.n} of {len(trials)} seeds)" if times.n < len(trials) else "")


def _paper(spread: Spread | None) -> str:
    if spread is None:
        return NOTHING
    return f"{spread.mean:.2f}" + ("" if math.isnan(spread.std) else f" ±{spread.std:.2f}")
