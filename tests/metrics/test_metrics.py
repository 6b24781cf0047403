"""The metrics give the published numbers, stay in their ranges, and treat missing classes as missing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fedkeep.metrics import (
    accuracy,
    balanced_accuracy,
    class_accuracy,
    consistency,
    forgetting,
    forgetting_tasks,
)

NAN = float("nan")
fraction = st.floats(0.0, 1.0)
few = settings(max_examples=80, deadline=None)


@pytest.fixture(autouse=True)
def _no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a mean of nothing would warn
        yield


def fractions(rows: Any, columns: Any) -> st.SearchStrategy[NDArray[np.float64]]:
    return st.tuples(rows, columns).flatmap(lambda shape: arrays(np.float64, shape, elements=fraction))


counts = st.lists(
    st.integers(0, 50).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), min_size=1, max_size=8
)


def test_accuracies_golden() -> None:
    correct, total = [8, 0, 1], [10, 0, 40]
    assert accuracy(correct, total) == 9 / 50
    np.testing.assert_array_equal(class_accuracy(correct, total), [0.8, NAN, 0.025])
    assert balanced_accuracy(correct, total) == pytest.approx(0.4125)


@few
@given(counts)
def test_accuracies_are_fractions(pairs: list[tuple[int, int]]) -> None:
    correct, total = np.array(pairs).T
    shares = class_accuracy(correct, total)
    assert shares.dtype == np.float64
    np.testing.assert_array_equal(np.isnan(shares), total == 0)
    if not total.any():
        assert math.isnan(accuracy(correct, total))
        assert math.isnan(balanced_accuracy(correct, total))
        return
    known = shares[total > 0]
    for value in (accuracy(correct, total), balanced_accuracy(correct, total)):
        assert 0 <= value <= 1
        assert known.min() - 1e-12 <= value <= known.max() + 1e-12


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_balanced_accuracy_is_accuracy_where_classes_are_equal(correct: list[int]) -> None:
    total = [9] * len(correct)
    assert balanced_accuracy(correct, total) == pytest.approx(accuracy(correct, total))


@pytest.mark.parametrize("metric", [accuracy, class_accuracy, balanced_accuracy])
@pytest.mark.parametrize(
    ("correct", "total", "message"),
    [
        ([1, 2], [3], "one number a class"),
        ([[1]], [[3]], "one number a class"),
        ([4], [3], "between 0 and all"),
        ([-1], [3], "between 0 and all"),
        ([NAN], [3], "between 0 and all"),
    ],
)
def test_what_is_no_count_is_refused(metric: Callable[..., Any], correct: Any, total: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric(correct, total)


def test_forgetting_golden() -> None:
    assert forgetting([[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]]) == pytest.approx(0.2, abs=1e-15)


def test_forgetting_is_not_clamped_and_excludes_the_last_from_the_maximum() -> None:
    assert forgetting([[0.1, 0.2], [0.4, 0.3]]) == pytest.approx(-0.2)


def test_forgetting_skips_classes_without_test_examples() -> None:
    history = [[0.2, NAN, 0.8], [0.6, NAN, 0.4], [0.5, NAN, 0.5]]
    assert forgetting(history) == pytest.approx(0.2)
    assert math.isnan(forgetting([[NAN], [NAN]]))
    # A class that is tested from the second evaluation on has been forgotten since then.
    assert forgetting([[0.5, NAN], [0.5, 0.9], [0.5, 0.3]]) == pytest.approx(0.3)


def test_forgetting_needs_a_past() -> None:
    assert forgetting([[0.3, 0.4]]) == 0.0
    assert forgetting(np.empty((0, 4))) == 0.0


@few
@given(fractions(st.integers(2, 6), st.integers(1, 5)), st.randoms(use_true_random=False))
def test_forgetting_properties(history: NDArray[np.float64], random: Any) -> None:
    value = forgetting(history)
    # No more than the mean range of the classes, and no less than what was gained since the first evaluation.
    assert value <= np.ptp(history, axis=0).mean() + 1e-12
    assert value >= (history[0] - history[-1]).mean() - 1e-12
    order = random.sample(range(len(history) - 1), len(history) - 1)
    assert forgetting(history[[*order, -1]]) == value  # the order of earlier rounds does not count
    assert forgetting(np.vstack([history, history.max(axis=0)])) == pytest.approx(0.0, abs=1e-12)
    lost = np.vstack([history, np.zeros(history.shape[1])])
    assert forgetting(lost) == pytest.approx(history.max(axis=0).mean())


def test_forgetting_of_tasks_golden() -> None:
    matrix = [[0.9, NAN, NAN], [0.7, 0.8, NAN], [0.4, 0.6, 0.95]]
    assert forgetting_tasks(matrix) == pytest.approx(((0.9 - 0.4) + (0.8 - 0.6)) / 2)
    assert forgetting_tasks(np.array(matrix)[:2, :2]) == pytest.approx(0.2)


def test_forgetting_of_tasks_may_be_negative_and_reads_nothing_before_a_task_is_learned() -> None:
    assert forgetting_tasks([[0.5, 1.0, 1.0], [0.6, 0.3, 1.0], [0.8, 0.4, 0.0]]) == pytest.approx(-0.15)


def test_forgetting_of_tasks_is_undefined_for_one() -> None:
    assert math.isnan(forgetting_tasks([[0.5]]))
    assert math.isnan(forgetting_tasks(np.empty((0, 0))))


def test_forgetting_of_tasks_skips_tasks_without_test_examples() -> None:
    assert forgetting_tasks([[NAN, NAN, NAN], [NAN, 0.8, NAN], [NAN, 0.6, 0.9]]) == pytest.approx(0.2)


@few
@given(st.integers(2, 6).flatmap(lambda n: arrays(np.float64, (n, n), elements=fraction)))
def test_forgetting_of_tasks_is_that_of_classes_where_all_is_read(matrix: NDArray[np.float64]) -> None:
    # Below the diagonal only: entries above it are set so low that no maximum takes them.
    low = np.where(np.triu(np.ones_like(matrix), 1) > 0, -1.0, matrix)
    assert forgetting_tasks(matrix) == pytest.approx(forgetting(low[:, :-1]))
    assert -1 <= forgetting_tasks(matrix) <= 1


def test_consistency_golden() -> None:
    assert consistency((0.9, 0.6, 0.2, 0.1), (0.1, 0.2, 0.8, 0.9)) == pytest.approx(0.340042, abs=5e-7)


def test_consistency_at_its_ends() -> None:
    assert consistency([1, 0], [0, 1]) == 0.0
    assert consistency([0, 0], [0.5, 0.5]) == 0.0
    assert consistency([0, 0], [0, 0]) == 0.0
    assert consistency([0.3, NAN, 0.4, 0.9], [0.3, 0.9, 0.4, NAN]) == pytest.approx(1.0)
    assert consistency([0.5, 0.6, 0.9], [0.5, 0.6, 0.9]) <= 1.0  # 1.0000000000000002 without care


@few
@given(arrays(np.float64, (2, 5), elements=st.integers(0, 100).map(lambda n: n / 100)))
def test_consistency_properties(pair: NDArray[np.float64]) -> None:
    before, after = pair
    value = consistency(before, after)
    assert 0 <= value <= 1
    assert consistency(after, before) == value
    assert consistency(before / 2, after) == pytest.approx(value)
    assert consistency(before, before) == pytest.approx(1.0 if before.any() else 0.0)
