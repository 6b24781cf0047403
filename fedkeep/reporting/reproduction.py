"""A reproduced table beside the paper's: numbers, differences, and whether the methods come in the same order."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from fedkeep.files import write_whole
from fedkeep.reporting.pages import page
from fedkeep.reporting.rows import METRICS, Row, Spread, summary
from fedkeep.reporting.run_folder import Run, method_of, read_run
from fedkeep.reporting.table import NOTHING, frozen, show

Numbers = Mapping[str, Sequence[float]]  # label to [mean] or [mean, standard deviation], in percent or rounds


@dataclass(frozen=True)
class Line:
    """One method in one column: the paper's accuracy in percent, if it printed one, and ours by the metric ``of``."""

    label: str
    paper: Spread | None
    row: Row | None
    of: str = "tail"

    @property
    def ours(self) -> Spread | None:
        """Return our accuracy, a fraction; by default the mean over the last ten evaluations."""
        return None if self.row is None else self.row.value(self.of)

    @property
    def difference(self) -> float | None:
        """Return ours minus the paper's in percentage points; None unless both are there, ours to the last round."""
        if self.paper is None or self.ours is None or not (self.row and self.row.finished):
            return None
        return 100 * self.ours.mean - self.paper.mean


@dataclass(frozen=True)
class Column:
    """One column of a reproduced table, as far as it was run."""

    name: str
    run: Run

    @property
    def paper(self) -> Mapping[str, Any]:
        """Return the recipe's ``[paper]``."""
        found: Mapping[str, Any] = self.run.settings.get("paper", {})
        return found

    @property
    def measured(self) -> tuple[str, str]:
        """Return the metrics with which the paper's accuracy and forgetting are compared."""
        accuracy, forgetting = self.paper.get("measured", ("tail", "forgetting"))
        return accuracy, forgetting

    @cached_property
    def rows(self) -> list[Row]:
        """Return our rows, finished or not."""
        return summary(self.run)

    def line(self, label: str) -> Line:
        """Return what the paper and we have for a method; of one that was run on a grid the best, as in papers."""
        paper = _spread(self.paper.get("accuracy", {}), label)
        methods = self.run.settings.get("methods", [])
        points = {str(method["label"]) for method in methods if method.get("point_of") == label}
        rows = [row for row in self.rows if row.label == label or row.label in points]
        done = [row for row in rows if row.finished]
        if len(done) > 1:  # on seeds that all of them have, if there are such
            common = set.intersection(*(set(row.seeds) for row in done))
            done.sort(key=lambda row: _on(row, common or set(row.seeds), self.measured[0]))
        return Line(label, paper, done[-1] if done else rows[0] if rows else None, self.measured[0])

    @cached_property
    def lines(self) -> list[Line]:
        """Return the paper's methods in its order, then ours that it does not have."""
        printed = [label for name in PRINTED for label in self.paper.get(name, {})]
        lines = [self.line(label) for label in dict.fromkeys(printed)]
        used = [line.row for line in lines]
        return lines + [Line(row.label, None, row, self.measured[0]) for row in self.rows if row not in used]

    @cached_property
    def agreement(self) -> tuple[int, int, int, int]:
        """Return how many pairs of methods come in the paper's order, of how many; and the same of clear pairs.

        By accuracy, or by forgetting where the paper prints only that, on the seeds that both have. A pair is clear if
        the paper prints standard deviations and separates it by more than twice the larger of them.
        """
        name = "accuracy" if "accuracy" in self.paper else "forgetting"
        metric = self.measured[name == "forgetting"]
        known = []
        for line in self.lines:
            paper = _spread(self.paper.get(name, {}), line.label)
            if paper is not None and line.row is not None and line.row.finished:
                known.append((paper, line.row))
        same = pairs = clear_same = clear = 0
        for (paper, row), (other, rival) in combinations(known, 2):
            gap, common = paper.mean - other.mean, set(row.seeds) & set(rival.seeds)
            if not gap or not common:
                continue  # a tie of the paper's, or nothing to compare
            agrees = gap * (_on(row, common, metric) - _on(rival, common, metric)) > 0
            printed = not math.isnan(paper.std + other.std)
            wide = printed and abs(gap) > 2 * max(paper.std, other.std)
            same, pairs = same + agrees, pairs + 1
            clear_same, clear = clear_same + (wide and agrees), clear + wide
        return same, pairs, clear_same, clear

    @property
    def verdict(self) -> str:
        """Say in a sentence how the order of the methods compares with the paper's."""
        if not any(self.paper.get(name) for name in ("accuracy", "forgetting")):
            return "No accuracy or forgetting is printed for it."
        same, pairs, clear_same, clear = self.agreement
        if not pairs:
            return "There are no two finished methods to compare the order of."
        if same == pairs:
            return (
                f"The order of the methods is the paper's, in all {pairs} pairs."
                if pairs > 1
                else ("The order of the two methods is the paper's.")
            )
        wide = f"; of those that the paper separates by more than two standard deviations, {clear_same} of {clear}"
        return f"In the paper's order: {same} of {pairs} pairs of methods{wide if clear else ''}."

    @property
    def share(self) -> str:
        """Say which part of the rounds was run; nothing if it was all."""
        full = self.paper.get("rounds")
        return f"{self._rounds} of {full} rounds" if full and full != self._rounds else ""

    @property
    def _rounds(self) -> Any:
        return self.run.settings.get("run", {}).get("rounds")

    @property
    def scale(self) -> str:
        """Say how much was run."""
        seeds = sorted({cell.seed for cell in self.run.cells if cell.finished})
        told = ", ".join(map(str, seeds)) if seeds else "none yet"
        best = any(line.paper and line.row and line.row.label != line.label for line in self.lines)
        grid = "; a method with values in brackets is the best of its grid on the test set, as papers print it"
        rounds = self.share or f"{self._rounds} rounds"
        return f"{rounds}; finished {'seed' if len(seeds) == 1 else 'seeds'} {told}{grid * best}"

    def extras(self, line: Line) -> list[str]:
        """Return the further columns of `heads` for a line."""
        texts = []
        for name in ("forgetting", "clients"):
            if name in self.paper:
                metric = self.measured[1] if name == "forgetting" else "local_last"
                ours = NOTHING if line.row is None else show(line.row.value(metric), "%")
                texts += [_paper(_spread(self.paper[name], line.label)), ours]
        if self.forgets:
            texts.append(NOTHING if line.row is None else show(line.row.value(self.measured[1]), "%"))
        for name in ("rounds_to", "speedup"):
            if name in self.paper:
                paper = _spread(self.paper[name], line.label)
                ours = self._rounds_to(line, self.target) if name == "rounds_to" else self._speedup(line)
                texts += [NOTHING if paper is None else f"{paper.mean:g}", ours]
        if self.has_averages:
            paper = _spread(self.paper.get("accuracy", {}), method_of(line.label))
            texts.append(NOTHING if paper is None else self._rounds_to(line, paper.mean / 100))
        return texts

    @property
    def heads(self) -> list[str]:
        """Return the titles of the columns after the accuracies."""
        titles = []
        if "forgetting" in self.paper:
            titles += ["forgetting, paper", "forgetting, ours"]
        if "clients" in self.paper:
            titles += ["clients' models, paper", "clients' models, ours"]
        if self.forgets:
            titles.append("forgetting")
        if "rounds_to" in self.paper:
            titles += [f"rounds to {self.paper.get('target'):g} %, paper", "ours"]
        if "speedup" in self.paper:
            titles += [f"times as fast to {self.paper.get('target'):g} %, paper", "ours"]
        return titles + ["rounds to the paper's"] * self.has_averages

    @property
    def forgets(self) -> bool:
        """Return whether ours is a run of several tasks whose forgetting no paper prints."""
        return self.measured[0] != "tail" and "forgetting" not in self.paper

    @property
    def target(self) -> float:
        """Return the accuracy, a fraction, to which rounds or times are counted; NaN if there is none."""
        return float(self.paper.get("target", math.nan)) / 100

    @cached_property
    def has_averages(self) -> bool:
        """Tell whether averages were served of models for which the paper prints an accuracy."""
        printed = self.paper.get("accuracy", {})
        averaged = any(row.label not in printed and method_of(row.label) in printed for row in self.rows)
        return averaged and self.measured[0] == "tail"

    def _rounds_to(self, line: Line, target: float) -> str:
        """Return when a line first reached an accuracy, on average over the seeds that did."""
        cells = line.row.cells if line.row else ()
        reached = Spread.of(cell.rounds_to(target) for cell in cells)
        if not reached.n:
            return "not reached" if cells else NOTHING
        return f"{reached.mean:g}" + (f" ({reached.n} of {len(cells)} seeds)" if reached.n < len(cells) else "")

    def _speedup(self, line: Line) -> str:
        """Return how many times as fast as the row with which the paper compares a line reached the target."""
        others = {
            cell.seed: cell for row in self.rows if self.paper["speedup"].get(row.label) == [1.0] for cell in row.cells
        }
        pairs = [(others[cell.seed], cell) for cell in (line.row.cells if line.row else ()) if cell.seed in others]
        times = Spread.of(other.seconds_to(self.target) / cell.seconds_to(self.target) for other, cell in pairs)
        return f"{times.mean:.2f}" if times.n else NOTHING


