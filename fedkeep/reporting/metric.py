"""What a trial is measured by: the one list of metrics in which tables, comparisons and tuning look names up.

`EarlyStopping` is the callback that ends a trial when a metric no longer gets better.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import isnan, nan
from operator import attrgetter
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np

from fedkeep import metrics
from fedkeep.errors import ConfigError, RunError, did_you_mean
from fedkeep.experiment.experiment import describe_data
from fedkeep.metrics import mean_of
from fedkeep.reporting.trial import TrialResult, Window
from fedkeep.rounds.state import RoundResult, SimulationState
from fedkeep.trials.callbacks import Callback, Outcome

LOGGED = "log."
"""What the name of a metric begins with that a method recorded itself."""
Shown: TypeAlias = Literal[
    "without tasks", "with tasks", "always", "if measured", "scored", "sequences", "local models", "CSV"
]
UNITS = ("%", "s", "bytes", "")
T = TypeVar("T")


@dataclass(frozen=True)
class Metric:
    """A number that a trial is measured by; a column of a table.

    Parameters
    ----------
    name : str
        The name in CSV files, in comparisons and in Python.
    title : str
        What the column of a table is called; the rounds that it covers may be added.
    unit : {"%", "s", "bytes", ""}
        ``"%"`` for a fraction that is shown in percent, ``"s"`` for seconds.
    compute : Callable[[TrialResult], float], optional
        Computes it from a trial; NaN where nothing was measured. Default: the mean of `series`, or else the trial's
        property of that name.
    better : {1, -1, 0}
        1 where a higher value is better, -1 where a lower one is, 0 where methods are not ranked by it.
    shown : str
        Which tables have it: ``"without tasks"``, ``"with tasks"``, ``"always"`` (behind these) or ``"if measured"``
        (last, where a trial has a value) for tables of results; ``"scored"`` for these and for CSV files where the
        recipe names a metric (``run.metric``); ``"sequences"`` and ``"local models"`` for those of the
        report where local models were evaluated; ``"CSV"`` for none. CSV files have all.
    series : Callable[[TrialResult], dict[int, float]], optional
        Gives the values by round whose mean over the window it is.
    windowed : bool
        Whether it covers the window without being the mean of such a series.
    of_history : bool
        Whether it depends on all rounds that were evaluated, whatever it covers.
    meaning : str
        What it is, in a sentence. Default: the first paragraph of the docstring of what computes it.
    """

    name: str
    title: str
    unit: str = ""
    compute: Callable[[TrialResult], float] | None = None
    better: int = 0
    shown: Shown = "if measured"
    series: Callable[[TrialResult], dict[int, float]] | None = None
    windowed: bool = False
    of_history: bool = False
    meaning: str = ""

    def __post_init__(self) -> None:
        """Check what was given."""
        known = {"unit": UNITS, "better": (1, -1, 0), "shown": get_args(Shown)}
        wrong = [
            f"{key} is {getattr(self, key)!r:.60}, not one of {', '.join(map(repr, values))}"
            for key, values in known.items()
            if getattr(self, key) not in values
        ]
        if wrong:
            raise ConfigError(f"the metric {self.name!r:.60}: {'; '.join(wrong)}.")
        source = self.compute or getattr(TrialResult, str(self.name), None)
        object.__setattr__(self, "meaning", self.meaning or _first(source))

    @property
    def is_custom(self) -> bool:
        """Tell whether it is not FedKeep's."""
        return self.name not in _BUILT_IN

    @property
    def covers_window(self) -> bool:
        """Tell whether it is of the rounds of the window."""
        return self.series is not None or self.windowed

    def of(self, trial: TrialResult) -> float:
        """Return the value of one trial."""
        if self.compute is None:
            return mean_of(self.by_round(trial).values()) if self.series else float(attrgetter(self.name)(trial))
        return float(self._called(self.compute, trial))

    def by_round(self, trial: TrialResult) -> dict[int, float]:
        """Return the values by round whose mean it is; empty for a metric that is no such mean."""
        return self._called(self.series, trial) if self.series else {}

    def _called(self, function: Callable[[TrialResult], T], trial: TrialResult) -> T:
        try:
            return function(trial)
        except Exception as error:
            raise RunError(
                f"the metric {self.name!r} raised {type(error).__name__} for {trial.label}, seed {trial.seed}: {error}."
                " Where a trial has no value, such as before its first evaluation, return NaN."
            ) from error

    def by_evaluation(self, trial: TrialResult) -> dict[int, float]:
        """Return the value at each evaluation, as if it had been the last one, and the only one of the window.

        What is measured over tasks is NaN but at their ends.
        """
        if self.shown == "scored":
            return trial.by_round(trial.score_history(self.name))
        return {
            row["round"]: self.of(_up_to(trial, place))
            for place, row in enumerate(trial.rounds, start=1)
            if row.get("correct") is not None
        }

    def heading(self, trials: Iterable[TrialResult]) -> str:
        """Return the title, with the rounds that it covers if it covers a window.

        Windows of different lengths go by no common name: each value then names its own (`rounds_covered`).
        """
        if not self.covers_window:
            return self.title
        windows = {rounds_covered(trial) for trial in trials}
        return f"{self.title}, {windows.pop()}" if len(windows) == 1 else f"{self.title}, rounds as named"


