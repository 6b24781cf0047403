"""One row per method: the trials of one or several runs, grouped by label and settings, summed up over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from fedkeep import metrics
from fedkeep.errors import RunError, did_you_mean
from fedkeep.interface import algorithms
from fedkeep.options import options_of
from fedkeep.reporting.record import TAIL
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.trial import Trial

# What of a recipe says nothing about a method's result, or is already in the trial itself.
NOT_SETTINGS = frozenset({"title", "seeds", "paper", "methods", "data"})
NO_EFFECT = frozenset({"recipe.run.evaluate_visits", "recipe.run.served"})


@dataclass(frozen=True)
class Spread:
    """A mean over seeds, its sample standard deviation (ddof=1; NaN below two seeds) and the number of seeds."""

    mean: float
    std: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Sum up the values that were measured (not NaN)."""
        known = [value for value in values if not math.isnan(value)]
        return cls(*metrics.over_seeds(known), len(known))


@dataclass(frozen=True)
class Metric:
    """A column: what it is called, how a trial gives it, its unit, and which direction is better."""

    name: str
    title: str
    unit: str  # "%": a fraction shown in percent; "s"; "bytes"
    better: int = 0  # 1: higher, -1: lower, 0: no ranking

    def of(self, trial: Trial) -> float:
        """Return the value of one trial."""
        value: Callable[[Trial], float] = attrgetter(self.name)
        return value(trial)


COLUMNS = (
    Metric("tail", "mean of last 10 evaluations", "%", better=1),
    Metric("last", "last", "%", better=1),
    Metric("best", "best", "%", better=1),
    Metric("forgetting", "forgetting", "%", better=-1),
    Metric("train_seconds", "train s", "s"),
    Metric("down", "down / client / round", "bytes"),
    Metric("up", "up / client / round", "bytes"),
)
MORE = (Metric("swing", "swing in last 10", "%"), Metric("balanced", "mean over classes", "%", better=1))
VISITS = (  # only where every visit was evaluated
    Metric("visit_forgetting", "forgetting over visits", "%", better=-1),
    Metric("consistency", "consistency", "%", better=1),
    Metric("drift", "drift", "%", better=-1),
)
LOCAL = (  # likewise
    Metric("local_accuracy", "accuracy of local models", "%", better=1),
    Metric("local_last", "accuracy of local models, last", "%", better=1),
    Metric("kold_in", "inside own classes", "%", better=1),
    Metric("kold_in_spread", "inside, between clients", "%"),
    Metric("kold_out", "outside own classes", "%", better=1),
    Metric("kold_out_spread", "outside, between clients", "%"),
    Metric("seen", "seen classes", "%", better=1),
    Metric("unseen", "unseen classes", "%", better=1),
)
TASKS = (  # in the place of the first columns, where classes arrived in tasks
    Metric("task_accuracy", "after the last task", "%", better=1),
    Metric("incremental", "mean over tasks", "%", better=1),
    Metric("forgetting_chaudhry", "forgetting from the best", "%", better=-1),
    Metric("forgetting_fedskf", "forgetting a task", "%", better=-1),
)
MORE_TASKS = (
    Metric("forgetting_chaudhry_mean", "forgetting from the best, mean over tasks", "%", better=-1),
    Metric("backward", "backward transfer", "%", better=1),
)
METRICS: Mapping[str, Metric] = {
    metric.name: metric for metric in (*COLUMNS, *MORE, *VISITS, *LOCAL, *TASKS, *MORE_TASKS)
}


def has_tasks(rows: Iterable[Row]) -> bool:
    """Tell whether classes arrived in tasks."""
    return any(trial.task_sizes for row in rows for trial in row.trials)


def columns_for(rows: Iterable[Row]) -> tuple[Metric, ...]:
    """Return the columns of a table: with tasks, what is measured after each in place of the last evaluations."""
    return (*TASKS, *COLUMNS[4:]) if has_tasks(rows) else COLUMNS


def headline(rows: Iterable[Row]) -> tuple[Metric, Metric]:
    """Return the accuracy and the forgetting that methods are first compared by."""
    names = ("incremental", "forgetting_chaudhry") if has_tasks(rows) else ("tail", "forgetting")
    return METRICS[names[0]], METRICS[names[1]]


