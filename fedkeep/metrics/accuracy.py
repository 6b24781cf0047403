"""Accuracy and forgetting of one model over time, from the counts by class that every evaluation records.

All are fractions. Forgetting: what was known once and is not known any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]


def accuracy(correct: ArrayLike, total: ArrayLike) -> float:
    """Return top-1 accuracy, sum_c correct_c / sum_c total_c; NaN without any example.

    ``correct``: Examples of each class whose highest logit is their label's.
    Returns: From 0 to 1.
    """
    hits, examples = _counts(correct, total)
    return float(hits.sum() / examples.sum()) if examples.any() else float("nan")


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
    shares = class_accuracy(correct, total)
    shares = shares[~np.isnan(shares)]
    return float(shares.mean()) if len(shares) else float("nan")


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
    if values.ndim != 2:
        raise ValueError(
            f"A history of class-wise accuracies has the shape [evaluations, classes], not {values.shape}."
        )
    if len(values) < 2:
        return 0.0
    # fmax ignores NaN, and is NaN only where all are.
    drops = np.fmax.reduce(values[:-1], axis=0) - values[-1]
    return mean_of_known(drops.tolist())


def mean_of_known(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there is none."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


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
