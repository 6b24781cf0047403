"""One row per method: the trials of one or several runs, grouped by label and settings, summed up over seeds.

Rows are compared seed by seed: what a method gains on another, and whether the two are separated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from fedkeep import metrics
from fedkeep.data import DataOptions
from fedkeep.errors import RunError, did_you_mean
from fedkeep.experiment.provenance import NOT_SETTINGS
from fedkeep.experiment.recipe import OPTIONS
from fedkeep.experiment.recipe_loader import GONE
from fedkeep.interface import algorithms
from fedkeep.options import as_table, options_of
from fedkeep.reporting.metric import LoggedMetric, Metric, metric_of, show_number
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.trial import TrialResult, without_average
from fedkeep.rounds.run_settings import EvaluationModel
from fedkeep.training.pooled import PooledTraining

NO_EFFECT = [f"recipe.run.{n}" for n in ("evaluate_local_models", "evaluation_models", "evaluation_window", "metric")]

DEFAULTS = {
    name: as_table(options())
    for name, options in {**OPTIONS, "data": DataOptions, "pretraining": PooledTraining}.items()
}
"""The options of each section at their defaults."""


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
        return cls(*metrics.mean_std(known), len(known))


@dataclass(frozen=True)
class Row:
    """The finished trials of one method with one set of settings, or one unfinished trial."""

    label: str
    trials: tuple[TrialResult, ...]
    finished: bool = True

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds behind the row."""
        return tuple(trial.seed for trial in self.trials)

    @property
    def method(self) -> str:
        """Return the label without what it says of an average of the method's models."""
        return without_average(self.label, self.evaluation_model)

    @property
    def evaluation_model(self) -> EvaluationModel:
        """Return of which of the method's models the row is."""
        return self.trials[0].evaluation_model if self.trials else "last"

    @property
    def broken(self) -> bool:
        """Tell whether a round of the window was rolled back: what the window shows is then no result."""
        return any(n in window for trial in self.trials for window in trial.windows for n in trial.rolled_back)

    @property
    def learned(self) -> bool:
        """Tell whether the method has learned with every seed: otherwise it is compared with no other."""
        return all(trial.learned for trial in self.trials)

    @property
    def trouble(self) -> str:
        """Say in a few words why the row is compared with no other; empty where it is."""
        said = next((trial.trouble for trial in self.trials if trial.trouble), "")
        return said or "rolled back" * self.broken

    @property
    def note(self) -> str:
        """Return how far an unfinished trial got, or how finished ones ended early or went wrong; else empty."""
        if not self.finished:
            trial = self.trials[0]
            return f"seed {trial.seed}, {trial.rounds_done} of {trial.rounds_planned} rounds"
        counts = [len(trial.rolled_back) for trial in self.trials]
        said = []
        if ended := sorted(trial.rounds_done for trial in self.trials if trial.ended_early):
            after = " to ".join(map(str, dict.fromkeys((ended[0], ended[-1]))))
            said.append(f"ended after {after} of {self.trials[0].info['rounds']} rounds{self._share(len(ended))}")
        for trouble in dict.fromkeys(trial.trouble for trial in self.trials if trial.trouble):
            said.append(trouble + self._share(sum(trial.trouble == trouble for trial in self.trials)))
        if any(counts):
            most = f"{max(counts)} of {self.trials[0].rounds_planned} rounds rolled back"
            said.append(most + self._share(sum(map(bool, counts))))
        return ", ".join(said)

    def _share(self, count: int) -> str:
        """Return in how many of its seeds something happened; empty of one seed."""
        return f" in {count} of {len(self.trials)} seeds" if len(self.trials) > 1 else ""

    @property
    def name(self) -> str:
        """Return the label, with the note if there is one."""
        return f"{self.label} ({self.note})" if self.note else self.label

    def value(self, metric: str | Metric) -> Spread:
        """Return one column of the row; raise `RunError` for a name that is no metric."""
        return Spread.of(metric_of(metric).of(trial) for trial in self.trials)

    def interval(self, metric: str | Metric) -> metrics.Interval:
        """Return the mean of one column with its 95 % interval.

        It is over seeds; of one seed over blocks of the window's evaluations, if the column is their mean.
        """
        metric = metric_of(metric)
        if len(self.trials) == 1 and metric.series:
            return within_one_seed(metric.by_round(self.trials[0]), self.trials[0])
        values = (metric.of(trial) for trial in self.trials)
        return metrics.t_interval(value for value in values if not math.isnan(value))


