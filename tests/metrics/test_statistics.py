"""What stands for a series of evaluations, and how sure a difference is, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedkeep.metrics import (
    Interval,
    block_interval,
    mean_std,
    paired,
    t_interval,
    window_rounds,
)

NAN = float("nan")
few = settings(max_examples=40, deadline=None)
fraction = st.floats(0, 1)


@pytest.mark.parametrize(
    ("rounds", "window", "turn", "covered"),
    [
        (60, 0.5, 1, (31, 60)),
        (5, 0.5, 1, (4, 5)),  # two of five: a share is rounded down
        (1, 0.5, 1, (1, 1)),
        (1000, 0.25, 1, (751, 1000)),
        (100, 40, 1, (61, 100)),
        (10, 40, 1, (1, 10)),  # no more than there are
        (100, 1, 1, (100, 100)),  # one round, not all of them
        (20, 0.5, 5, (11, 20)),
        (20, 0.5, 4, (13, 20)),  # ten rounds hold two whole turns of four
        (20, 3, 5, (16, 20)),  # at least one turn
        (7, 0.5, 10, (1, 7)),  # or all, where a turn is longer than the run
    ],
)
def test_the_rounds_of_a_window(rounds: int, window: float, turn: int, covered: tuple[int, int]) -> None:
    assert window_rounds(rounds, window, turn) == covered


@few
@given(st.integers(1, 500), st.floats(0.01, 600), st.integers(1, 30))
def test_a_window_is_of_whole_turns_at_the_end(rounds: int, window: float, turn: int) -> None:
    first, end = window_rounds(rounds, window, turn)
    assert end == rounds
    assert 1 <= first <= end
    assert (end - first + 1) % turn == 0 or turn > rounds


def test_the_standard_deviation_is_of_a_sample() -> None:
    assert mean_std([0.5, 0.7]) == pytest.approx((0.6, math.sqrt(0.02)))
    assert all(map(math.isnan, mean_std([])))
    mean, std = mean_std([0.5])
    assert mean == 0.5
    assert math.isnan(std)


def test_the_t_interval_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, std 1, standard error 1 / sqrt(3); t with two degrees of freedom is 4.302653.
    found = t_interval([1.0, 2.0, 3.0])
    half = 4.302652729911275 / math.sqrt(3)
    assert (found.mean, found.n, found.blocks) == (2.0, 3, False)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))
    assert not found.separated, "2 - 2.48 is below 0"
    # Two seeds: t with one degree of freedom is 12.7062, so a difference of 1.9 to 2.1 reaches from 0.73 to 3.27.
    two = t_interval([1.9, 2.1])
    assert (two.low, two.high) == pytest.approx((0.7293795, 3.2706205))
    assert two.separated


def test_one_value_has_no_interval() -> None:
    for found in (t_interval([2.0]), t_interval([])):
        assert not found.known
        assert not found.separated
    assert t_interval([2.0]).mean == 2.0
    assert math.isnan(t_interval([]).mean)


def test_an_interval_that_touches_0_separates_nothing() -> None:
    assert not Interval(1.0, 0.0, 2.0, 5).separated
    assert Interval(1.0, 1e-9, 2.0, 5).separated
    assert Interval(-1.0, -2.0, -1e-9, 5).separated
    assert Interval(0.5, 0.5, 0.5, 2).separated, "equal differences have no spread"


@few
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_the_t_interval_is_scipys(values: list[float]) -> None:
    found = t_interval(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    if error > 1e-12:
        low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
        assert (found.low, found.high) == pytest.approx((low, high))


def test_blocks_by_hand() -> None:
    # Ten values make five blocks of two, whose means are 1 to 5: std sqrt(5/2), t with four degrees 2.776445.
    found = block_interval([0, 2, 1, 3, 2, 4, 3, 5, 4, 6])
    half = 2.7764451051977987 * math.sqrt(5 / 2) / math.sqrt(5)
    assert (found.mean, found.n, found.blocks) == (3.0, 5, True)
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half))


def test_long_series_have_ten_blocks_and_short_ones_no_interval() -> None:
    assert block_interval(range(100)).n == 10
    assert block_interval(range(45)).n == 11, "blocks of four; the first value is in none"
    assert block_interval(range(10)).known
    assert not block_interval(range(9)).known, "four blocks"
    assert block_interval(range(3)).mean == 1.0
    assert math.isnan(block_interval([]).mean)


def test_what_is_left_over_enters_no_block() -> None:
    # Of eleven values the first is left over; the mean has it.
    found = block_interval([96, 0, 2, 1, 3, 2, 4, 3, 5, 4, 6])
    assert found.mean == pytest.approx(126 / 11)
    assert found.high - found.low == pytest.approx(2 * 2.7764451051977987 * math.sqrt(5 / 2) / math.sqrt(5))


def test_a_block_is_as_long_as_values_depend_on_each_other() -> None:
    series = list(range(60))
    assert block_interval(series).n == 10
    assert block_interval(series, shortest=12).n == 5
    assert not block_interval(series, shortest=13).known, "four blocks"
    assert block_interval(series, turn=5, shortest=12).n == 4, "of three turns"


def test_a_block_is_whole_turns() -> None:
    """A period of three, as of three clients in turn, must not look like spread."""
    series = [0.0, 5.0, 10.0] * 6
    in_turns = block_interval(series, turn=3)
    assert in_turns.n == 6
    assert (in_turns.low, in_turns.high) == (5.0, 5.0)
    assert block_interval(series).high > 5.5


@few
@given(st.lists(fraction, min_size=2, max_size=8), st.floats(-1, 1))
def test_what_seeds_share_does_not_spread_their_differences(values: list[float], gain: float) -> None:
    reference = dict(enumerate(values))
    found = t_interval(paired({seed: value + gain for seed, value in reference.items()}, reference).values())
    assert found.mean == pytest.approx(gain, abs=1e-12)
    assert found.high - found.low == pytest.approx(0.0, abs=1e-11)


def test_only_seeds_of_both_are_paired() -> None:
    assert paired({2: 0.75, 0: 0.5, 1: 0.25}, {0: 0.25, 2: 0.5, 7: 0.1}) == {2: 0.25, 0: 0.25}
