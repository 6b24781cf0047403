"""Accuracy, from the counts by class that every evaluation records."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]


def accuracy(correct: ArrayLike, total: ArrayLike) -> float:
    """Return top-1 accuracy, sum_c correct_c / sum_c total_c; NaN without any example.

    Parameters
    ----------
    correct : [classes], examples of each class whose highest logit is their label's.
    total : [classes], examples of each class.

    Raises
    ------
    ValueError
        If the two are not such counts of the same classes.
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


def balanced_accuracy(correct: ArrayLike, total: ArrayLike) -> float:
    """Return the mean of the class accuracies over the classes that have test examples; NaN if none has.

    Parameters and errors are those of `accuracy`.
    """
    shares = class_accuracy(correct, total)
    shares = shares[~np.isnan(shares)]
    return float(shares.mean()) if len(shares) else float("nan")


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