@dataclass(frozen=True)
class Reproduction:
    """A reproduced table: its columns that were begun."""

    name: str
    columns: tuple[Column, ...]

    @property
    def title(self) -> str:
        """Return what the paper calls it, and which part of its rounds was run, if that is the same in all columns."""
        if not self.columns:
            return self.name
        shares = {column.share for column in self.columns}
        part = f", {shares.pop()}" if len(shares) == 1 and "" not in shares else ""
        return str(self.columns[0].paper.get("table", self.name)) + part

    @property
    def notes(self) -> str:
        """Return what the recipes say about reading this table."""
        return str(self.columns[0].paper.get("notes", "")) if self.columns else ""


PRINTED = ("accuracy", "forgetting", "clients", "rounds_to", "speedup")  # what a recipe may hold of a paper's numbers
CAPTION = (
    "Accuracy in %. Ours is the mean over the last ten evaluations, mean ± standard deviation over seeds, and the last "
    "evaluation beside it; the difference is of the first. The last model of a sequence swings by several points."
)
AVERAGES = (
    " Rounds to the paper's: the first evaluated round in which a model, or an average of a method's models, reached "
    "the accuracy that the paper has for the method."
)
TASKS = (
    "Accuracy in %. Ours is measured after each task, as the head of the column says, among all classes seen by then; "
    "mean ± standard deviation over seeds. The last is the share of all test images in the last evaluation."
)


