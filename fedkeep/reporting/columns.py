"""The columns of a result table: what a trial is measured by, and which columns a table has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isnan, nan
from operator import attrgetter

from fedkeep.errors import RunError, did_you_mean
from fedkeep.reporting.trial import TrialResult

LOGGED = "log."
"""What the name of a metric begins with that a method recorded itself."""


@dataclass(frozen=True)
class Metric:
    """A column of a table.

    ``name``: The property of a trial that gives the value.
    ``title``: What the column is called; `heading` adds the rounds that it covers.
    ``unit``: ``"%"`` for a fraction that is shown in percent, ``"s"`` or ``"bytes"``.
    ``better``: 1 where a higher value is better, -1 where a lower one is, 0 where methods are not ranked by it.
    ``series``: The property of a trial that gives the values by round whose mean over the window it is; empty for other
        metrics.
    ``windowed``: Whether it covers the window without being the mean of such a series.
    """

    name: str
    title: str
    unit: str
    better: int = 0
    series: str = ""
    windowed: bool = False

    @property
    def of_history(self) -> bool:
        """Tell whether it depends on all rounds that were evaluated, whatever it covers."""
        return "forgetting" in self.name or self.name == "best"

    def of(self, trial: TrialResult) -> float:
        """Return the value of one trial."""
        value: Callable[[TrialResult], float] = attrgetter(self.name)
        return value(trial)

    def by_round(self, trial: TrialResult) -> dict[int, float]:
        """Return the values by round whose mean it is; empty for a metric that is no such mean."""
        found: dict[int, float] = getattr(trial, self.series) if self.series else {}
        return found

    def heading(self, trials: Iterable[TrialResult]) -> str:
        """Return the title, with the rounds that it covers if it covers a window.

        Windows of different lengths go by no common name: each value then names its own (`rounds_covered`).
        """
        if not (self.series or self.windowed):
            return self.title
        windows = {rounds_covered(trial) for trial in trials}
        return f"{self.title}, {windows.pop()}" if len(windows) == 1 else f"{self.title}, rounds as named"


@dataclass(frozen=True)
class LoggedMetric(Metric):
    """What a method recorded by `Server.log`, in the mean over the window; with tasks, over that of the last one."""

    windowed: bool = True

    def of(self, trial: TrialResult) -> float:
        values = self.by_round(trial).values()
        return sum(values) / len(values) if values else nan

    def by_round(self, trial: TrialResult) -> dict[int, float]:
        window = trial.windows[-1] if trial.windows else ()
        found = {row["round"]: (row.get("log") or {}).get(self.title) for row in trial.rounds}
        return {n: float(value) for n, value in found.items() if n in window and isinstance(value, int | float)}


def rounds_covered(trial: TrialResult) -> str:
    """Return the rounds over which a trial's values are averaged, in words."""
    first, last = trial.window_rounds
    rounds = f"rounds {first}–{last}" if last > first else f"round {last}"
    return rounds + " of each task" * bool(trial.task_sizes)


