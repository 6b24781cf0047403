"""A reproduced table beside the paper's: numbers, differences, the order of the methods."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path, PurePath
from typing import Any

from fedkeep._utils.files import atomic_write
from fedkeep._utils.templates import template
from fedkeep.errors import ConfigError, RunError, did_you_mean
from fedkeep.experiment.recipe import PAPER_METRICS, SECTIONS
from fedkeep.experiment.reproduce import NOTE, place_in, table_of
from fedkeep.reporting.metric import METRICS, Metric, headline, metric_of
from fedkeep.reporting.run_folder import Run, open_run, read_run, runs_in
from fedkeep.reporting.summary import Difference, Row, Spread, difference_or_reason, show_difference, summary
from fedkeep.reporting.table import EXPLANATION, NOTHING, TextTable, frozen, show
from fedkeep.reporting.trial import TrialResult, without_average

NOTES = "notes.md"
"""The file beside reproductions in which a person says something about them, under their names."""

Cell = Callable[["MethodResult"], str]


def cells(column: ColumnResult) -> list[tuple[str, Cell]]:
    """Return the columns of a column's table: each its title, and what stands in it of a method."""
    paper, (accuracy, forgetting), target = column.paper, column.measured, column.paper.get("target", math.nan)

    def name(line: MethodResult) -> str:
        return _label(line) + (f" ({line.row.note})" if line.row is not None and line.row.note else "")

    def ours(metric: str | Metric) -> Cell:
        unit = metric_of(metric).unit
        return lambda line: NOTHING if line.row is None else show(line.row.value(metric), unit)

    def printed(name: str) -> Cell:
        return lambda line: _paper(spread_of(paper[name], line.label) if line.is_printed else None)

    def printed_rounds(name: str) -> Cell:
        return lambda line: (
            f"{paper[name][line.label][0]:g}" if line.is_printed and line.label in paper[name] else NOTHING
        )

    def gain(line: MethodResult) -> str:
        found = column.gain(line)
        return NOTHING if found is None else show_difference(found)

    def seeds(line: MethodResult) -> str:
        return ", ".join(map(str, line.row.seeds)) if line.row is not None and line.row.finished else NOTHING

    def to_the_papers(line: MethodResult) -> str:
        reached = spread_of(paper.get("accuracy", {}), line.method)
        return NOTHING if reached is None else _rounds_to(line, reached.mean / 100)

    found: list[tuple[str, Cell]] = [
        ("method", name),
        ("paper", lambda line: _paper(line.paper)),
        (f"ours, {column.heading}", ours(accuracy)),
        ("ours, last", ours("last")),
        ("ours minus the paper's", lambda line: NOTHING if line.difference is None else f"{line.difference:+.2f}"),
    ]
    if column.deciding.name != accuracy:
        found.append((f"ours, {column.deciding.heading(column.run.trials)}", ours(column.deciding)))
    if column.reference is not None:
        found.append((f"minus {_label(column.reference)}, 95 %", gain))
    found.append(("seeds", seeds))
    if "forgetting" in paper:
        found += [("forgetting, paper", printed("forgetting")), ("forgetting, ours", ours(forgetting))]
    if "local_accuracy" in paper:
        found += [("clients' models, paper", printed("local_accuracy")), ("clients' models, ours", ours("local_last"))]
    if column.has_tasks and "forgetting" not in paper:  # of tasks it is shown, whether or not the paper prints it
        found.append(("forgetting", ours(forgetting)))
    if "rounds_to" in paper:
        found.append((f"rounds to {target:g} %, paper", printed_rounds("rounds_to")))
        found.append(("ours", lambda line: _rounds_to(line, target / 100)))
    if "speedup" in paper:
        found.append((f"times as fast to {target:g} %, paper", printed_rounds("speedup")))
        found.append(("ours", lambda line: _speedup(column, line, target / 100)))
    return found + [("rounds to the paper's", to_the_papers)] * column.has_averages