def _up_to(trial: TrialResult, rounds: int) -> TrialResult:
    """Return a trial as if it had ended after so many rounds, whose last one alone is the window."""
    info = {**trial.info}
    if trial.task_sizes:
        finished, rest = divmod(rounds, trial.task_rounds)
        info |= {"tasks": [] if rest else info["tasks"][:finished], "rounds": rounds, "cut": True}
    records, timings = trial.rounds[:rounds], trial.timings[:rounds]
    last = [(row.get("task", 1), row["round"]) for row in records[-1:]]
    ledger = [row for row in trial.ledger if [(row.get("task", 1), row["round"])] <= last]
    return replace(trial, rounds=records, timings=timings, ledger=ledger, info=info, finished=True, window=Window(1))


@dataclass(frozen=True)
class LoggedMetric(Metric):
    """What a method logged or a callback measured, in the mean over the window; with tasks, that of the last one."""

    windowed: bool = True

    def of(self, trial: TrialResult) -> float:
        return mean_of(self.by_round(trial).values())

    def by_round(self, trial: TrialResult) -> dict[int, float]:
        window = trial.windows[-1] if trial.windows else ()
        found = {
            row["round"]: {**(row.get("log") or {}), **row.get("measured", {})}.get(self.title) for row in trial.rounds
        }
        return {n: float(value) for n, value in found.items() if n in window and isinstance(value, int | float)}


def _first(source: object) -> str:
    """Return the first paragraph of the docstring of what computes a metric."""
    doc = None if source is None else source.__doc__
    return inspect.cleandoc(doc or "").split("\n\n")[0].removeprefix("Return ")


def show_number(value: float, unit: str, digits: int = 2, sign: str = "") -> str:
    """Return a fraction in percent with so many digits, without the sign, and another value with four that count."""
    if unit == "%":
        return f"{100 * value:{sign}.{digits}f}"
    return f"{value:{sign}.4g}" if abs(value) < 9999.5 else f"{value:{sign},.0f}"


def rounds_covered(trial: TrialResult) -> str:
    """Return the rounds over which a trial's values are averaged, in words."""
    first, last = trial.window_rounds
    rounds = f"rounds {first}–{last}" if last > first else f"round {last}"
    return rounds + " of each task" * bool(trial.task_sizes)


ADD_REMOVE = "add or remove"
"""The neighbours that every epsilon is for: with and without one example, or one client."""


def _percent(name: str, title: str, better: int, shown: Shown, series: str = "", **more: Any) -> Metric:
    """Return a metric that is a fraction, a property of a trial, or the mean of one that is a series."""
    more["meaning"] = _first(getattr(TrialResult, name, None) or getattr(TrialResult, series))
    return Metric(name, title, "%", None, better, shown, attrgetter(series) if series else None, **more)


def _scored(name: str, title: str, better: int, meaning: str) -> Metric:
    """Return a score that is measured where the recipe names a metric, in the mean over the window."""
    series: Callable[[TrialResult], dict[int, float]] = lambda trial: trial.window_scores(name)  # noqa: E731
    return Metric(name, title, "%", None, better, "scored", series, meaning=f"the {meaning}, over the window")


def _over_clients(name: str, title: str, how: Callable[[list[float]], float], unit: str = "%") -> Metric:
    """Return a metric of clients' accuracies on their own test examples, in the mean over the window."""
    meaning = f"{title}: of the accuracies of clients on their own test examples, in the mean over the window"
    shown: Shown = "if measured" if unit else "CSV"
    return Metric(
        name, title, unit, None, int(bool(unit)), shown, lambda trial: trial.over_clients(how), meaning=meaning
    )


