"""One method with one seed, as a run recorded it: its accuracies, forgetting, times and traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedkeep import metrics
from fedkeep.interface.privacy import CHANGE_TOLD, COUNTS_TOLD, MEANS_TOLD, sample_rate_of
from fedkeep.reporting.learning import LearningMetrics
from fedkeep.reporting.local_model_metrics import LocalModelMetrics
from fedkeep.reporting.record import CostMetrics, Floats, TaskMetrics, mean_of


@dataclass(frozen=True)
class TrialResult(TaskMetrics, LocalModelMetrics, LearningMetrics, CostMetrics):
    """All that can be said of a record; here, of its accuracies over rounds."""

    def __repr__(self) -> str:
        """Return what it is, without the numbers of every round."""
        state = "finished" if self.finished else "unfinished"
        return f"<{type(self).__name__} {self.label}, seed {self.seed}: {self.rounds_done} rounds, {state}>"

    @cached_property
    def evaluated(self) -> NDArray[np.int64]:
        """Return the rounds that were evaluated, int64 [T]."""
        return np.asarray([row["round"] for row in self.evaluations], dtype=np.int64)

    @cached_property
    def accuracies(self) -> Floats:
        """Return the top-1 accuracy of each evaluated round, float64 [T]."""
        values = [metrics.accuracy(*self.counted(row)) for row in self.evaluations]
        return np.asarray(values, dtype=np.float64)

    @cached_property
    def class_history(self) -> Floats:
        """Return the class-wise accuracy of each evaluated round, float64 [T, C]; NaN for a class without test data."""
        values = [self.accuracy_by_class(row) for row in self.evaluations]
        return np.asarray(values, dtype=np.float64).reshape(len(values), len(self.test_total))

    @cached_property
    def balanced_history(self) -> Floats:
        """Return the mean class-wise accuracy of each evaluated round, float64 [T]."""
        values = [metrics.balanced_accuracy(*self.counted(row)) for row in self.evaluations]
        return np.asarray(values, dtype=np.float64)

    @cached_property
    def forgetting_history(self) -> Floats:
        """Return the class-wise forgetting up to each evaluated round, float64 [T]; NaN at the first, with no past."""
        values = [metrics.forgetting(self.class_history[: t + 1]) if t else np.nan for t in range(len(self.evaluated))]
        return np.asarray(values, dtype=np.float64)

    @cached_property
    def test_losses(self) -> Floats:
        """Return the mean cross-entropy of each evaluated round, float64 [T]; NaN where there is no finite one."""
        values = [row.get("test_loss") for row in self.evaluations]
        return np.asarray([math.nan if value is None else value for value in values], dtype=np.float64)

    @property
    def last(self) -> float:
        """Return the accuracy of the last evaluation."""
        return metrics.last(self.accuracies)

    @property
    def best(self) -> float:
        """Return the highest accuracy of any evaluation."""
        return metrics.best(self.accuracies)

    @cached_property
    def window_accuracies(self) -> dict[int, float]:
        """Return the accuracy by round, of the evaluations in the window (with tasks, of the last)."""
        return self._in_window(self.accuracies)

    @cached_property
    def window_forgettings(self) -> dict[int, float]:
        """Return the class-wise forgetting by round, of the evaluations in the window (with tasks, of the last)."""
        return self._in_window(self.forgetting_history)

    @property
    def window_mean(self) -> float:
        """Return the mean accuracy over the window."""
        return mean_of(self.window_accuracies.values())

    @property
    def window_std(self) -> float:
        """Return the standard deviation of accuracy from evaluation to evaluation of the window."""
        return metrics.mean_std(self.window_accuracies.values())[1]

    @property
    def window_forgetting(self) -> float:
        """Return the mean class-wise forgetting over the window."""
        return mean_of(self.window_forgettings.values())

    @property
    def class_accuracy(self) -> dict[str, float]:
        """Return the accuracy of each class at the last evaluation, by its name; NaN for a class without test data."""
        values = self.class_history[-1] if len(self.evaluated) else []
        names = self.info.get("label_names") or range(len(self.test_total))
        return {str(name): float(value) for name, value in zip(names, values, strict=False)}

    @property
    def balanced(self) -> float:
        """Return the mean of the class-wise accuracies at the last evaluation."""
        return float(self.balanced_history[-1]) if len(self.evaluated) else float("nan")

    @property
    def forgetting(self) -> float:
        """Return the class-wise forgetting at the last evaluation; NaN with fewer than two evaluations."""
        return float(self.forgetting_history[-1]) if len(self.evaluated) else float("nan")

    @cached_property
    def _spent(self) -> tuple[dict[str, dict[float, int]], dict[str, set[int]], dict[str, float]]:
        """Return by client its private steps by sample rate, and the tasks of counts that it told; and the options.

        What a site of an earlier version spent on something unknown is of an infinite rate: its epsilon is infinite.
        """
        steps: dict[str, dict[float, int]] = {}
        told: dict[str, set[int]] = {}
        options: dict[str, float] = {}
        for row in self.rounds:
            options = row.get("privacy", options)
            for client, uses in row.get("privacy", {}).get("clients", {}).items():
                for name, count in uses.items():
                    if name == COUNTS_TOLD:
                        told.setdefault(client, set()).add(int(row["task"]))
                    elif name != CHANGE_TOLD:  # prototypes have an epsilon of their own
                        rate, by_rate = sample_rate_of(name) or math.inf, steps.setdefault(client, {})
                        by_rate[rate] = by_rate.get(rate, 0) + count
        return steps, told, options

    @cached_property
    def epsilon(self) -> float:
        """Return the largest epsilon of a client's examples, of all that left it; NaN if its models had no noise."""
        steps, told, options = self._spent
        if not options.get("noise_multiplier"):
            return float("nan")
        noise, delta = options["noise_multiplier"], options["delta"]
        distinct = {tuple(sorted(by_rate.items())) for by_rate in steps.values()}
        of_steps = {spent: metrics.dp_sgd_epsilon(dict(spent), noise, delta) for spent in distinct}
        spent_by_client = (
            of_steps.get(tuple(sorted(steps.get(client, {}).items())), 0.0)
            + options["counts_epsilon"] * len(told.get(client, ()))
            for client in steps.keys() | told.keys()
        )
        return max(spent_by_client, default=0.0)  # of rounds in which no client's reply came

    @cached_property
    def client_epsilon(self) -> float:
        """Return the epsilon of a whole client in the noised means of all rounds; NaN without such noise.

        It is that of one client exchanged for another one, which moves a mean of n clients by twice the clipping norm
        over n at most: so for the accountant, which thinks of a client more or less, noise is half as large.
        """
        steps: dict[float, int] = {}
        options: dict[str, float] = {}
        for row in self.rounds:
            privacy = row.get("privacy", {})
            if privacy.get("means"):
                options, rate = privacy, float(privacy["sample_rate"])
                steps[rate] = steps.get(rate, 0) + int(privacy["means"])
        if not steps:
            return float("nan")
        return metrics.dp_sgd_epsilon(steps, options["client_noise_multiplier"] / 2, options["delta"])

    @property
    def counts_epsilon(self) -> float:
        """Return the largest epsilon of a client's label counts, over all that it told; NaN if they had no noise."""
        _, told, options = self._spent
        return options["counts_epsilon"] * max(map(len, told.values())) if told else float("nan")

    @cached_property
    def prototypes_epsilon(self) -> float:
        """Return the largest epsilon of all that a client holds, in its noised prototypes; NaN if they had no noise."""
        told: dict[str, int] = {}
        options: dict[str, float] = {}
        for row in self.rounds:
            for client, uses in row.get("privacy", {}).get("clients", {}).items():
                if CHANGE_TOLD in uses:
                    options, told[client] = row["privacy"], told.get(client, 0) + int(uses[CHANGE_TOLD])
        if not told:
            return float("nan")
        # Other examples in the place of the client's turn a change of the largest norm round: twice that norm.
        noise = options["prototypes_noise_multiplier"] / 2
        return metrics.dp_sgd_epsilon({1.0: max(told.values())}, noise, options["delta"])

    @property
    def confidences_epsilon(self) -> float:
        """Return the epsilon of the server's examples, in all confidences that clients were sent; NaN without noise."""
        rows = [row["privacy"] for row in self.rounds if row.get("privacy", {}).get("server")]
        told = [options["confidences_epsilon"] * options["server"].get(MEANS_TOLD, 0) for options in rows]
        return sum(told) if told else float("nan")

    @property
    def near_copies(self) -> float:
        """Return the share of generated images that are very near to a training image; NaN if none were generated.

        `fedkeep.metrics.near_copies` says what is near: 5 % of unseen images are.
        """
        rows = [row["nearest_real"] for row in self.rounds if "nearest_real" in row]
        return float(rows[-1]["near_copies"]) if rows else float("nan")

    def rounds_to(self, target: float) -> float:
        """Return the first evaluated round whose accuracy, a fraction, reaches a target; NaN if none does."""
        return metrics.rounds_to(self.evaluated, self.accuracies, target)

    def seconds_to(self, target: float) -> float:
        """Return the seconds of local training, teachers included, until `rounds_to` a target; NaN if none does."""
        reached = self.rounds_to(target)
        spent = [
            (row.get("train") or 0.0) + (row.get("teachers") or 0.0) for row in self.timings if row["round"] <= reached
        ]
        return float(sum(spent)) if spent else float("nan")

    def _in_window(self, history: Floats) -> dict[int, float]:
        """Return the known values of a history, float64 [T], by round, as far as they are in the last window."""
        window = self.windows[-1] if self.windows else ()
        pairs = zip(map(int, self.evaluated), map(float, history), strict=True)
        return {number: value for number, value in pairs if number in window and not np.isnan(value)}