def read(name: str, columns: Mapping[str, Path]) -> Reproduction:
    """Read a reproduction from its columns' run folders."""
    return Reproduction(name, tuple(Column(column, read_run(folder)) for column, folder in columns.items()))


def heads(column: Column) -> list[str]:
    """Return the titles of a column's table."""
    metric = METRICS[column.measured[0]].title.removesuffix(" evaluations")
    return ["method", "paper", f"ours, {metric}", "ours, last", "difference", "seeds", *column.heads]


def caption(reproduction: Reproduction) -> str:
    """Say what the numbers are."""
    if any(column.measured[0] != "tail" for column in reproduction.columns):
        return TASKS
    return CAPTION + AVERAGES * any(column.has_averages for column in reproduction.columns)


def texts(column: Column, line: Line) -> list[str]:
    """Return a line as it is shown, under `heads`."""
    row = line.row
    done = "" if row is None or row.finished else f" ({row.note})"
    ours = [NOTHING, NOTHING] if row is None else [show(row.value(m), METRICS[m].unit) for m in (line.of, "last")]
    difference = NOTHING if line.difference is None else f"{line.difference:+.2f}"
    label = line.label if row is None else row.label
    seeds = ", ".join(map(str, row.seeds)) if row is not None and row.finished else NOTHING
    return [label + done, _paper(line.paper), *ours, difference, seeds, *column.extras(line)]