def _kold(name: str, title: str, which: int, classes: str, support: bool = False) -> Metric:
    """Return an accuracy of local models over the window, inside or outside of what their clients hold."""
    meaning = f"local models' accuracy over {classes}"
    compute: Callable[[TrialResult], float] = lambda trial: trial.kold(support=support)[which]  # noqa: E731
    return Metric(name, title, "%", compute, 1, "local models", windowed=True, meaning=meaning)


def _of_tasks(name: str, title: str, measure: Callable[[Any], float], shown: Shown = "with tasks") -> Metric:
    """Return a metric of the matrix of accuracies by task."""

    def compute(trial: TrialResult) -> float:
        return measure(trial.task_matrix) if len(trial.task_matrix) and not trial.lacks_tasks else nan

    compute.__doc__, better = measure.__doc__, -1 if "forgetting" in name else 1
    return Metric(name, title, "%", compute, better, shown, of_history=better < 0)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _percent("window_mean", "accuracy", 1, "without tasks", "window_accuracies"),
        _percent("last", "last", 1, "without tasks"),
        _percent("best", "best", 1, "without tasks", of_history=True),
        _percent("window_forgetting", "forgetting", -1, "without tasks", "window_forgettings", of_history=True),
        Metric("train_seconds", "train s", "s", shown="always"),
        Metric("down", "down / client / round", "bytes", shown="always"),
        Metric("up", "up / client / round", "bytes", shown="always"),
        _scored("balanced_accuracy", "balanced accuracy", 1, "mean over classes of their accuracies (sensitivities)"),
        _scored("f1", "F1", 1, "mean over classes of the F1 score"),
        _scored("auroc", "AUROC", 1, "area under the ROC curve of one class against the rest, its mean over classes"),
        _scored("ece", "calibration error", -1, "expected calibration error of the softmax in 15 bins"),
        _scored("specificity", "specificity", 1, "share of other classes' examples not taken for a class, in the mean"),
        _percent("window_std", "standard deviation over rounds", 0, "CSV", windowed=True),
        _percent("forgetting", "forgetting, last", -1, "CSV", of_history=True),
        _percent("balanced", "mean over classes, last", 1, "CSV"),
        _percent("chain_forgetting", "forgetting over local trainings", -1, "sequences", of_history=True),
        _percent("consistency", "consistency", 1, "sequences"),
        _percent("drift", "drift", -1, "sequences"),
        _percent("local_accuracy", "accuracy of local models", 1, "local models", "window_local_accuracies"),
        _percent("local_last", "accuracy of local models, last", 1, "local models"),
        _kold("kold_in", "inside own classes", 0, "classes, weighted by their clients' label distributions"),
        _kold(
            "kold_out", "outside own classes", 1, "classes, weighted by one minus their share of the client's labels"
        ),
        _kold("seen", "seen classes", 0, "the classes of which their clients have examples", support=True),
        _kold("unseen", "unseen classes", 1, "the classes of which their clients have none", support=True),
        _percent("window_incremental", "mean over tasks", 1, "with tasks", "window_incrementals"),
        _of_tasks("incremental", "mean over tasks, after each", metrics.average_incremental_accuracy),
        _percent("task_accuracy", "after the last task", 1, "with tasks"),
        _of_tasks("forgetting_chaudhry", "forgetting from the best", metrics.forgetting_tasks),
        _of_tasks("forgetting_fedskf", "forgetting a task", metrics.fedskf),
        _of_tasks(
            "forgetting_chaudhry_mean", "forgetting from the best, mean over tasks", metrics.chaudhry_mean, "CSV"
        ),
        _of_tasks("backward", "backward transfer", metrics.backward_transfer, "CSV"),
        _over_clients("client_mean", "mean over clients", np.mean),
        _over_clients("client_worst", "worst client", min),
        _over_clients("client_median", "median client", np.median),
        _over_clients("client_best", "best client", max),
        _over_clients("clients_tested", "clients that tested", len, ""),
        Metric("epsilon", f"epsilon ({ADD_REMOVE} example)", better=-1),
        Metric("counts_epsilon", f"epsilon of label counts ({ADD_REMOVE} example)", better=-1),
        Metric("prototypes_epsilon", f"epsilon of prototypes ({ADD_REMOVE} client)", better=-1),
        Metric("confidences_epsilon", f"epsilon of confidences ({ADD_REMOVE} server example)", better=-1),
        Metric("client_epsilon", f"epsilon ({ADD_REMOVE} client)", better=-1),
    )
}
"""All metrics by name, in the order of tables and CSV files; `add_metric` adds to them."""
_BUILT_IN = frozenset(METRICS)
OF_CLIENTS = frozenset(name for name in METRICS if name.startswith("client")) - {"client_epsilon"}
"""Metrics of what clients measure themselves (``run.client_test``)."""


