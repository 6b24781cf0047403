"""The callback that ends a trial when a metric no longer gets better."""

from __future__ import annotations

import math
from typing import Any

from fedkeep.errors import ConfigError
from fedkeep.experiment.description import describe_data
from fedkeep.reporting.metric import metric_of
from fedkeep.reporting.trial import TrialResult
from fedkeep.rounds.state import RoundResult, SimulationState
from fedkeep.trials.callbacks import Callback, Outcome


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
        If neither higher nor lower values of the metric are better; with tasks, if it is a mean over a window.
    """

    def __init__(self, patience: int = 10, metric: str | None = None) -> None:
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
        if self.watched and self.watched.covers_window and state.federation.num_tasks > 1:
            raise ConfigError(
                f"{self.watched.name} is a mean over rounds of every task, which is not known before the end. Name "
                "another metric, such as last or balanced."
            )
        self.best, self.waited = -math.inf, 0
        self.rounds: list[dict[str, Any]] = []
        self.timings: list[dict[str, Any]] = []

    def on_round_end(self, state: SimulationState, result: RoundResult) -> Outcome:
        self.rounds.append(result.record)
        self.timings.append({"round": result.record.get("round"), **result.timings})
        if "test_loss" in result.record:
            value = self._value(state, result.record["test_loss"])
            self.waited = 0 if value > self.best else self.waited + 1
            self.best = value if value > self.best else self.best
        return self.waited >= self.patience, {}

    def _value(self, state: SimulationState, loss: float | None) -> float:
        """Return what is to rise; NaN where it is not known, such as the loss of a model that diverged."""
        if self.watched is None:
            return math.nan if loss is None else -loss
        algorithm, seed = state.algorithm, state.settings.seed
        info = describe_data(state.federation) | {"rounds": state.rounds}
        stream = state.federation.stream
        tasks = [task.num_classes - task.num_old_classes for task in stream.tasks] if stream else []
        rounds, timings = self.rounds, self.timings
        if not tasks:  # a window counts from the first round that was seen: those before a resume were not
            rounds = [row | {"round": n} for n, row in enumerate(rounds, start=1)]
            timings = [row | {"round": n} for n, row in enumerate(timings, start=1)]
        trial = TrialResult(
            algorithm.name(), algorithm.name(), {}, seed, algorithm.sequential, rounds, timings, {},
            info | {"tasks": tasks}, finished=True, window=1,
        )  # fmt: skip
        return self.watched.better * self.watched.of(trial)
