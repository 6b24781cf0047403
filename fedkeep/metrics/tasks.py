"""Accuracy, forgetting and transfer over tasks whose classes arrive one after the other.

All of it follows from a matrix of accuracies a, [T, T]: row t after task t, column j on the test examples of task j's
classes, with the model deciding among all classes seen so far. What lies above the diagonal (a task before it is
learned) is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from fedkeep.metrics.accuracy import Floats, class_accuracy, mean_of_known


def task_accuracies(correct: ArrayLike, total: ArrayLike, sizes: Sequence[int]) -> Floats:
    """Return the matrix of accuracies by task from counts by class, float64 [T, T].

    ``correct``: Correct test examples of each class after each task; classes in order of arrival.
    """
    hits, examples = np.asarray(correct, dtype=np.float64), np.asarray(total, dtype=np.float64)
    if hits.shape != (len(sizes), sum(sizes)) or examples.shape != (sum(sizes),):
        raise ValueError(
            f"{len(sizes)} tasks of {sum(sizes)} classes need counts of shapes {(len(sizes), sum(sizes))} and "
            f"{(sum(sizes),)}, not {hits.shape} and {examples.shape}."
        )
    starts = np.cumsum([0, *sizes])[:-1]
    found, of = np.add.reduceat(hits, starts, axis=1), np.add.reduceat(examples, starts)
    return np.stack([class_accuracy(row, of) for row in found])


def accuracy_after(matrix: ArrayLike) -> Floats:
    """Return A_t = (1/t) sum_{j<=t} a_{t,j}, [T]: the accuracy after each task, all tasks so far counting alike.

    The share of all test examples that are right (`fedkeep.metrics.accuracy`) is the same for tasks of equal size.
    """
    values = _square(matrix)
    return np.asarray([row[: t + 1].mean() for t, row in enumerate(values)])


def average_incremental_accuracy(matrix: ArrayLike) -> float:
    """Return the mean of `accuracy_after` over the tasks (Rebuffi et al., 2017, iCaRL; FedSKF eq. 11)."""
    return float(accuracy_after(matrix).mean())


def forgetting_tasks(matrix: ArrayLike) -> float:
    """Return task-wise forgetting, F_T = 1/(T-1) sum_{j<T} (max_{j <= l < T} a_{l,j} - a_{T,j}).

    Chaudhry et al., 2018, "Riemannian walk for incremental learning", with a_{l,j} the accuracy on the test examples of
    task j after learning task l. F_k of an earlier task is that of ``matrix[:k, :k]``.

    ``matrix``: Row l after task l, column j for task j. What lies above the diagonal (a task before it is learned) is
        not read. Tasks whose accuracy is NaN at the end, or at all times before, are left out of the mean.
    Returns: From -1 to 1, not clamped: below 0, more was learned than lost. NaN with one task, after which no other was
        learned.
    """
    values = np.asarray(matrix, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != values.shape[1]:
        raise ValueError(f"A matrix of accuracies by task has the shape [tasks, tasks], not {values.shape}.")
    return mean_of_known([float(np.fmax.reduce(values[j:-1, j]) - values[-1, j]) for j in range(len(values) - 1)])


def backward_transfer(matrix: ArrayLike) -> float:
    """Return 1/(T-1) sum_{j<T} (a_{T,j} - a_{j,j}); below 0, learning new tasks cost the old ones.

    Lopez-Paz & Ranzato, 2017, "Gradient episodic memory". Avalanche's StreamForgetting after the last task is the same
    with the sign changed: its forgetting counts from the accuracy right after a task, not from the best. NaN with one
    task.
    """
    values = _square(matrix)
    return _mean([values[-1, j] - values[j, j] for j in range(len(values) - 1)])


def chaudhry_mean(matrix: ArrayLike) -> float:
    """Return the mean over t >= 2 of `forgetting_tasks` after task t; NaN with one task."""
    values = _square(matrix)
    return _mean([forgetting_tasks(values[:t, :t]) for t in range(2, len(values) + 1)])


def feddcl_literal(matrix: ArrayLike, after: int | None = None) -> float:
    """Return FedDCL's eq. 13 after a task, by default the last: 1/(t-1) sum_{j<t} (max_{l<T} a_{l,j} - a_{t,j}).

    As printed the maximum is over all stages but the last of the whole run, so it may look at later models than that
    after task t. After the last task it is `forgetting_tasks`.
    """
    values = _square(matrix)
    t = len(values) if after is None else after
    return _mean([float(np.fmax.reduce(values[j:-1, j]) - values[t - 1, j]) for j in range(t - 1)])


def fedskf(matrix: ArrayLike) -> float:
    """Return the mean drop in one step, 1/(T-1) sum_{t=2..T} 1/(t-1) sum_{i<t} (a_{t-1,i} - a_{t,i}).

    FedSKF's eq. 12 with 1/(t-1) in place of 1/t: with what is printed (`fedskf_print`), its table 2 would need new-task
    accuracies above 1. NaN with one task.
    """
    return _one_step(matrix, lambda t: t - 1)


def fedskf_print(matrix: ArrayLike) -> float:
    """Return FedSKF's eq. 12 as printed: 1/(T-1) sum_{t=2..T} 1/t sum_{i<t} (a_{t-1,i} - a_{t,i})."""
    return _one_step(matrix, lambda t: t)


FORGETTING: Mapping[str, Callable[[ArrayLike], float]] = {
    "chaudhry": forgetting_tasks,
    "chaudhry_mean": chaudhry_mean,
    "feddcl": forgetting_tasks,
    "feddcl_literal": feddcl_literal,
    "fedskf": fedskf,
    "fedskf_print": fedskf_print,
}
"""The definitions that papers use, by name; FedDCL's is Chaudhry's where only models up to the task are looked at.

What DDDR's code computes is `class_forgetting`, of counts by class. LANDER's code takes the maximum over tasks where
that over stages is meant: what comes out measures no forgetting, and is left out.
"""


def class_forgetting(correct: ArrayLike, total: ArrayLike, sizes: Sequence[int]) -> float:
    """Return forgetting by class, as the code of DDDR (Liang et al., 2024) counts it; never below 0.

    The best accuracy of a class after any task, the last included, minus that after the last; the mean over the classes
    of all tasks but the last. Parameters are those of `task_accuracies`. NaN with one task.
    """
    examples = np.asarray(total, dtype=np.float64)
    values = np.stack([class_accuracy(row, examples) for row in np.asarray(correct, dtype=np.float64)])
    drops = np.fmax.reduce(values, axis=0) - values[-1]
    return _mean(drops[: sum(sizes[:-1])].tolist())


def _one_step(matrix: ArrayLike, divisor: Callable[[int], int]) -> float:
    values = _square(matrix)
    steps = range(2, len(values) + 1)
    return _mean([float((values[t - 2, : t - 1] - values[t - 1, : t - 1]).sum()) / divisor(t) for t in steps])


def _square(matrix: ArrayLike) -> Floats:
    values = np.asarray(matrix, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != values.shape[1] or not len(values):
        raise ValueError(f"A matrix of accuracies by task has the shape [tasks, tasks], not {values.shape}.")
    return values


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