def markdown(reproduction: Reproduction, level: int = 2) -> str:
    """Return the reproduction as Markdown, a section per column."""
    parts = [f"{'#' * level} {reproduction.title}", ""]
    if reproduction.notes:
        parts += [reproduction.notes, ""]
    for column in reproduction.columns:
        titles = heads(column)
        parts += [f"{'#' * (level + 1)} {column.run.title}", "", about(column), ""]
        parts += ["| " + " | ".join(titles) + " |", "|:--|" + "--:|" * (len(titles) - 1)]
        parts += ["| " + " | ".join(texts(column, line)) + " |" for line in column.lines]
        parts.append("")
    return "\n".join([*parts, caption(reproduction), ""])


def about(column: Column) -> str:
    """Say how far a column is, how its order compares, and which frozen networks it rests on."""
    return f"{column.scale}. {column.verdict}{frozen(column.run.cells)}"


def as_csv(reproduction: Reproduction) -> str:
    """Return the reproduction as CSV, one line per method and column, in percent at full precision."""
    measured = [name for column in reproduction.columns for name in column.measured]
    names = list(dict.fromkeys(("tail", "last", "best", "forgetting", *measured)))
    header = ["table", "column", "method", "finished", "seeds", "rounds", "paper", "paper_std", "difference"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*header, *(f"{name}{part}" for name in names for part in ("", "_std"))])
    for column in reproduction.columns:
        for line in column.lines:
            row = line.row
            head = [reproduction.name, column.name, line.label if row is None else row.label]
            head += ["" if row is None else "yes" if row.finished else "no"]
            head += ["" if row is None else " ".join(map(str, row.seeds))]
            head += ["" if row is None else str(min(cell.rounds_done for cell in row.cells))]
            paper = [math.nan, math.nan] if line.paper is None else [line.paper.mean, line.paper.std]
            spreads = [row.value(name) if row else Spread.of(()) for name in names]
            ours = [100 * value for s in spreads for value in (s.mean, s.std)]
            numbers = [*paper, math.nan if line.difference is None else line.difference, *ours]
            writer.writerow([*head, *("" if math.isnan(value) else repr(value) for value in numbers)])
    return out.getvalue()


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
    write_whole(folder / "table.md", markdown(reproduction, level=1))
    write_whole(folder / "table.csv", as_csv(reproduction))
    write_whole(folder / "table.html", html(reproduction))


def overview(reproductions: Sequence[tuple[Reproduction, str]], command: str) -> str:
    """Return a page of several reproductions, each with what a person wrote about it, as Markdown."""
    parts = ["# Reproduction", ""]
    parts += [f"Written by `{command}` from the records beside it; do not edit. What a person has to say about a table"]
    parts += ["stands in `notes.md` in its folder.", ""]
    for reproduction, notes in reproductions:
        parts += [markdown(reproduction)]
        parts += [notes.strip(), ""] if notes.strip() else []
    return "\n".join(parts).rstrip() + "\n"


def _spread(numbers: Numbers, label: str) -> Spread | None:
    if label not in numbers:
        return None
    mean, *std = numbers[label]
    return Spread(float(mean), float(std[0]) if std else math.nan, 0)


def _paper(spread: Spread | None) -> str:
    if spread is None:
        return NOTHING
    return f"{spread.mean:.2f}" + ("" if math.isnan(spread.std) else f" ±{spread.std:.2f}")


def _on(row: Row, seeds: set[int], metric: str) -> float:
    """Return a row's mean over some of its seeds."""
    return Spread.of(METRICS[metric].of(cell) for cell in row.cells if cell.seed in seeds).mean