def check_measured(papers: Iterable[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` unless each ``paper.measured`` names two metrics that are shares, as printed numbers are."""
    wrong = []
    for measured in (paper.get("measured", MEASURED) for paper in papers):
        two = isinstance(measured, list | tuple) and [*map(type, measured)] == [str, str]
        wrong += [name for name in measured if metric_of(name).unit != "%"] if two else [measured]
    if wrong:
        percent = ", ".join(name for name, metric in METRICS.items() if metric.unit == "%")
        raise ConfigError(
            "paper.measured names two metrics, with which the paper's accuracy and forgetting are compared, such as "
            f"{list(MEASURED)}, and not {wrong[0]!r}. Each is one of: {percent}."
        )


def column_table(column: ColumnResult) -> TextTable:
    """Return a column's table; its note says how far it is, how its order compares, and on which networks it rests."""
    heads, shown = zip(*cells(column), strict=True)
    about = f"{column.scale}. {column.verdict}{frozen(column.run.trials)}"
    return TextTable(list(heads), [[cell(line) for cell in shown] for line in column.lines], about)


def _label(line: MethodResult) -> str:
    return line.label if line.row is None else line.row.label


def markdown(reproduction: Reproduction, level: int = 2) -> str:
    """Return the reproduction as Markdown, a section per column; at level 1 with what its tables show."""
    page = template("reporting", "reproduction.md.jinja")
    return page.render(reproduction=reproduction, level=level, column_table=column_table, explanation=EXPLANATION)


def write(reproduction: Reproduction, folder: Path) -> Path:
    """Write the reproduction into its folder as ``table.md``."""
    return atomic_write(folder / "table.md", markdown(reproduction, level=1))


def overview(reproductions: Sequence[tuple[Reproduction, str]], command: str) -> str:
    """Return a page of several reproductions, each with what a person wrote about it, as Markdown."""

    def anchor(title: str) -> str:
        return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")

    page, given = template("reporting", "reproductions.md.jinja"), {"reproductions": reproductions, "command": command}
    text = page.render(**given, anchor=anchor, column_table=column_table, explanation=EXPLANATION)
    return text.rstrip() + "\n"


def read_notes(root: Path, names: Iterable[str], page: Path) -> dict[str, str]:
    """Return what a person wrote about reproductions: the sections of ``notes.md`` beside them.

    ``page``: The folder of the page that quotes the notes; relative links are written anew for it.
    """
    path, known = root / NOTES, list(names)
    _, *sections = re.split(r"^## ", f"\n{path.read_text(encoding='utf-8')}" if path.is_file() else "", flags=re.M)

    def moved(link: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", link[1]):  # an address
            return link[0]
        return f"]({Path(os.path.relpath(root / link[1], page)).as_posix()}"

    notes = {}
    for section in sections:
        name, _, text = section.partition("\n")
        if name.strip() not in known:
            hint = did_you_mean(name.strip(), known)
            raise ConfigError(f"{path} has a section {name.strip()!r}, but {root} holds no such reproduction.{hint}")
        notes[name.strip()] = re.sub(r"\]\(([^)#\s]+)", moved, text).strip()
    return notes


def _rounds_to(line: MethodResult, target: float) -> str:
    """Return when a line first reached an accuracy, on average over the seeds that did."""
    trials = line.row.trials if line.row else ()
    reached = Spread.of(trial.rounds_to(target) for trial in trials)
    if not reached.n:
        return "not reached" if trials else NOTHING
    return f"{reached.mean:g}" + (f" ({reached.n} of {len(trials)} seeds)" if reached.n < len(trials) else "")


def _speedup(column: ColumnResult, line: MethodResult, target: float) -> str:
    """Return how many times as fast as the row with which the paper compares a line reached the target."""
    slow = [row for row in column.rows if column.paper["speedup"].get(row.label) == [1.0]]
    others = {trial.seed: trial for row in slow for trial in row.trials}
    trials = line.row.trials if line.row else ()
    pairs = [(others[trial.seed], trial) for trial in trials if trial.seed in others]
    times = Spread.of(other.seconds_to(target) / trial.seconds_to(target) for other, trial in pairs)
    if not times.n:
        return NOTHING
    return f"{times.mean:.2f}" + (f" ({times.n} of {len(trials)} seeds)" if times.n < len(trials) else "")


def _paper(spread: Spread | None) -> str:
    if spread is None:
        return NOTHING
    return f"{spread.mean:.2f}" + ("" if math.isnan(spread.std) else f" ±{spread.std:.2f}")


Numbers = Mapping[str, Sequence[float]]  # label to [mean] or [mean, standard deviation], in percent or rounds
MEASURED = ("window_mean", "forgetting")
"""What the paper's accuracy and forgetting are compared with, where a recipe's ``paper.measured`` names no others."""


@dataclass(frozen=True)
class MethodResult:
    """One method in one column of a table.

    ``paper``: The accuracy that the paper printed, in percent.
    ``row``: What we have of it.
    ``metric``: The metric by which ours is compared.
    ``is_printed``: Whether the line is one of the paper's; False for rows of ours beside them, also of the same label.
    """

    label: str
    paper: Spread | None
    row: Row | None
    metric: str = MEASURED[0]
    is_printed: bool = True

    @property
    def method(self) -> str:
        """Return the label without what it says of an average of the method's models."""
        return self.label if self.row is None else without_average(self.label, self.row.evaluation_model)

    @property
    def ours(self) -> Spread | None:
        """Return our accuracy, a fraction."""
        return None if self.row is None else self.row.value(self.metric)

    @property
    def difference(self) -> float | None:
        """Return ours minus the paper's in percentage points; None unless both are there, ours to the last round."""
        if self.paper is None or self.ours is None or not (self.row and self.row.finished):
            return None
        return 100 * self.ours.mean - self.paper.mean if self.ours.n else None


@dataclass(frozen=True)
class ColumnResult:
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
        accuracy, forgetting = self.paper.get("measured", MEASURED)
        return accuracy, forgetting

    @cached_property
    def rows(self) -> list[Row]:
        """Return our rows, finished or not."""
        return summary(self.run)

    def line(self, label: str) -> MethodResult:
        """Return what the paper and we have for a method; of one that was run on a grid the best, as in papers."""
        paper = spread_of(self.paper.get("accuracy", {}), label)
        methods = self.run.settings.get("methods", [])
        points = {str(method["label"]) for method in methods if method.get("grid_of") == label}
        rows = [row for row in self.rows if row.label == label or row.label in points]
        done = [row for row in rows if row.finished]
        if len(done) > 1:  # on seeds that all of them have, if there are such
            common = set.intersection(*(set(row.seeds) for row in done))
            done.sort(key=lambda row: _on(row, common or set(row.seeds), self.measured[0]))
        return MethodResult(label, paper, done[-1] if done else rows[0] if rows else None, self.measured[0])

    @cached_property
    def lines(self) -> list[MethodResult]:
        """Return the paper's methods in its order, then ours that it does not have."""
        printed = [label for name in PAPER_METRICS for label in self.paper.get(name, {})]
        lines = [self.line(label) for label in dict.fromkeys(printed)]
        used = [line.row for line in lines]
        ours = [row for row in self.rows if row not in used]
        return lines + [MethodResult(row.label, None, row, self.measured[0], is_printed=False) for row in ours]

    @property
    def heading(self) -> str:
        """Return what our accuracy is, with the rounds that it covers."""
        return metric_of(self.measured[0]).heading(self.run.trials)

    @cached_property
    def reference(self) -> MethodResult | None:
        """Return the finished method with which ours are compared: the one that is best in the paper.

        A recipe may name another in ``paper.against``. Where the paper prints no accuracy and no forgetting, it is the
        first that is finished.
        """
        done = [line for line in self.lines if line.row is not None and line.row.finished]
        named = [line for line in done if line.label == self.paper.get("against")]
        if named or not done:
            return named[0] if named else None
        name, sign = ("accuracy", 1) if self.paper.get("accuracy") else ("forgetting", -1)
        numbers = self.paper.get(name, {})
        printed = [line for line in done if line.is_printed and line.label in numbers]
        return max(printed, key=lambda line: sign * float(numbers[line.label][0]), default=done[0])

    @property
    def deciding(self) -> Metric:
        """Return the metric of the differences between ours: a mean over a window, whatever the paper reports."""
        return headline(self.run.trials)[0] if self.has_tasks else metric_of(self.measured[0])

    def gain(self, line: MethodResult) -> Difference | None:
        """Return what a method gained on the `reference`, paired by seed; None of the reference and without either."""
        base = self.reference
        if base is None or base.row is None or line.row is None or not line.row.finished or line.row is base.row:
            return None
        return difference_or_reason(line.row, base.row, self.deciding)

    @cached_property
    def agreement(self) -> tuple[int, int, int, int]:
        """Return how many pairs of methods come in the paper's order, of how many; and the same of clear pairs.

        By accuracy, or by forgetting where the paper prints only that, on the seeds that both have; without methods
        that have not learned, or of whose window a round was rolled back. A pair is clear if the paper prints standard
        deviations and separates it by more than twice the larger of them.
        """
        name = "accuracy" if "accuracy" in self.paper else "forgetting"
        metric = self.measured[name == "forgetting"]
        done = [
            (line.label, line.row)
            for line in self.lines
            if line.is_printed and line.row and line.row.finished and not line.row.trouble
        ]
        papers = [(spread_of(self.paper.get(name, {}), label), row) for label, row in done]
        known = [(paper, row) for paper, row in papers if paper is not None]
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
        printed = self.paper.get("accuracy") or self.paper.get("forgetting", {})
        lines = [line for line in self.lines if line.is_printed and line.label in printed]
        done = [line for line in lines if line.row and line.row.finished]
        left_out = [f"{line.label} ({line.row.trouble})" for line in done if line.row and line.row.trouble]
        without = f", without {' and '.join(left_out)}" if left_out else ""
        if not pairs:
            return f"There are no two finished methods to compare the order of{without}."
        if same == pairs:
            order = f"methods is the paper's, in all {pairs} pairs" if pairs > 1 else "two methods is the paper's"
            return f"The order of the {order}{without}."
        wide = f"; of those that the paper separates by more than two standard deviations, {clear_same} of {clear}"
        return f"In the paper's order: {same} of {pairs} pairs of methods{wide if clear else ''}{without}."

    @property
    def share(self) -> str:
        """Say which part of the rounds was run; nothing if it was all."""
        full, rounds = self.paper.get("rounds"), self.run.settings.get("run", {}).get("rounds")
        return f"{rounds} of {full} rounds" if full and full != rounds else ""

    @property
    def scale(self) -> str:
        """Say how much was run."""
        seeds = sorted({trial.seed for trial in self.run.trials if trial.finished})
        told = ", ".join(map(str, seeds)) if seeds else "none yet"
        best = any(line.paper and line.row and line.row.label != line.label for line in self.lines)
        grid = "; a method with values in brackets is the best of its grid on the test set, as papers print it"
        rounds = self.share or f"{self.run.settings.get('run', {}).get('rounds')} rounds"
        return f"{rounds}; finished {'seed' if len(seeds) == 1 else 'seeds'} {told}{grid * best}"

    @property
    def provenance(self) -> str:
        """Say which command ran it, and which revisions; nothing where the run does not tell."""
        info, trials = self.run.info, [trial for trial in self.run.trials if trial.finished]
        given, recipe = [str(word) for word in info.get("command", ())], PurePath(str(info.get("recipe", "")))
        if not given or not trials:
            return ""
        full, rounds = self.paper.get("rounds"), self.run.settings.get("run", {}).get("rounds")
        command = ["fedkeep", "reproduce", recipe.parent.as_posix(), "--columns", self.name]
        command += ["--rounds", f"{rounds / full:g}"] if self.share else []
        listed = self.run.settings.get("methods", [])
        grids = {method["label"]: method["grid_of"] for method in listed if method.get("grid_of")}
        by_label: dict[str, list[TrialResult]] = {}
        for trial in trials:  # --set changes labels
            by_label.setdefault(grids.get(trial.method, trial.method).partition(", changed: ")[0], []).append(trial)
        played: dict[str, list[str]] = {}  # by seeds: a later command may have added methods, or seeds of some
        for label, of_label in by_label.items():
            played.setdefault(",".join(map(str, sorted({trial.seed for trial in of_label}))), []).append(label)
        names = len(played) > 1 or any(word.partition("=")[0] == "--methods" for word in given)
        options = [
            pair
            for option in ("--use", "--set")
            for pair in pairwise([part for word in given for part in re.split(f"^({option})=", word) if part])
            if pair[0] == option
        ]
        sections = {label: {label.lower(), of_label[0].algorithm} for label, of_label in by_label.items()}
        device = ["--device", "cuda"] if str(info.get("device", "")).startswith("cuda") else []
        commands = []
        for of, labels in played.items():
            # What is set of methods that this command does not run would be refused.
            others = set().union(*sections.values()) - set().union(*(sections[label] for label in labels))
            words = [*command, "--seeds", of, *(["--methods", ",".join(labels)] * names), *["--grid"] * bool(grids)]
            others -= set(SECTIONS)
            words += [
                word
                for pair in options
                if pair[0] == "--use" or pair[1].partition(".")[0].lower() not in others
                for word in pair
            ]
            commands.append(f"`{shlex.join([*words, *device])}`")
        git = f" ({info['git']})" if info.get("git") else ""
        first = [f"FedKeep {info.get('fedkeep')}{git}"]  # early trials do not tell
        versions = sorted({version for trial in trials for version in trial.info.get("versions", first)})
        return f"Run with {' and '.join(commands)} by {'; '.join(versions)}."

    @property
    def has_tasks(self) -> bool:
        """Tell whether classes arrived in tasks."""
        return any(trial.task_sizes for trial in self.run.trials)

    @cached_property
    def has_averages(self) -> bool:
        """Tell whether averages were evaluated of models for which the paper prints an accuracy."""
        printed = self.paper.get("accuracy", {})
        averaged = any(row.label not in printed and row.method in printed for row in self.rows)
        return averaged and not self.has_tasks


@dataclass(frozen=True)
class Reproduction:
    """A reproduced table: its columns that were begun."""

    name: str
    columns: tuple[ColumnResult, ...]

    @property
    def title(self) -> str:
        """Return what the paper calls it, and which part of its rounds was run, if that is the same in all columns."""
        if not self.columns:
            return self.name
        shares = {column.share for column in self.columns}
        part = f", {shares.pop()}" if len(shares) == 1 and "" not in shares else ""
        return str(self.columns[0].paper.get("table", self.name)) + part

    @property
    def has_tasks(self) -> bool:
        """Tell whether classes arrive in tasks in a column."""
        return any(column.has_tasks for column in self.columns)

    @property
    def notes(self) -> str:
        """Return what the recipes say about reading this table."""
        return str(self.columns[0].paper.get("notes", "")) if self.columns else ""


def read_reproduction(folder: Path) -> Reproduction:
    """Read a reproduction: its columns are run folders beside each other, on disk or in an archive.

    ``folder``: What ``fedkeep reproduce`` wrote, or ``fedkeep archive`` of it.
    """
    columns = [ColumnResult(path.name, read_run(path)) for path in runs_in(folder)]
    if not columns:
        raise RunError(f"{folder} holds no column of a reproduction: there is no run folder in it.")
    order = columns[0].paper.get("columns", ())
    columns.sort(key=lambda column: place_in(order, column.name))
    note = open_run(folder) / NOTE
    if not note.is_file():
        raise RunError(f"nothing in {folder} says which table it reproduces: there is no {NOTE}.")
    return Reproduction(table_of(note), tuple(columns))


def spread_of(numbers: Numbers, label: str) -> Spread | None:
    """Return what a paper printed for a method, in its units; None if nothing."""
    if label not in numbers:
        return None
    mean, *std = numbers[label]
    return Spread(float(mean), float(std[0]) if std else math.nan, 0)


def _on(row: Row, seeds: set[int], metric: str) -> float:
    """Return a row's mean over some of its seeds."""
    return Spread.of(metric_of(metric).of(trial) for trial in row.trials if trial.seed in seeds).mean
