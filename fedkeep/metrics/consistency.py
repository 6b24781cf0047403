"""Consistency and drift of a model that travels from client to client (SFedKD fig. 1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def consistency(before: ArrayLike, after: ArrayLike) -> float:
    """Return the cosine of class-wise accuracies before and after a visit, a.b / (|a| |b|) (SFedKD fig. 1b).

    Parameters
    ----------
    before, after : [classes], class-wise test accuracies of the models that two clients in a row send on. Classes that
        are NaN in either (no test example) are left out.

    Returns
    -------
    float
        From 0 to 1; 0 if either is all zero.

    Raises
    ------
    ValueError
        If the two do not hold one number a class, of the same classes.
    """
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(
            f"Class-wise accuracies must be one number a class, not of shapes {first.shape}, {second.shape}."
        )
    known = ~(np.isnan(first) | np.isnan(second))
    first, second = first[known], second[known]
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    # A cosine of equal vectors may exceed 1 by rounding.
    return min(float(first @ second) / norms, 1.0) if norms else 0.0


def drift(own: float, after: float) -> float:
    """Return how much a client's data lose by the next visit: A(w_m, B_m) - A(w_{m+1}, B_m) (SFedKD fig. 1c).

    Parameters
    ----------
    own : accuracy on the client's training data B_m, without augmentation, of the model w_m that it sends on.
    after : accuracy on the same data of the model w_{m+1} that the next client sends on.
    """
    return own - after
