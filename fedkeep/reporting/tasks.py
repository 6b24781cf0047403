"""What a record says of tasks in turn: how accurate each still is, and what was forgotten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedkeep import metrics
from fedkeep.reporting.record import Floats, Record


@dataclass(frozen=True)
class TaskMetrics(Record):
    """Measures of class-incremental learning (see `fedkeep.metrics.tasks`); NaN without tasks."""

    @property
    def task_sizes(self) -> list[int]:
        """Return how many classes arrived with each task; empty without tasks."""
        return [int(size) for size in self.info.get("tasks", [])]

    @cached_property
    def task_matrix(self) -> Floats:
        """Return accuracies by task after each task that is finished, float64 [T, T] (see `fedkeep.metrics.tasks`)."""
        rounds = self.rounds_planned // max(len(self.task_sizes), 1)
        ends = [row for row in self.evaluations if self.task_sizes and row["round"] % rounds == 0]
        sizes = self.task_sizes[: len(ends)]
        if not sizes:
            return np.zeros((0, 0))
        correct = [self.counted(row)[0][: sum(sizes)] for row in ends]
        return metrics.task_accuracies(correct, self.test_total[: sum(sizes)], sizes)

    @property
    def task_accuracy(self) -> float:
        """Return A_T, the mean over tasks of the accuracy after the last task that is finished."""
        return self._of_tasks(lambda matrix: float(metrics.accuracy_after(matrix)[-1]))

    @property
    def incremental(self) -> float:
        """Return the average incremental accuracy, the mean of A_t over the tasks that are finished."""
        return self._of_tasks(metrics.average_incremental_accuracy)

    @property
    def forgetting_chaudhry(self) -> float:
        """Return how far each old task fell from its best, on average, after the last finished task."""
        return self._of_tasks(metrics.FORGETTING["chaudhry"])

    @property
    def forgetting_chaudhry_mean(self) -> float:
        """Return the mean of that over all finished tasks but the first."""
        return self._of_tasks(metrics.FORGETTING["chaudhry_mean"])

    @property
    def forgetting_fedskf(self) -> float:
        """Return how much old tasks lose with each new one, on average (FedSKF's definition, as we read it)."""
        return self._of_tasks(metrics.FORGETTING["fedskf"])

    @property
    def backward(self) -> float:
        """Return how much better old tasks are after the last finished task than right after their own, on average."""
        return self._of_tasks(metrics.backward_transfer)

    def _of_tasks(self, measure: Callable[[Floats], float]) -> float:
        """Return a measure of the finished tasks; NaN without any."""
        return measure(self.task_matrix) if len(self.task_matrix) else float("nan")
