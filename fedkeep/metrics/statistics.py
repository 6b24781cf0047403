"""Numbers that stand for a series of evaluations, and how sure a difference between two methods is.

The last model of a sequence swings by many points from one evaluation to the next. What is compared is therefore the
mean over a window of rounds, and the difference of two methods, paired by seed, with its confidence interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedkeep.metrics.accuracy import Floats

LEVEL = 0.95
"""Of every confidence interval that is shown."""
BLOCKS = 10
"""Into how many blocks `block_interval` parts a long series."""
FEWEST_BLOCKS = 5
"""Below so many there is no interval: the means of two or three blocks often agree by chance."""


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval.

    ``mean``: NaN without a value.
    ``low``, ``high``: The ends of the interval; NaN where there are fewer than two values to estimate it from.
    ``n``: How many values, or blocks of values, it rests on.
    ``blocks``: Whether it was estimated within one series (`block_interval`) and not over repetitions (`t_interval`):
        it then says nothing about other seeds.
    """

    mean: float
    low: float
    high: float
    n: int
    blocks: bool = False

    @property
    def known(self) -> bool:
        """Tell whether there is an interval."""
        return not (math.isnan(self.low) or math.isnan(self.high))

    @property
    def separated(self) -> bool:
        """Tell whether the interval leaves out 0; without an interval nothing is separated."""
        return self.known and not self.low <= 0 <= self.high


def window_rounds(rounds: int, window: float = 0.5, turn: int = 1) -> tuple[int, int]:
    """Return the rounds over which a window at the end of a run averages.

    >>> window_rounds(60)
    (31, 60)
    >>> window_rounds(20, turn=5)
    (11, 20)
    >>> window_rounds(100, 40)
    (61, 100)

    ``window``: Which part of them counts if it is below 1, otherwise how many. Parts are rounded down.
    ``turn``: How many rounds a method takes for a whole turn, after which it treats the same client in the same way
        again. The window becomes a whole number of turns, at least one, unless the run is shorter than a turn.
    Returns: Counted from 1, both included.
    """
    if rounds < 1 or turn < 1 or not window > 0:
        raise ValueError(f"A window needs rounds, a share and a turn above 0, not {rounds}, {window} and {turn}.")
    wanted = math.floor(rounds * window) if window < 1 else round(window)
    length = min(max(wanted, 1), rounds)
    length = max(length // turn, 1) * turn
    return max(rounds - length, 0) + 1, rounds


def last(values: ArrayLike) -> float:
    """Return the last of a series, [T]; NaN if it is empty."""
    series = _series(values)
    return float(series[-1]) if len(series) else float("nan")


def best(values: ArrayLike) -> float:
    """Return the highest of a series, [T]; NaN if it is empty."""
    series = _series(values)
    return float(series.max()) if len(series) else float("nan")


def rounds_to(rounds: ArrayLike, values: ArrayLike, target: float) -> float:
    """Return the first round whose value reaches a target, T(x) (FedCAD table 1); NaN if none does.

    ``rounds``: The evaluated rounds, counted from 1.
    ``values``: Such as accuracies of the global model.
    """
    when, series = _series(rounds), _series(values)
    if len(when) != len(series):
        raise ValueError(f"{len(when)} rounds and {len(series)} values do not belong together.")
    reached = when[series >= target]
    return float(reached[0]) if len(reached) else float("nan")


def mean_std(values: Iterable[float]) -> tuple[float, float]:
    """Return mean and standard deviation of values, such as one accuracy of each seed.

    ``values``: None of them NaN.
    Returns: std = sqrt(sum_i (x_i - mean)^2 / (n - 1)): of a sample, NaN below two values. The mean of none is NaN.
    """
    series = _series(list(values))
    mean = float(series.mean()) if len(series) else float("nan")
    return mean, float(series.std(ddof=1)) if len(series) > 1 else float("nan")


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> dict[int, float]:
    """Return ``values - reference`` for each key that both have, in the order of ``values``.

    With seeds as keys: methods that ran with one seed had the same partition, initial weights and cohorts. Their
    difference is free of what these do to both, so that its spread is that of the methods. With rounds as keys: the
    difference of two series of evaluations.
    """
    return {key: value - reference[key] for key, value in values.items() if key in reference}


def t_interval(values: Iterable[float], level: float = LEVEL) -> Interval:
    """Return the mean of independent repetitions with Student's t interval: mean ± t_{n-1} std / sqrt(n).

    ``values``: Such as the difference of two methods with each seed; none of them NaN.
    ``level``: How often, over many repetitions of the whole experiment, the interval holds the true mean.
    Returns: Below two values without ends.
    """
    series = _series(list(values))
    mean, std = mean_std(series)
    half = _quantile(level, len(series) - 1) * std / math.sqrt(len(series)) if len(series) > 1 else float("nan")
    return Interval(mean, mean - half, mean + half, len(series))


def block_interval(values: ArrayLike, turn: int = 1, shortest: int = 2, level: float = LEVEL) -> Interval:
    """Return the mean of one series with an interval from the means of blocks of it (batch means).

    Evaluations of one run depend on each other, and those of neighbouring rounds most of all. The means of long blocks
    depend on each other less: `t_interval` of these. The interval speaks of this run, with its seed, and of no other.

    ``values``: In order, such as the difference of two methods at each evaluation of a window.
    ``turn``: The number of values in a whole turn; a block is a whole number of turns.
    ``shortest``: The least number of values in a block: several times as many as a value depends on.
    Returns: From about `BLOCKS` blocks of equal length, at least ``shortest`` and one turn long. What is left over at
        the beginning enters the mean and no block. Below `FEWEST_BLOCKS` without ends.
    """
    series = _series(values)
    size = -(-max(len(series) // BLOCKS, shortest) // turn) * turn
    count = len(series) // size
    mean = float(series.mean()) if len(series) else float("nan")
    if count < FEWEST_BLOCKS:
        return Interval(mean, float("nan"), float("nan"), count, blocks=True)
    blocks = series[len(series) - count * size :].reshape(count, size).mean(axis=1)
    half = _quantile(level, count - 1) * float(blocks.std(ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count, blocks=True)


def _quantile(level: float, freedom: int) -> float:
    """Return how many standard errors the interval of a level reaches to either side."""
    from scipy.special import stdtrit  # what scipy.stats.t.ppf calls, without half a second of imports

    return float(stdtrit(freedom, 0.5 + level / 2))


def _series(values: ArrayLike) -> Floats:
    series = np.asarray(values, dtype=np.float64)
    if series.ndim != 1:
        raise ValueError(f"A series of evaluations has one dimension, not the shape {series.shape}.")
    return series