def within_one_seed(values: Mapping[int, float], *trials: TrialResult) -> metrics.Interval:
    """Return the mean of values by round of trials with one seed, with an interval over blocks of whole turns.

    Moving averages of neighbouring rounds have most models in common. In simulations of such series, blocks of three
    times their memory leave out a mean of 0 in 4 to 11 % of the cases at a nominal 5 %, and short blocks in up to 44 %.
    """
    rounds = list(values)
    spacing = float(np.median(np.diff(rounds))) if len(rounds) > 1 else 1.0
    turn = max(max(round(trial.window.turn / spacing) for trial in trials), 1)
    memory = max(trial.window.memory for trial in trials)
    return metrics.block_interval(list(values.values()), turn=turn, shortest=max(math.ceil(3 * memory / spacing), 2))


MAX_WORDS = 4
"""If runs differ in more settings than these, rows are called by their runs instead."""


def summary(runs: Run | Iterable[Run]) -> list[Row]:
    """Return one row per method over its finished seeds, and one per unfinished trial right after.

    Across runs, trials of one label merge if their settings agree and their seeds differ; a seed that was repeated with
    the identical result counts once. Where settings differ, the label says in what; where only results differ, it names
    the run.

    ``runs``: One run or several, in the order in which their methods are to appear.
    """
    runs = [runs] if isinstance(runs, Run) else list(runs)
    # Windows are of whole turns where one method takes turns, in whichever run it is.
    turn = max((trial.window.turn for run in runs for trial in run.trials), default=1)
    by_label: dict[str, list[tuple[Run, TrialResult]]] = {}
    for run in runs:
        for trial in run.trials:
            in_turns = replace(trial, window=replace(trial.window, turn=turn))
            by_label.setdefault(trial.label, []).append((run, in_turns))
    rows: list[Row] = []
    for label, members in by_label.items():
        for name, trials in _distinguish(label, members).items():
            named = [replace(trial, label=name) for trial in sorted(trials, key=attrgetter("seed"))]
            if finished := tuple(trial for trial in named if trial.finished):
                rows.append(Row(name, finished))
            rows += [Row(name, (trial,), finished=False) for trial in named if not trial.finished]
    return rows


def trials_of(rows: Iterable[Row]) -> list[TrialResult]:
    """Return the trials of rows, in order."""
    return [trial for row in rows for trial in row.trials]


def deduplicate(trials: Iterable[TrialResult]) -> list[TrialResult]:
    """Return each trial once, as the first: its averages, which train nothing, have rows of their own."""
    first: dict[str, TrialResult] = {}
    for trial in trials:
        first.setdefault(str(trial.path or id(trial)), trial)
    return [*first.values()]


def label_of(method: str, by_label: Mapping[str, Sequence[TrialResult]], run: Run, state: str = "") -> str:
    """Return the label that a user means by a label or by the name of a method; an average stands beside its method.

    ``by_label``: The trials to choose from.
    ``state``: What errors call these trials, such as ``"finished "``.

    Raises `RunError` if there is none, or several.
    """
    found = labels_meant(method, by_label)
    if len(found) > 1:
        raise RunError(f"{run.path} has several rows of {method!r}. Name one by its label: {'; '.join(found)}.")
    if not found:
        raise RunError(f"{run.path} has no {state}method {method!r}.{did_you_mean(method, by_label)}")
    return found[0]


def labels_meant(name: str, by_label: Mapping[str, Sequence[TrialResult]]) -> list[str]:
    """Return the labels that a user may mean by a label, also without its settings, or by the name of a method."""
    name = name.casefold()
    if labelled := [label for label in by_label if label.casefold() == name]:
        return labelled
    found = [
        label
        for label, trials in by_label.items()
        if label.casefold().startswith(f"{name} (") or trials[0].algorithm.casefold() == name
    ]
    return [label for label in found if by_label[label][0].evaluation_model == "last"] or found