def add_metric(metric: Metric) -> None:
    """Add a metric of your own; tables, CSV files, the report, comparisons and tuning have it like a built-in one.

    Parameters
    ----------
    metric : Metric
        The metric. It takes the place of an earlier one of yours with the same name.

    Raises
    ------
    ConfigError
        If it cannot be computed, or its name is none, or that of a built-in metric.
    """
    if not isinstance(metric, Metric) or not (callable(metric.compute) or callable(metric.series)):
        raise ConfigError(f"a metric needs compute= or series=, a function of a trial, not {metric!r:.80}.")
    if not str(metric.name).isidentifier() or metric.name in _BUILT_IN:
        raise ConfigError(f"a metric cannot be named {metric.name!r:.60}: take a word that no built-in metric has.")
    METRICS[metric.name] = metric


def metric_of(metric: str | Metric) -> Metric:
    """Return a metric by name; raise `RunError` for a name that is none.

    ``log.NAME`` is the number that a method logged as NAME, or a callback measured, in the mean over the window.
    """
    if isinstance(metric, Metric):
        return metric
    if not isinstance(metric, str):
        raise RunError(f"a metric is a name, such as window_mean or log.NAME, or a Metric, not {metric!r:.80}.")
    if metric.startswith(LOGGED):
        return LoggedMetric(metric, metric.removeprefix(LOGGED))
    if metric not in METRICS:
        raise RunError(f"There is no metric {metric!r}.{_of_accuracy(metric) or did_you_mean(metric, METRICS)}")
    return METRICS[metric]


def shown_in(table: Shown) -> tuple[Metric, ...]:
    """Return the metrics of one kind of table."""
    return tuple(metric for metric in METRICS.values() if metric.shown == table)


def columns_for(trials: Iterable[TrialResult]) -> tuple[Metric, ...]:
    """Return the columns of a table of these trials: with tasks, what is measured of them in place of accuracy."""
    listed = list(trials)
    tasks = any(trial.task_sizes for trial in listed)
    first = shown_in("with tasks" if tasks else "without tasks")
    if main := main_metric(listed):
        few = first if tasks else tuple(metric for metric in first if metric.covers_window)  # that a line has room
        first = (main, *few, *shown_in("scored"))
    measured = (m for m in shown_in("if measured") if any(not isnan(m.of(trial)) for trial in listed))
    return tuple(dict.fromkeys((*first, *shown_in("always"), *measured, *of_callbacks(listed))))


def of_callbacks(trials: Iterable[TrialResult]) -> tuple[Metric, ...]:
    """Return a metric for each name under which a callback measured a number."""
    names = dict.fromkeys(name for trial in trials for row in trial.rounds for name in row.get("measured", ()))
    return tuple(LoggedMetric(f"{LOGGED}{name}", name) for name in names)


def headline(trials: Iterable[TrialResult]) -> tuple[Metric, Metric]:
    """Return the accuracy, or the metric that the recipe names, and the forgetting by which methods are compared."""
    listed = list(trials)
    tasks = any(trial.task_sizes for trial in listed)
    names = ("window_incremental", "forgetting_chaudhry") if tasks else ("window_mean", "window_forgetting")
    return main_metric(listed) or METRICS[names[0]], METRICS[names[1]]


def main_metric(trials: Iterable[TrialResult]) -> Metric | None:
    """Return the metric that the recipe of all these trials names; None without one, and for an unknown one."""
    names = {str(trial.info.get("metric") or "") for trial in trials}
    return METRICS.get(names.pop()) if len(names) == 1 else None


def check_main(name: str) -> None:
    """Raise `ConfigError` if methods cannot be compared by what a recipe names (``run.metric``)."""
    if name and not (name in METRICS and METRICS[name].better):
        ranking = [metric.name for metric in METRICS.values() if metric.better]
        hint = _of_accuracy(name) or did_you_mean(name, ranking)
        raise ConfigError(f"run.metric is no metric that ranks methods: {name!r}.{hint}")