@dataclass(frozen=True)
class Row:
    """The finished trials of one method with one set of settings, or one unfinished trial."""

    label: str
    trials: tuple[Trial, ...]
    finished: bool = True

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds behind the row."""
        return tuple(trial.seed for trial in self.trials)

    @property
    def broken(self) -> bool:
        """Tell whether a round that the last ten evaluations rest on was undone: what they show is no result."""
        return any(trial.undone and trial.undone[-1] > min(trial.evaluated[-TAIL:], default=0) for trial in self.trials)

    @property
    def note(self) -> str:
        """Return how far an unfinished trial got, and how many rounds were undone; empty where all went well."""
        if self.finished:
            undone = [len(trial.undone) for trial in self.trials]
            most = f"{max(undone)} of {self.trials[0].rounds_planned} rounds undone"
            seeds = f" in {sum(map(bool, undone))} of {len(undone)} seeds" if len(undone) > 1 else ""
            return f"{most}{seeds}" if any(undone) else ""
        trial = self.trials[0]
        return f"seed {trial.seed}, {trial.rounds_done} of {trial.rounds_planned} rounds"

    @property
    def name(self) -> str:
        """Return the label, with the note if there is one."""
        return f"{self.label} ({self.note})" if self.note else self.label

    def value(self, metric: str | Metric) -> Spread:
        """Return one column of the row.

        Raises
        ------
        RunError
            For a name that is no metric.
        """
        return Spread.of(_metric(metric).of(trial) for trial in self.trials)


@dataclass(frozen=True)
class Difference:
    """What a method gained on the reference, seed by seed, on the seeds that both have."""

    label: str
    reference: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        """Return mean and standard deviation of the differences."""
        return Spread.of(self.values)


def summary(runs: Run | Iterable[Run]) -> list[Row]:
    """Return one row per method over its finished seeds, and one per unfinished trial right after.

    Across runs, trials of one label merge if their settings agree and their seeds differ; a seed that was repeated with
    the identical result counts once. Where settings differ, the label says in what; where only results differ, it names
    the run.

    Parameters
    ----------
    runs
        One run or several, in the order in which their methods are to appear.
    """
    runs = [runs] if isinstance(runs, Run) else list(runs)
    by_label: dict[str, list[tuple[Run, Trial]]] = {}
    for run in runs:
        for trial in run.trials:
            by_label.setdefault(trial.label, []).append((run, trial))
    rows: list[Row] = []
    for label, members in by_label.items():
        for name, trials in _distinguish(label, members).items():
            named = [replace(trial, label=name) for trial in sorted(trials, key=attrgetter("seed"))]
            if finished := tuple(trial for trial in named if trial.finished):
                rows.append(Row(name, finished))
            rows += [Row(name, (trial,), finished=False) for trial in named if not trial.finished]
    return rows


def once(rows: Iterable[Row]) -> list[Trial]:
    """Return the trials of rows; one whose averages stand in rows of their own too counts once, as the first."""
    trials = [trial for row in rows for trial in row.trials]
    return list({str(trial.path or id(trial)): trial for trial in reversed(trials)}.values())[::-1]


def paired(rows: Sequence[Row], reference: str, metric: str | Metric = "tail") -> list[Difference]:
    """Return each other finished method's gain on the reference, paired by seed.

    Pairing takes out what the seeds have in common (partition, initial weights, cohorts), so fewer seeds tell more.

    Raises
    ------
    RunError
        If no finished row is labelled `reference`, or `metric` is unknown.
    """
    metric = _metric(metric)
    table = {row.label: {trial.seed: metric.of(trial) for trial in row.trials} for row in rows if row.finished}
    named = {label.lower(): label for label in table}
    reference = named.get(reference.lower(), reference)
    variants = [label for label in table if label.lower().startswith(f"{reference.lower()} (")]
    if reference not in table and variants:
        raise RunError(f"{reference} was run with different settings. Name one: {'; '.join(variants)}.")
    if reference not in table:
        raise RunError(f"There is no finished method {reference!r} to compare with.{did_you_mean(reference, table)}")
    base = table[reference]
    differences = []
    for label, values in table.items():
        if label != reference:
            gains = metrics.paired(values, base)
            differences.append(Difference(label, reference, tuple(gains), tuple(gains.values())))
    return differences


def leaders(rows: Sequence[Row], metric: str | Metric) -> set[int]:
    """Return the indices of the finished rows with the best mean; empty where there is nothing to rank."""
    metric = _metric(metric)
    means = {i: metric.better * row.value(metric).mean for i, row in enumerate(rows) if row.finished}
    means = {i: round(mean, 5) for i, mean in means.items() if not math.isnan(mean)}
    if not metric.better or len(means) < 2 or len(set(means.values())) < 2:
        return set()
    return {i for i, mean in means.items() if mean == max(means.values())}


def _metric(metric: str | Metric) -> Metric:
    if isinstance(metric, Metric):
        return metric
    if metric not in METRICS:
        raise RunError(f"There is no metric {metric!r}.{did_you_mean(metric, METRICS)}")
    return METRICS[metric]


def _distinguish(label: str, members: Sequence[tuple[Run, Trial]]) -> dict[str, list[Trial]]:
    """Split the trials of one label into groups that may be averaged, each with a name that says what sets it apart."""
    groups: dict[tuple[tuple[str, str], ...], list[tuple[Run, Trial]]] = {}
    for run, trial in members:
        groups.setdefault(tuple(sorted(_settings(run, trial).items())), []).append((run, trial))
    tables = [dict(key) for key in groups]
    differing = sorted(
        {key for table in tables for key in table if any(other.get(key) != table[key] for other in tables)},
        key=lambda key: (key.count("."), key),
    )
    words_of = {key: _word(key) for key in differing}
    shown = [key for i, key in enumerate(differing) if words_of[key] not in [words_of[k] for k in differing[:i]]]
    named: dict[str, list[Trial]] = {}
    for table, group in zip(tables, groups.values(), strict=True):
        words = [f"{words_of[key]}={table.get(key, 'unset')}" for key in shown]
        for run_name, trials in _without_clashes(group).items():
            said = ", ".join(words + [f"run {run_name}"] * bool(run_name))
            named[f"{label} ({said})" if said else label] = trials
    return named


def _without_clashes(group: Sequence[tuple[Run, Trial]]) -> dict[str, list[Trial]]:
    """Return the group whole, repeated seeds once, or by run if a seed has two different results."""
    trials: dict[int, Trial] = {}
    for _, trial in group:
        same = trials.setdefault(trial.seed, trial)
        if same is not trial and (same.rounds, same.finished) != (trial.rounds, trial.finished):
            break
    else:
        return {"": list(trials.values())}
    paths = {run.path for run, _ in group}
    unique = len({path.name for path in paths}) == len(paths)
    split: dict[str, list[Trial]] = {}
    for run, trial in group:
        split.setdefault(run.path.name if unique else str(run.path), []).append(trial)
    return split


def _settings(run: Run, trial: Trial) -> dict[str, str]:
    """Return what a result depends on, apart from the seed, as flat texts."""
    partition = {key: trial.partition.get(key) for key in ("scheme", "settings") if key in trial.partition}
    of_trial = {key: trial.info[key] for key in ("rounds", "dataset", "clients", "cohort") if key in trial.info}
    recipe = {key: value for key, value in run.settings.items() if key not in NOT_SETTINGS}
    own = {"algorithm": trial.algorithm, "schedule": trial.schedule} | of_trial | _options(trial)
    flat = _flat(own) | _flat({"partition": partition})
    # A recipe repeats what the trial says, in its own place: the trial's word counts.
    flat = {f"recipe.{key}": text for key, text in _flat(recipe).items()} | flat
    return {key: text for key, text in flat.items() if key not in NO_EFFECT}


def _options(trial: Trial) -> dict[str, Any]:
    """Return a method's options; what its version did not have yet is at its default, which changes nothing."""
    known = algorithms().get(trial.algorithm)
    defaults = {name: field.default for name, field in options_of(known).items()} if known else {}
    return {name: value for name, value in defaults.items() if value is not None} | dict(trial.options)


def _word(key: str) -> str:
    """Return what a setting is called: ``lr`` for ``recipe.training.lr``, ``model`` for ``recipe.model.name``."""
    *before, last = key.split(".")
    return before[-1] if before and last in {"name", "scheme"} else last


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat
