"""Metrics: pure functions of class-wise counts and accuracies. Accuracies are fractions; papers print percent.

Forgetting: what was known once and is not known any more. What is measured of tasks follows from a matrix of accuracies
a, [T, T]: row t after task t, column j on the test examples of task j's classes, with the model deciding among all
classes seen so far. What lies above the diagonal (a task before it is learned) is not read.

The last model of a sequence swings by many points from one evaluation to the next. What is compared is therefore the
mean over a window of rounds, and the difference of two methods, paired by seed, with its confidence interval.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkeep.errors import MissingExtra

Floats: TypeAlias = NDArray[np.float64]


def accuracy(correct: ArrayLike, total: ArrayLike) -> float:
    """Return top-1 accuracy, sum_c correct_c / sum_c total_c; NaN without any example.

    ``correct``: Examples of each class whose highest logit is their label's.
    Returns: From 0 to 1.
    """
    hits, examples = _counts(correct, total)
    return float(hits.sum() / examples.sum()) if examples.any() else float("nan")


def counted(record: Mapping[str, Any], test_total: ArrayLike) -> tuple[Floats, Floats]:
    """Return correct and all test examples by class of a record, both float64 [C]; 0 for classes to come.

    ``record``: Of an evaluated round or model: ``correct`` of the classes so far; ``total`` only where clients tested.
    ``test_total``: The test examples by class, [C].
    """
    total = np.asarray(test_total, dtype=np.float64)
    missing = len(total) - len(record["correct"])
    correct = np.asarray([*record["correct"], *[0] * missing], dtype=np.float64)
    if "total" in record:
        return correct, np.asarray([*record["total"], *[0] * missing], dtype=np.float64)
    return correct, np.where(np.arange(len(correct)) < len(record["correct"]), total, 0.0)


def class_accuracy(correct: ArrayLike, total: ArrayLike) -> Floats:
    """Return class-wise accuracy a_c = correct_c / total_c, float64 [classes]; NaN where there is no test example.

    Parameters and errors are those of `accuracy`.
    """
    hits, examples = _counts(correct, total)
    shares: Floats = np.divide(hits, examples, out=np.full(examples.shape, np.nan), where=examples > 0)
    return shares


def chance_accuracy(total: ArrayLike) -> float:
    """Return the accuracy of a model that always predicts the commonest class; NaN without any example."""
    examples = np.asarray(total, dtype=np.float64)
    return float(examples.max() / examples.sum()) if examples.any() else float("nan")


def is_at_chance(correct: ArrayLike, total: ArrayLike) -> bool:
    """Tell whether a model cannot be told from guessing: neither accuracy is above chance by 1.645 standard errors.

    A guess does not depend on the image. Its accuracy is that of the commonest class at most, p, with the standard
    error sqrt(p (1 - p) / n) on n examples. Where one class dominates, a model may know all classes and not be above p:
    so its balanced accuracy counts too. That of a guess is q = 1/C with C classes, with the standard error
    sqrt(sum_c q (1 - q) / n_c) / C if all classes are guessed alike. With as many examples of each class the two bounds
    are one. A model that guesses is above a bound in 5 % of all test sets.

    ``correct``: Correct examples of each class, of one evaluation or in the mean over several.
    ``total``: Examples of each class. Without any, nothing is at chance.
    """
    hits, examples = _counts(correct, total)
    if not examples.any():
        return False
    chance = chance_accuracy(total)
    if accuracy(hits, examples) > chance + 1.645 * float(np.sqrt(chance * (1 - chance) / examples.sum())):
        return False
    present = examples[examples > 0]
    guess = 1 / len(present)
    error = float(np.sqrt((guess * (1 - guess) / present).sum())) * guess
    return balanced_accuracy(hits, examples) <= guess + 1.645 * error


def balanced_accuracy(correct: ArrayLike, total: ArrayLike) -> float:
    """Return the mean of the class accuracies over the classes that have test examples; NaN if none has.

    Parameters and errors are those of `accuracy`.
    """
    return mean_of_known(class_accuracy(correct, total))


def forgetting(history: ArrayLike) -> float:
    """Return class-wise forgetting, F = (1/C) sum_c max_{1 <= t <= T-1} (A_c(t) - A_c(T)).

    FedADKD eq. 1, after FedNTD (Lee et al., 2022), with A the class-wise test accuracies of the global model after
    rounds 1 to T. Taken over local trainings instead of rounds, it is our reading of SFedKD's, with classes as tasks.

    ``history``: Class-wise accuracies at T evaluations in their order; NaN where a class has no test example. Classes
        without a known last or any known earlier accuracy are left out of the mean.
    Returns: From -1 to 1, not clamped: below 0, more was learned than lost. With fewer than two evaluations nothing can
        have been forgotten yet: 0. NaN if no class is known.
    """
    values = np.asarray(history, dtype=np.float64)
    if len(values) < 2:
        return 0.0
    # fmax ignores NaN, and is NaN only where all are.
    drops = np.fmax.reduce(values[:-1], axis=0) - values[-1]
    return mean_of_known(drops.tolist())


def mean_of_known(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there is none."""
    return mean_of(value for value in values if not np.isnan(value))


def _counts(correct: ArrayLike, total: ArrayLike) -> tuple[Floats, Floats]:
    hits, examples = np.asarray(correct, dtype=np.float64), np.asarray(total, dtype=np.float64)
    if hits.shape != examples.shape or hits.ndim != 1:
        raise ValueError(
            f"Counts of correct and of all examples must be one number a class, not of shapes {hits.shape} and "
            f"{examples.shape}."
        )
    if not ((hits >= 0) & (hits <= examples)).all():
        raise ValueError(f"Correct examples of each class must lie between 0 and all of them: {hits} of {examples}.")
    return hits, examples


def task_accuracies(correct: ArrayLike, total: ArrayLike, sizes: Sequence[int]) -> Floats:
    """Return the matrix of accuracies by task from counts by class, float64 [T, T].

    ``correct``: Correct test examples of each class after each task; classes in order of arrival.
    ``total``: All test examples of each class, or a row of them after each task.
    Returns: NaN for a task of which nothing was tested.
    """
    hits, examples = np.asarray(correct, dtype=np.float64), np.asarray(total, dtype=np.float64)
    if hits.shape != (len(sizes), sum(sizes)) or examples.shape not in (hits.shape, hits.shape[1:]):
        raise ValueError(
            f"{len(sizes)} tasks of {sum(sizes)} classes need counts of shapes {(len(sizes), sum(sizes))} and "
            f"{(sum(sizes),)}, not {hits.shape} and {examples.shape}."
        )
    starts = np.cumsum([0, *sizes])[:-1]
    found, of = (np.add.reduceat(np.broadcast_to(one, hits.shape), starts, axis=1) for one in (hits, examples))
    return np.stack([class_accuracy(*rows) for rows in zip(found, of, strict=True)])


def accuracy_after(matrix: ArrayLike) -> Floats:
    """Return A_t = (1/t) sum_{j<=t} a_{t,j}, [T]: the accuracy after each task, all tasks so far counting alike.

    Here and in what follows a task without test examples, whose accuracy is NaN, is left out of means.
    The share of all test examples that are right (`accuracy`) is the same for tasks of equal size.
    """
    values = np.asarray(matrix, dtype=np.float64)
    return np.asarray([mean_of_known(row[: t + 1]) for t, row in enumerate(values)])


def average_incremental_accuracy(matrix: ArrayLike) -> float:
    """Return the mean of `accuracy_after` over the tasks (Rebuffi et al., 2017, iCaRL; FedSKF eq. 11)."""
    return mean_of_known(accuracy_after(matrix))


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
    return mean_of_known([float(np.fmax.reduce(values[j:-1, j]) - values[-1, j]) for j in range(len(values) - 1)])


def backward_transfer(matrix: ArrayLike) -> float:
    """Return 1/(T-1) sum_{j<T} (a_{T,j} - a_{j,j}); below 0, learning new tasks cost the old ones.

    Lopez-Paz & Ranzato, 2017, "Gradient episodic memory". Avalanche's StreamForgetting after the last task is the same
    with the sign changed: its forgetting counts from the accuracy right after a task, not from the best. NaN with one
    task.
    """
    values = np.asarray(matrix, dtype=np.float64)
    return mean_of_known([values[-1, j] - values[j, j] for j in range(len(values) - 1)])


def chaudhry_mean(matrix: ArrayLike) -> float:
    """Return the mean over t >= 2 of `forgetting_tasks` after task t; NaN with one task."""
    values = np.asarray(matrix, dtype=np.float64)
    return mean_of_known([forgetting_tasks(values[:t, :t]) for t in range(2, len(values) + 1)])


def fedskf(matrix: ArrayLike) -> float:
    """Return the mean drop in one step, 1/(T-1) sum_{t=2..T} 1/(t-1) sum_{i<t} (a_{t-1,i} - a_{t,i}).

    FedSKF's eq. 12 with 1/(t-1) in place of 1/t: with what is printed, its table 2 would need new-task accuracies
    above 1. NaN with one task.
    """
    values = np.asarray(matrix, dtype=np.float64)
    steps = range(2, len(values) + 1)
    return mean_of_known([mean_of_known(values[t - 2, : t - 1] - values[t - 1, : t - 1]) for t in steps])


def mean_of(values: Iterable[float]) -> float:
    """Return the mean of values; NaN if there are none."""
    known = list(values)
    return float(np.mean(known)) if known else float("nan")


def consistency(before: ArrayLike, after: ArrayLike) -> float:
    """Return the cosine of class-wise accuracies before and after a local training, a.b / (|a| |b|) (SFedKD fig. 1b).

    ``before``, ``after``: Class-wise test accuracies of the models that two clients in a row send on. Classes that are
        NaN in either (no test example) are left out.
    Returns: From 0 to 1; 0 if either is all zero.
    """
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    known = ~(np.isnan(first) | np.isnan(second))
    first, second = first[known], second[known]
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    # A cosine of equal vectors may exceed 1 by rounding.
    return min(float(first @ second) / norms, 1.0) if norms else 0.0


def kold(proportions: ArrayLike, accuracies: ArrayLike, *, support: bool = False) -> tuple[float, float]:
    """Return a local model's accuracy inside and outside its client's label distribution (Lee et al., 2022, FedNTD).

    Inside, sum_c D_c a_c; outside, sum_c (1 - D_c) / (C - 1) a_c: how much of the knowledge on the out-local
    distribution a client's training keeps. With ``support``, as FedADKD's words "seen and unseen classes" may be read:
    the plain means over the classes with D_c > 0 and with D_c = 0.

    ``accuracies``: a, class-wise test accuracies of its model after local training; classes that are NaN (no test
        example) are left out, and the weights of the others scaled up.
    Returns: NaN where no class counts, as outside the support of a client that has all classes.
    """
    shares, values = np.asarray(proportions, dtype=np.float64), np.asarray(accuracies, dtype=np.float64)
    if shares.shape != values.shape or shares.ndim != 1 or len(shares) < 2:
        raise ValueError(
            f"Proportions and accuracies must be one number a class, of two classes at least, not of shapes "
            f"{shares.shape}, {values.shape}."
        )
    if not (shares >= 0).all() or not shares.sum() > 0:
        raise ValueError(f"Proportions must not be negative, nor all zero: {shares}.")
    shares = shares / shares.sum()
    inside, outside = (shares > 0, shares == 0) if support else (shares, 1 - shares)
    return _weighted_mean(values, inside.astype(np.float64)), _weighted_mean(values, outside.astype(np.float64))


def _weighted_mean(values: Floats, weights: Floats) -> float:
    """Return the weighted mean of the known values."""
    known = ~np.isnan(values)
    total = float(weights[known].sum())
    return float((weights[known] * values[known]).sum()) / total if total > 0 else float("nan")


BINS = 15
"""Bins of equal width in which confidence is compared with accuracy, as of Guo et al., 2017."""


SCORES = frozenset({"f1", "auroc", "specificity", "ece"})
"""The names of `scores`."""


def scores(labels: ArrayLike, logits: ArrayLike) -> dict[str, Any]:
    """Return by name what is recorded beside counts by class; None where it has no value.

    ``f1``: Macro average over the classes that have examples. ``auroc``: The mean over the classes of that of one class
    against the rest. ``ece``: The expected calibration error of the softmax. ``specificity``: By class, the share of
    all other examples that are not taken for it.

    ``labels``: int64 [n].
    ``logits``: [n, classes].
    """
    from scipy.special import softmax
    from sklearn.metrics import f1_score, multilabel_confusion_matrix, roc_auc_score

    truth, values = np.asarray(labels), np.asarray(logits, dtype=np.float64)
    count, classes = values.shape
    if not count:
        return {"f1": None, "auroc": None, "ece": None, "specificity": [None] * classes}
    predicted = values.argmax(axis=1)
    negatives = multilabel_confusion_matrix(truth, predicted, labels=range(classes))[:, 0]
    present = np.unique(truth)
    found: dict[str, Any] = {
        "f1": float(f1_score(truth, predicted, labels=present, average="macro", zero_division=0)),
        "auroc": None,
        "ece": None,
        "specificity": [float(kept / (kept + taken)) if kept + taken else None for kept, taken in negatives],
    }
    if np.isfinite(values).all():
        p = softmax(values, axis=1)
        ranked = _log_odds(values, p)
        each = [roc_auc_score(truth == one, ranked[:, one]) for one in present] if len(present) > 1 else []
        found["auroc"] = float(np.mean(each)) if each else None
        found["ece"] = calibration_error(truth == predicted, p.max(axis=1))
    return found


def _log_odds(logits: Floats, p: Floats) -> Floats:
    """Return log p / (1 - p) of the softmax, float64 [n, classes], which still ranks where p is 1 in float64.

    They are rounded, so that equal ones are equal whichever class is the best one.
    """
    from scipy.special import logsumexp

    rows, best = np.arange(len(logits)), logits.argmax(axis=1)
    others = logits.copy()
    others[rows, best] = -np.inf
    p = p.copy()
    p[rows, best] = 0.0
    odds: Floats = logits - logsumexp(logits, axis=1, keepdims=True) - np.log1p(-p)
    odds[rows, best] = logits[rows, best] - logsumexp(others, axis=1)
    return np.round(odds, 9)


def calibration_error(correct: ArrayLike, confidence: ArrayLike) -> float:
    """Return how far confidence is from accuracy, sum_b |correct_b - confidence_b| / n over bins of confidence."""
    sure = np.asarray(confidence, dtype=np.float64)
    bins = np.clip(np.ceil(sure * BINS).astype(np.int64) - 1, 0, BINS - 1)
    gaps = np.bincount(bins, np.asarray(correct, dtype=np.float64) - sure)
    return float(np.abs(gaps).sum() / len(sure))


def chance_auroc(total: ArrayLike) -> float:
    """Return the AUROC that a guess exceeds in 5 % of all test sets, by the smallest class that has examples."""
    examples = np.asarray(total, dtype=np.float64)
    least, count = float(examples[examples > 0].min()), float(examples.sum())
    return 0.5 + 1.645 * math.sqrt((count + 1) / (12 * least * (count - least))) if count > least else 1.0


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
    wanted = math.floor(rounds * window + 1e-9) if window < 1 else round(window)
    length = min(max(wanted, 1), rounds)
    length = max(length // turn, 1) * turn
    return max(rounds - length, 0) + 1, rounds


def mean_std(values: Iterable[float]) -> tuple[float, float]:
    """Return mean and standard deviation of values, such as one accuracy of each seed.

    ``values``: None of them NaN.
    Returns: std = sqrt(sum_i (x_i - mean)^2 / (n - 1)): of a sample, NaN below two values. The mean of none is NaN.
    """
    series = np.asarray(list(values), dtype=np.float64)
    mean = float(series.mean()) if len(series) else float("nan")
    return mean, float(series.std(ddof=1)) if len(series) > 1 else float("nan")


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> dict[int, float]:
    """Return ``values - reference`` for each key that both have, in the order of ``values``.

    With seeds as keys: methods that ran with one seed had the same partition, initial weights and cohorts. Their
    difference is free of what these do to both, so that its spread is that of the methods. With rounds as keys: the
    difference of two series of evaluations.
    """
    return {key: value - reference[key] for key, value in values.items() if key in reference}


def t_interval(values: Iterable[float]) -> Interval:
    """Return the mean of independent repetitions with Student's t interval: mean ± t_{n-1} std / sqrt(n).

    ``values``: Such as the difference of two methods with each seed; none of them NaN.
    Returns: Below two values without ends.
    """
    series = np.asarray(list(values), dtype=np.float64)
    mean, std = mean_std(series)
    half = _half_width(std, len(series))
    return Interval(mean, mean - half, mean + half, len(series))


def block_interval(values: ArrayLike, turn: int = 1, shortest: int = 2) -> Interval:
    """Return the mean of one series with an interval from the means of blocks of it (batch means).

    Evaluations of one run depend on each other, and those of neighbouring rounds most of all. The means of long blocks
    depend on each other less: `t_interval` of these. The interval speaks of this run, with its seed, and of no other.

    ``values``: In order, such as the difference of two methods at each evaluation of a window.
    ``turn``: The number of values in a whole turn; a block is a whole number of turns.
    ``shortest``: The least number of values in a block: several times as many as a value depends on.
    Returns: From about `BLOCKS` blocks of equal length, at least ``shortest`` and one turn long. What is left over at
        the beginning enters the mean and no block. Below `FEWEST_BLOCKS` without ends.
    """
    series = np.asarray(values, dtype=np.float64)
    size = -(-max(len(series) // BLOCKS, shortest) // turn) * turn
    count = len(series) // size
    mean = float(series.mean()) if len(series) else float("nan")
    if count < FEWEST_BLOCKS:
        return Interval(mean, float("nan"), float("nan"), count, blocks=True)
    blocks = series[len(series) - count * size :].reshape(count, size).mean(axis=1)
    half = _half_width(float(blocks.std(ddof=1)), count)
    return Interval(mean, mean - half, mean + half, count, blocks=True)


def _half_width(std: float, count: int) -> float:
    """Return how far the interval of a mean of so many values reaches to either side; NaN below two values."""
    from scipy.special import stdtrit  # what scipy.stats.t.ppf calls, without half a second of imports

    return float(stdtrit(count - 1, 0.5 + LEVEL / 2)) * std / math.sqrt(count) if count > 1 else float("nan")


ORDERS = [1.25, 1.5, 1.75, *range(2, 65), 96, 128, 256, 512]
"""Orders of the Rényi divergence over which epsilon is minimised. Opacus takes longer for fractions."""

MAX_STEPS = 2**53
"""As many steps no training takes, and Opacus counts in floating-point numbers."""


def require_accountant() -> None:
    """Raise `MissingExtra` if Opacus is not installed."""
    if find_spec("opacus") is None:
        raise MissingExtra("Differential privacy", "privacy")


def dp_sgd_epsilon(steps: Mapping[float, int], noise_multiplier: float, delta: float) -> float:
    """Return epsilon after steps of DP-SGD, by Rényi differential privacy of the subsampled Gaussian mechanism.

    Opacus computes it (Mironov et al., 2019, "Rényi differential privacy of the sampled Gaussian mechanism").

    ``steps``: Number of steps by the probability with which an example was in a batch.
    ``noise_multiplier``: Standard deviation of the noise, in units of the norm to which gradients were clipped.
    ``delta``: Probability with which the guarantee may fail.
    Returns: Epsilon; 0 without steps, infinite without noise and for numbers that no training has, as in the record of
        a site that lied.
    """
    if not any(steps.values()):
        return 0.0
    if not noise_multiplier or not all(0 < rate <= 1 and 0 <= count < MAX_STEPS for rate, count in steps.items()):
        return float("inf")
    require_accountant()
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, rate, count) for rate, count in steps.items() if count]
    return max(0.0, float(accountant.get_epsilon(delta, alphas=ORDERS)))  # a bound, and below 0 for much noise