COLUMNS = (
    Metric("window_mean", "accuracy", "%", better=1, series="window_accuracies"),
    Metric("last", "last", "%", better=1),
    Metric("best", "best", "%", better=1),
    Metric("window_forgetting", "forgetting", "%", better=-1, series="window_forgettings"),
    Metric("train_seconds", "train s", "s"),
    Metric("down", "down / client / round", "bytes"),
    Metric("up", "up / client / round", "bytes"),
)
MORE = (
    Metric("window_std", "standard deviation over rounds", "%", windowed=True),
    Metric("forgetting", "forgetting, last", "%", better=-1),
    Metric("balanced", "mean over classes, last", "%", better=1),
)
CHAIN = (  # only where every local model of a sequence was evaluated
    Metric("chain_forgetting", "forgetting over local trainings", "%", better=-1),
    Metric("consistency", "consistency", "%", better=1),
    Metric("drift", "drift", "%", better=-1),
)
LOCAL = (  # likewise, of any method
    Metric("local_accuracy", "accuracy of local models", "%", better=1, series="window_local_accuracies"),
    Metric("local_last", "accuracy of local models, last", "%", better=1),
    Metric("kold_in", "inside own classes", "%", better=1, windowed=True),
    Metric("kold_in_spread", "inside, between clients", "%", windowed=True),
    Metric("kold_out", "outside own classes", "%", better=1, windowed=True),
    Metric("kold_out_spread", "outside, between clients", "%", windowed=True),
    Metric("seen", "seen classes", "%", better=1, windowed=True),
    Metric("unseen", "unseen classes", "%", better=1, windowed=True),
)
TASKS = (  # in the place of the first columns, where classes arrived in tasks
    Metric("window_incremental", "mean over tasks", "%", better=1, series="window_incrementals"),
    Metric("incremental", "mean over tasks, after each", "%", better=1),
    Metric("task_accuracy", "after the last task", "%", better=1),
    Metric("forgetting_chaudhry", "forgetting from the best", "%", better=-1),
    Metric("forgetting_fedskf", "forgetting a task", "%", better=-1),
)
MORE_TASKS = (
    Metric("forgetting_chaudhry_mean", "forgetting from the best, mean over tasks", "%", better=-1),
    Metric("backward", "backward transfer", "%", better=1),
)
ADD_REMOVE = "add or remove"
"""The neighbours that every epsilon is for: with and without one example, or one client."""
PRIVACY = (  # where something was noised or generated
    Metric("epsilon", f"epsilon ({ADD_REMOVE} example)", "", better=-1),
    Metric("counts_epsilon", f"epsilon of label counts ({ADD_REMOVE} example)", "", better=-1),
    Metric("prototypes_epsilon", f"epsilon of prototypes ({ADD_REMOVE} client)", "", better=-1),
    Metric("confidences_epsilon", f"epsilon of confidences ({ADD_REMOVE} server example)", "", better=-1),
    Metric("client_epsilon", f"epsilon ({ADD_REMOVE} client)", "", better=-1),
    Metric("near_copies", "near copies", "%", better=-1),
)
METRICS: Mapping[str, Metric] = {
    metric.name: metric for metric in (*COLUMNS, *MORE, *CHAIN, *LOCAL, *TASKS, *MORE_TASKS, *PRIVACY)
}


def metric_of(metric: str | Metric) -> Metric:
    """Return a metric by name; raise `RunError` for a name that is none.

    ``log.NAME`` is the number that a method recorded as NAME by `Server.log`, in the mean over the window.
    """
    if isinstance(metric, Metric):
        return metric
    if not isinstance(metric, str):
        raise RunError(f"a metric is a name, such as window_mean or log.NAME, or a Metric, not {metric!r:.80}.")
    if metric.startswith(LOGGED):
        return LoggedMetric(metric, metric.removeprefix(LOGGED), "")
    if metric not in METRICS:
        raise RunError(f"There is no metric {metric!r}.{did_you_mean(metric, METRICS)}")
    return METRICS[metric]


def columns_for(trials: Iterable[TrialResult]) -> tuple[Metric, ...]:
    """Return the columns of a table of these trials: with tasks, what is measured of them in place of accuracy."""
    listed = list(trials)
    private = tuple(metric for metric in PRIVACY if any(not isnan(metric.of(trial)) for trial in listed))
    return ((*TASKS, *COLUMNS[4:]) if any(trial.task_sizes for trial in listed) else COLUMNS) + private


def headline(trials: Iterable[TrialResult]) -> tuple[Metric, Metric]:
    """Return the accuracy and the forgetting by which methods are first compared."""
    tasks = any(trial.task_sizes for trial in trials)
    names = ("window_incremental", "forgetting_chaudhry") if tasks else ("window_mean", "window_forgetting")
    return METRICS[names[0]], METRICS[names[1]]