def _of_accuracy(name: str) -> str:
    """Return what accuracy is called here, by which methods are compared anyway; empty for another name."""
    known = "window_mean (over the last rounds), last (after the last), with tasks window_incremental"
    return f" Methods are compared by accuracy if no metric is named; its names: {known}." if name == "accuracy" else ""


def listed(trials: Iterable[TrialResult]) -> list[Metric]:
    """Return the metrics of a CSV file of trials."""
    every = list(trials)
    scored = any(trial.info.get("metric") for trial in every)
    return [*(metric for metric in METRICS.values() if scored or metric.shown != "scored"), *of_callbacks(every)]


class EarlyStopping(Callback):
    """Ends a trial when a metric has not become better for some evaluations; a resumed trial counts them anew.

    Parameters
    ----------
    patience : int
        Number of evaluations in a row without a better value.
    metric : str, optional
        The name of a metric, such as ``"last"``, ``"auroc"`` or one of your own; of means over a window, the value of
        the last evaluation counts. Default: the recipe's ``run.metric``, or else the test loss.

    Raises
    ------
    RunError
        If there is no such metric.
    ConfigError
        If neither higher nor lower values of the metric are better, evaluations do not measure it, or there are tasks.
    """

    def __init__(self, patience: int = 10, metric: str | None = None) -> None:
        if not isinstance(patience, int) or patience < 1:
            raise ConfigError(f"early stopping waits for at least 1 evaluation: patience is {patience!r:.40}.")
        self.patience = patience
        self.metric = None if metric is None else metric_of(metric)
        if self.metric and not self.metric.better:
            raise ConfigError(
                f"early stopping needs a metric that ranks methods, and {metric} does not. Name another, such as last "
                "or balanced, or leave it out to take the test loss."
            )

    def on_trial_begin(self, state: SimulationState) -> None:
        name = state.settings.run.metric
        self.watched = self.metric or (metric_of(name) if name else None)
        if state.federation.num_tasks > 1:
            raise ConfigError(
                "early stopping does not go with tasks: new classes make every metric worse at first, and results are "
                "of all tasks. Choose run.rounds instead."
            )
        if self.watched and self.watched.shown == "scored" and not name:
            raise ConfigError(
                f"early stopping waits for {self.watched.name}, which evaluations do not measure. Set "
                f'metric="{self.watched.name}" of the run (run.metric).'
            )
        self.partition: dict[str, Any] = {}
        if self.watched and self.watched.shown == "local models":
            labels = state.federation.dataset.train["label"]
            self.partition["counts"] = state.federation.partition.counts(labels, state.context.num_classes).tolist()
        self.best, self.waited, self.unmeasured = -math.inf, 0, 0
        self.rounds: list[dict[str, Any]] = []
        self.timings: list[dict[str, Any]] = []

    def on_round_end(self, state: SimulationState, result: RoundResult) -> Outcome:
        self.rounds.append(result.record)
        self.timings.append({"round": result.record.get("round"), **result.timings})
        if "test_loss" in result.record:
            value = self._value(state, result.record["test_loss"])
            unmeasured = math.isnan(value) and result.record["test_loss"] is not None
            self.unmeasured = self.unmeasured + 1 if unmeasured else 0
            self.waited = 0 if value > self.best else self.waited + (not unmeasured)
            self.best = value if value > self.best else self.best
            if self.watched and self.unmeasured >= max(self.patience, 2):
                raise ConfigError(
                    f"early stopping waits for {self.watched.name}, which {self.unmeasured} evaluations in a row did "
                    "not measure. Name another metric, such as last, or let it be measured."
                )
        return self.waited >= self.patience, {}

    def _value(self, state: SimulationState, loss: float | None) -> float:
        """Return what is to rise; NaN where it is not known, such as the loss of a model that diverged."""
        if self.watched is None:
            return math.nan if loss is None else -loss
        algorithm = state.algorithm
        info = describe_data(state.federation) | {"rounds": state.rounds, "algorithm": algorithm.name()}
        info |= {"seed": state.settings.seed, "sequential": algorithm.sequential}
        # A window counts from the first round that was seen: those before a resume were not.
        rounds = [row | {"round": n} for n, row in enumerate(self.rounds, start=1)]
        timings = [row | {"round": n} for n, row in enumerate(self.timings, start=1)]
        trial = TrialResult(algorithm.name(), rounds, timings, self.partition, info, finished=True, window=Window(1))
        return self.watched.better * self.watched.of(trial)
