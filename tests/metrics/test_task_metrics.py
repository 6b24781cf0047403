"""Accuracy, forgetting and transfer over tasks, against numbers worked out by hand and a paper's table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fedkeep.metrics import (
    accuracy,
    accuracy_after,
    average_incremental_accuracy,
    backward_transfer,
    chaudhry_mean,
    fedskf,
    forgetting_tasks,
    task_accuracies,
)

NAN = float("nan")
RULES = forgetting_tasks, chaudhry_mean, fedskf
few = settings(max_examples=60, deadline=None)
matrices = st.integers(2, 6).flatmap(lambda n: arrays(np.float64, (n, n), elements=st.floats(0.0, 1.0)))

# After each of three tasks of two classes, 10, 10, 20, 20, 10 and 30 test examples.
SIZES = (2, 2, 2)
TOTAL = [10, 10, 20, 20, 10, 30]
CORRECT = [[9, 7, 0, 0, 0, 0], [5, 5, 16, 18, 0, 0], [6, 2, 8, 12, 9, 21]]
MATRIX = [[0.8, 0.0, 0.0], [0.5, 0.85, 0.0], [0.4, 0.5, 0.75]]


def test_accuracies_by_hand() -> None:
    np.testing.assert_allclose(task_accuracies(CORRECT, TOTAL, SIZES), MATRIX)
    np.testing.assert_allclose(accuracy_after(MATRIX), [0.8, 1.35 / 2, 1.65 / 3])
    assert average_incremental_accuracy(MATRIX) == pytest.approx((0.8 + 0.675 + 0.55) / 3)
    pooled = accuracy(CORRECT[2], TOTAL)
    assert pooled == 0.58
    assert accuracy_after(MATRIX)[-1] != pytest.approx(pooled), "tasks of different size count alike"


def test_forgetting_by_hand() -> None:
    """Drops: after task 2, 0.3 of task 1; after task 3, 0.1 more of it, and 0.35 of task 2."""
    assert forgetting_tasks(MATRIX) == pytest.approx((0.4 + 0.35) / 2)
    assert chaudhry_mean(MATRIX) == pytest.approx((0.3 + 0.375) / 2)
    assert fedskf(MATRIX) == pytest.approx((0.3 / 1 + (0.1 + 0.35) / 2) / 2)


def test_forgetting_of_a_task_that_recovers() -> None:
    """Task 1: 0.5, then 0.9, then 0.6. Its best is 0.9; in steps it gained 0.4 and lost 0.3; all in all, it gained."""
    matrix = [[0.5, 0, 0], [0.9, 0.7, 0], [0.6, 0.7, 0.2]]
    assert forgetting_tasks(matrix) == pytest.approx((0.3 + 0.0) / 2)
    assert forgetting_tasks(np.asarray(matrix)[:2, :2]) == pytest.approx(-0.4)
    assert chaudhry_mean(matrix) == pytest.approx((-0.4 + 0.15) / 2)
    assert fedskf(matrix) == pytest.approx((-0.4 + 0.3 / 2) / 2)
    assert backward_transfer(matrix) == pytest.approx((0.1 + 0.0) / 2)


def test_transfer_by_hand() -> None:
    assert backward_transfer(MATRIX) == pytest.approx(((0.4 - 0.8) + (0.5 - 0.85)) / 2)


@pytest.mark.parametrize(
    ("after", "new", "forgetting", "mean"),
    [
        ((0.808, 0.698, 0.636, 0.568, 0.532), 0.80, 15, 64.84),
        ((0.771, 0.639, 0.576, 0.503, 0.463), 0.74, 16, 59.04),
        ((0.762, 0.663, 0.556, 0.451, 0.364), 0.84, 24, 55.92),
        ((0.808, 0.687, 0.609, 0.542, 0.471), 0.82, 19, 62.34),
    ],
)
def test_fedskfs_table_2(after: tuple[float, ...], new: float, forgetting: int, mean: float) -> None:
    """From A_1 to A_5 and an accuracy of the new task that is the same each time, the printed F and mean follow."""
    matrix = np.zeros((5, 5))
    for t, value in enumerate(after, start=1):
        matrix[t - 1, : t - 1] = (t * value - new) / max(t - 1, 1)
        matrix[t - 1, t - 1] = value if t == 1 else new
    np.testing.assert_allclose(accuracy_after(matrix), after)
    assert 100 * average_incremental_accuracy(matrix) == pytest.approx(mean, abs=0.005)
    assert round(100 * fedskf(matrix)) == forgetting


def test_fedskfs_printed_formula_cannot_give_its_table() -> None:
    """Even new tasks learned without a fault would not lose as much as the row without fusion says, 24."""
    after = (0.762, 0.663, 0.556, 0.451, 0.364)
    matrix = np.zeros((5, 5))
    for t, value in enumerate(after, start=1):
        matrix[t - 1, : t - 1] = (t * value - 1.0) / max(t - 1, 1)
        matrix[t - 1, t - 1] = value if t == 1 else 1.0
    lost = [(matrix[t - 1, :t] - matrix[t, :t]).sum() / (t + 1) for t in range(1, 5)]
    assert 100 * np.mean(lost) < 23.5


# Properties


def avalanche(matrix: NDArray[np.float64]) -> float:
    """Return Avalanche's stream forgetting, as documented, by its own bookkeeping.

    Forgetting of an experience: the value recorded right after training on it minus the last. Means over the
    experiences that have both.
    """
    tasks = len(matrix)
    initial, lasts = {}, {}
    for trained in range(tasks):
        for asked in range(tasks):
            (initial if trained == asked else lasts)[asked] = float(matrix[trained, asked])
    return float(np.mean([initial[k] - lasts[k] for k in range(tasks - 1)]))


@few
@given(matrices)
def test_backward_transfer_is_avalanches(matrix: NDArray[np.float64]) -> None:
    assert -backward_transfer(matrix) == pytest.approx(avalanche(matrix), abs=1e-12)


@few
@given(matrices)
def test_definitions_as_loops(matrix: NDArray[np.float64]) -> None:
    tasks = len(matrix)
    a = {(j, t): float(matrix[t - 1, j - 1]) for j in range(1, tasks + 1) for t in range(1, tasks + 1)}

    def chaudhry(t: int) -> float:
        return sum(max(a[j, s] for s in range(j, t)) - a[j, t] for j in range(1, t)) / (t - 1)

    steps = (sum(a[i, t - 1] - a[i, t] for i in range(1, t)) / (t - 1) for t in range(2, tasks + 1))
    assert forgetting_tasks(matrix) == pytest.approx(chaudhry(tasks), abs=1e-9)
    over_tasks = sum(chaudhry(t) for t in range(2, tasks + 1)) / (tasks - 1)
    assert chaudhry_mean(matrix) == pytest.approx(over_tasks, abs=1e-9)
    assert fedskf(matrix) == pytest.approx(sum(steps) / (tasks - 1), abs=1e-9)
    upper = matrix.copy()
    upper[np.triu_indices(tasks, k=1)] = NAN  # not read
    for rule in RULES:
        assert rule(upper) == rule(matrix), rule
    np.testing.assert_array_equal(accuracy_after(upper), accuracy_after(matrix))


@few
@given(matrices)
def test_where_accuracy_only_falls_forgetting_adds_up(matrix: NDArray[np.float64]) -> None:
    falling = np.minimum.accumulate(matrix, axis=0)
    assert forgetting_tasks(falling) == pytest.approx(-backward_transfer(falling), abs=1e-12)
    assert all(rule(falling) >= -1e-12 for rule in RULES)


def test_with_one_task_nothing_can_be_forgotten_or_transferred() -> None:
    assert accuracy_after([[0.7]]).tolist() == [0.7]
    assert all(math.isnan(rule([[0.7]])) for rule in RULES)
    assert math.isnan(backward_transfer([[0.7]]))


def test_a_task_without_test_examples_is_left_out_of_all_means() -> None:
    matrix = [[0.8, NAN, 0], [0.6, NAN, 0], [0.4, NAN, 0.9]]
    assert accuracy_after(matrix) == pytest.approx([0.8, 0.6, 0.65])
    assert backward_transfer(matrix) == pytest.approx(-0.4)
    assert fedskf(matrix) == pytest.approx(0.2)
    assert forgetting_tasks(matrix) == pytest.approx(0.4)


def test_shapes_are_checked() -> None:
    with pytest.raises(
        ValueError, match=r"3 tasks of 6 classes need counts of shapes \(3, 6\) and \(6,\), not \(2, 6\)"
    ):
        task_accuracies(CORRECT[:2], TOTAL, SIZES)