def _distinguish(label: str, members: Sequence[tuple[Run, TrialResult]]) -> dict[str, list[TrialResult]]:
    """Split the trials of one label into groups that may be averaged, each with a name that says what sets it apart."""
    groups: dict[tuple[tuple[str, str], ...], list[tuple[Run, TrialResult]]] = {}
    settings = [_settings(run, trial) for run, trial in members]
    # When a callback ended a seed is a result; that there is a callback is a setting.
    ending = {run.path for run, trial in members if trial.ended_early}
    for of, (run, trial) in zip(settings, members, strict=True):
        if run.path in ending:
            of["window"] = f"{_rounds(replace(trial, finished=False))}, may end early"
    # Older runs do not tell the code of a method or loss: then nothing says that it differs.
    untold = {name for name in ("code", "loss") if not all(name in of for of in settings)}
    for member, of in zip(members, settings, strict=True):
        groups.setdefault(tuple(sorted((k, v) for k, v in of.items() if k not in untold)), []).append(member)
    tables = [dict(key) for key in groups]
    differing = sorted(
        {key for table in tables for key in table if any(other.get(key) != table[key] for other in tables)},
        key=lambda key: (key.count("."), key),
    )
    words_of = {key: _word(key) for key in differing}
    shown = [key for i, key in enumerate(differing) if words_of[key] not in [words_of[k] for k in differing[:i]]]
    if "rounds" in shown and "window" in shown:
        shown.remove("window")  # it mostly follows
    named: dict[str, list[TrialResult]] = {}
    run_names = [{run.path.name for run, _ in group} for group in groups.values()]
    by_run = len(shown) > MAX_WORDS and len(set().union(*run_names)) == sum(map(len, run_names)) == len(groups)
    for table, group in zip(tables, groups.values(), strict=True):
        words = [f"{words_of[key]}={table.get(key, 'unset')}" for key in shown]
        alike = [other for other in tables if all(other.get(key) == table.get(key) for key in shown)]
        # What no word above tells apart is named in full.
        words += [
            f"{key.removeprefix('recipe.')}={table.get(key, 'unset')}"
            for key in differing
            if key not in shown and any(other.get(key) != table.get(key) for other in alike)
        ]
        if by_run:
            words = [f"run {group[0][0].path.name}"]
        for run_name, trials in _without_clashes(group).items():
            said = ", ".join(words + [f"run {run_name}"] * bool(run_name))
            named[f"{label} ({said})" if said else label] = trials
    return named


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Return a line for each setting that all trials of a run share and that another run has otherwise."""
    shared = []
    for run in runs:
        first, *others = (_settings(run, trial) for trial in run.trials) if run.trials else ({},)
        shared.append({key: text for key, text in first.items() if all(other.get(key) == text for other in others)})
    keys = [key for key in dict.fromkeys(key for of in shared for key in of) if key not in ("window", "data")]
    lines: dict[str, str] = {}
    for key in keys:
        values = [of.get(key, "–") for of in shared]
        if len(set(values)) > 1:
            word, said = _word(key), " | ".join(values)
            if lines.get(word, said) != said:
                word = key.removeprefix("recipe.")
            lines[word] = said
    return [f"{word}: {said}" for word, said in lines.items()]


def _without_clashes(group: Sequence[tuple[Run, TrialResult]]) -> dict[str, list[TrialResult]]:
    """Return the group whole, repeated seeds once, or by run if a seed has two different results."""
    trials: dict[int, TrialResult] = {}
    for _, trial in group:
        same = trials.setdefault(trial.seed, trial)
        if same is not trial and (same.rounds, same.finished) != (trial.rounds, trial.finished):
            break
    else:
        return {"": list(trials.values())}
    paths = {run.path for run, _ in group}
    unique = len({path.name for path in paths}) == len(paths)
    split: dict[str, list[TrialResult]] = {}
    for run, trial in group:
        split.setdefault(run.path.name if unique else str(run.path), []).append(trial)
    return split


def _settings(run: Run, trial: TrialResult) -> dict[str, str]:
    """Return what a result depends on, apart from the seed, as flat texts."""
    partition = {key: trial.partition.get(key) for key in ("scheme", "settings") if key in trial.partition}
    if trial.partition.get("tasks"):  # the first task's part of min_size depends on the seed; the recipe has the whole
        of_all = partition.get("settings") or {}
        partition["settings"] = {key: value for key, value in of_all.items() if key != "min_size"}
    of_trial = {k: trial.info[k] for k in ("rounds", "dataset", "num_clients", "cohort_size") if k in trial.info}
    # A section that a version did not know, or that was left out, is at its defaults.
    written: dict[str, Any] = {name: {} for name in ("data", *OPTIONS)} | dict(run.settings)
    recipe = {key: _section(key, value) for key, value in written.items() if key not in NOT_SETTINGS}
    recipe["training"] = {**recipe["training"], **trial.info.get("training", {})}  # the method's own
    own = {"algorithm": trial.algorithm, "sequential": trial.sequential, "window": _rounds(trial)} | of_trial
    flat = _flat(own | _options(trial)) | _flat({"partition": partition})
    # A recipe repeats what the trial says, in its own place: the trial's word counts.
    flat = {f"recipe.{key}": text for key, text in _flat(recipe).items()} | flat
    flat |= {name: digest for name, digest in input_digests(run, trial).items() if digest}
    return {key: text for key, text in flat.items() if key not in NO_EFFECT}


def _rounds(trial: TrialResult) -> str:
    return "-".join(map(str, trial.window_rounds))


def input_digests(run: Run, trial: TrialResult) -> dict[str, str]:
    """Return the digests of what is the user's own; empty where there is none, or none was recorded."""
    network, methods, losses = (run.info.get(name) or {} for name in ("network", "own_methods", "own_losses"))
    training = dict(run.settings.get("training", {})) | trial.info.get("training", {})
    return {
        "data": str(trial.info.get("dependencies", {}).get("data set", "")),
        "network": str(network.get("digest", "")),
        "weights": str((trial.info.get("initial_model") or {}).get("weights", "")),
        "code": "".join(methods.get(trial.algorithm, {}).values()),
        "loss": str(losses.get(training.get("loss"), "")),
    }


