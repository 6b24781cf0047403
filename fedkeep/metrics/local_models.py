"""What local training does to a model: consistency and drift of a sequence, and what a client's model knows.

Consistency and drift are of a model that travels from client to client (SFedKD figure 1); `kold` is of any.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedkeep.metrics.accuracy import Floats


def consistency(before: ArrayLike, after: ArrayLike) -> float:
    """Return the cosine of class-wise accuracies before and after a local training, a.b / (|a| |b|) (SFedKD fig. 1b).

    ``before``, ``after``: Class-wise test accuracies of the models that two clients in a row send on. Classes that are
        NaN in either (no test example) are left out.
    Returns: From 0 to 1; 0 if either is all zero.
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
    """Return what the next client's training costs on a client's data, A(w_m, B_m) - A(w_{m+1}, B_m).

    SFedKD figure 1c.

    ``own``: Accuracy on the client's training data B_m, without augmentation, of the model w_m that it sends on.
    ``after``: Accuracy on the same data of the model w_{m+1} that the next client sends on.
    """
    return own - after


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
    if support:
        return _mean(values, (shares > 0).astype(np.float64)), _mean(values, (shares == 0).astype(np.float64))
    return _mean(values, shares), _mean(values, 1 - shares)


def _mean(values: Floats, weights: Floats) -> float:
    """Return the weighted mean of the known values."""
    known = ~np.isnan(values)
    total = float(weights[known].sum())
    return float((weights[known] * values[known]).sum()) / total if total > 0 else float("nan")
