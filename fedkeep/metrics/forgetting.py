"""Forgetting: what was known once and is not known any more.

Fractions, not clamped: below 0, more was learned than lost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def forgetting(history: ArrayLike) -> float:
    """Return class-wise forgetting, F = (1/C) sum_c max_{1 <= t <= T-1} (A_c(t) - A_c(T)).

    FedADKD eq. 1, after FedNTD (Lee et al., 2022), with A the class-wise test accuracies of the global model after
    rounds 1 to T. Taken over client visits instead of rounds, it is our reading of SFedKD's, with classes as tasks.

    Parameters
    ----------
    history : [T, C], class-wise accuracies at T evaluations in their order; NaN where a class has no test example.
        Classes without a known last or any known earlier accuracy are left out of the mean.

    Returns
    -------
    float
        From -1 to 1. With fewer than two evaluations nothing can have been forgotten yet: 0. NaN if no class is known.

    Raises
    ------
    ValueError
        If the history has not two dimensions.
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
    return _mean_of_known(drops.tolist())


def forgetting_tasks(matrix: ArrayLike) -> float:
    """Return task-wise forgetting, F_T = 1/(T-1) sum_{j<T} (max_{j <= l < T} a_{l,j} - a_{T,j}).

    Chaudhry et al., 2018, "Riemannian walk for incremental learning", with a_{l,j} the accuracy on the test examples of
    task j after learning task l. F_k of an earlier task is that of ``matrix[:k, :k]``.

    Parameters
    ----------
    matrix : [T, T], row l after task l, column j for task j. What lies above the diagonal (a task before it is learned)
        is not read. Tasks whose accuracy is NaN at the end, or at all times before, are left out of the mean.

    Returns
    -------
    float
        From -1 to 1. NaN with one task, after which no other was learned.

    Raises
    ------
    ValueError
        If the matrix is not square.
    """
    values = np.asarray(matrix, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != values.shape[1]:
        raise ValueError(f"A matrix of accuracies by task has the shape [tasks, tasks], not {values.shape}.")
    return _mean_of_known([float(np.fmax.reduce(values[j:-1, j]) - values[-1, j]) for j in range(len(values) - 1)])


def _mean_of_known(drops: list[float]) -> float:
    known = np.asarray([drop for drop in drops if not np.isnan(drop)], dtype=np.float64)
    return float(known.mean()) if len(known) else float("nan")