def _section(name: str, written: Any) -> Any:
    """Return a section of a recipe; what its version did not have yet is at its default, which changes nothing."""
    if name == "data" and isinstance(written, Mapping):  # its name may be a path: the trial has the data set's own
        return {"validation": 0.0} | DEFAULTS["data"] | {k: v for k, v in written.items() if k != "name"}
    if name == "model" and isinstance(written, Mapping):
        pretraining = DEFAULTS["pretraining"] | dict(written.get("pretraining", {}))
        return {k: v for k, v in written.items() if k != "weights"} | {"pretraining": pretraining}
    if name not in OPTIONS or not isinstance(written, Mapping):
        return written
    section = DEFAULTS[name] | {k: v for k, v in written.items() if GONE.get((name, k)) != v}
    # The options of a check that is off do nothing, and their defaults have changed.
    off = ("loss_examples", "loss_slack", "logit_deviations", "rerun_distance")
    return {key: value for key, value in section.items() if section.get("loss_check") != "off" or key not in off}


def _options(trial: TrialResult) -> dict[str, Any]:
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


@dataclass(frozen=True)
class Difference:
    """What a method gained on the reference, on the seeds that both have.

    ``label``, ``reference``: Of the two methods.
    ``values``: The difference with each of these seeds.
    ``interval``: Their mean with its confidence interval.
    ``reason``: Why there are no values; empty where there are, and without a seed that both have.
    ``unit``: Of the metric.
    """

    label: str
    reference: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    interval: metrics.Interval
    reason: str = ""
    unit: str = "%"

    def __str__(self) -> str:
        """Return it in few characters, such as ``"FedSeq minus FedAvg: +1.94 [+0.51, +3.37]"``, in percent."""
        return f"{self.label} minus {self.reference}: {show_difference(self)}"


def difference(row: Row, reference: Row, metric: str | Metric) -> Difference:
    """Return what one row gained on another, paired by seed.

    Pairing takes out what the seeds have in common (partition, initial weights, cohorts), so fewer seeds tell more.

    ``row``, ``reference``: Trials that differ in what was measured are not compared: there is then no seed.
    Returns: With an interval over seeds, or, of one seed, over blocks of the window's evaluations if the metric is
        their mean.
    """
    metric = metric_of(metric)
    ours, theirs = ({trial.seed: trial for trial in side.trials} for side in (row, reference))
    pairs = {seed: (trial, theirs[seed]) for seed, trial in ours.items() if seed in theirs}
    reasons = {seed: _mismatch(*pair, metric) for seed, pair in pairs.items()}
    pairs = {seed: pair for seed, pair in pairs.items() if not reasons[seed]}
    gains = {seed: metric.of(a) - metric.of(b) for seed, (a, b) in pairs.items()}
    gains = {seed: gain for seed, gain in gains.items() if not math.isnan(gain)}
    interval = metrics.t_interval(gains.values())
    if len(gains) == 1 and metric.series:
        trial, other = pairs[next(iter(gains))]
        interval = within_one_seed(metrics.paired(metric.by_round(trial), metric.by_round(other)), trial, other)
    reason = "" if pairs else next((f"not comparable: {reason}" for reason in reasons.values()), "")
    return Difference(row.label, reference.label, tuple(gains), tuple(gains.values()), interval, reason, metric.unit)


def _mismatch(trial: TrialResult, other: TrialResult, metric: Metric) -> str:
    """Say in what two trials differ so that no method can be told from it; empty where they are comparable."""
    if trial.info.get("dataset") != other.info.get("dataset"):
        return "other data"
    digests = [one.info.get("dependencies", {}).get("data set") for one in (trial, other)]
    if all(digests) and digests[0] != digests[1]:
        return "other data"
    if trial.info.get("test_total") != other.info.get("test_total"):
        return "other test examples"
    ours, theirs = trial.partition, other.partition
    same = ours.get("hash") and ours.get("hash") == theirs.get("hash")  # whatever versions call its settings
    if not same and any(ours.get(key) != theirs.get(key) for key in ("scheme", "settings")):
        return "other partition"
    if isinstance(metric, LoggedMetric) and (without := [one for one in (trial, other) if not metric.by_round(one)]):
        return f"{' and '.join(one.label for one in without)} recorded no {metric.title} in the window"
    if metric.covers_window and trial.window_rounds != other.window_rounds:
        return "windows differ" + ", since a trial ended early" * (trial.ended_early or other.ended_early)
    # The best of more evaluations is higher, and what is lost since then is more.
    rounds = [metric.by_round(one).keys() for one in (trial, other)]
    if (metric.of_history and trial.evaluated.tolist() != other.evaluated.tolist()) or rounds[0] != rounds[1]:
        return "evaluated in other rounds"
    return ""


def difference_or_reason(row: Row, reference: Row, metric: str | Metric) -> Difference:
    """Return the `difference` of two rows, or why there is none, such as ``at chance``."""
    if not (trouble := row.trouble or (reference.trouble and f"reference {reference.trouble}")):
        return difference(row, reference, metric)
    return Difference(row.label, reference.label, (), (), metrics.t_interval(()), trouble)


def differences(rows: Sequence[Row], reference: str, metric: str | Metric = "window_mean") -> list[Difference]:
    """Return each other finished method's difference to the reference, as `difference_or_reason` has it."""
    metric = metric_of(metric)
    table = {row.label: row for row in rows if row.finished}
    found = [reference] if reference in table else labels_meant(reference, {k: row.trials for k, row in table.items()})
    if len(found) > 1:
        raise RunError(f"{reference} was run with different settings. Name one: {'; '.join(found)}.")
    if not found:
        raise RunError(f"There is no finished method {reference!r} to compare with.{did_you_mean(reference, table)}")
    (reference,) = found
    return [difference_or_reason(row, table[reference], metric) for label, row in table.items() if label != reference]


def leaders(rows: Sequence[Row], metric: str | Metric) -> set[int]:
    """Return the index of the finished row that is better than each other one by an interval that leaves out 0.

    A method that has not learned is no other one: it forgets nothing, and costs nobody a lead. Nor is one of whose
    window rounds were rolled back.

    Returns: Empty where there is no such row, or nothing to rank: the best mean alone does not lead.
    """
    metric = metric_of(metric)
    known = {i: row for i, row in enumerate(rows) if row.finished and not row.trouble}
    means = {i: metric.better * row.value(metric).mean for i, row in known.items()}
    means = {i: mean for i, mean in means.items() if not math.isnan(mean)}
    if not metric.better or len(means) < 2:
        return set()
    first = max(means, key=lambda i: means[i])
    gains = [difference(rows[first], rows[i], metric).interval for i in means if i != first]
    return {first} if all(gain.separated and metric.better * gain.mean > 0 for gain in gains) else set()


def show_difference(found: Difference) -> str:
    """Return a difference with its interval in few characters, and whether it separates the two methods.

    Such as ``"+1.94 [+0.51, +3.37]"``, ``"-0.20 [-1.70, +1.30], not separated"`` or, within one seed,
    ``"+0.40 [+0.10, +0.70]*"``.
    """
    interval = found.interval
    if found.reason:
        return found.reason
    if math.isnan(interval.mean):
        return "–"
    mean, low, high = (show_number(end, found.unit, sign="+") for end in (interval.mean, interval.low, interval.high))
    if not interval.known:
        return f"{mean}, no interval"
    text = f"{mean} [{low}, {high}]" + "*" * interval.blocks
    return text if interval.separated else f"{text}, not separated"


def show_interval(interval: metrics.Interval, unit: str = "%") -> str:
    """Return an interval in few characters, such as ``"[83.10, 85.20]"``, with * within one seed; empty without one."""
    if not interval.known:
        return ""
    return f"[{show_number(interval.low, unit)}, {show_number(interval.high, unit)}]" + "*" * interval.blocks
