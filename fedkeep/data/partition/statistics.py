"""Statistics of how unequal a partition is, as papers report them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Numbers = npt.NDArray[Any]


def size_statistics(sizes: Numbers) -> dict[str, float]:
    """Return min, median, max, mean and (population) standard deviation of clients' sizes, int ``[clients]``."""
    return {
        "min": int(sizes.min()),
        "median": float(np.median(sizes)),
        "max": int(sizes.max()),
        "mean": float(sizes.mean()),
        "std": float(sizes.std()),
    }


def partition_statistics(counts: Numbers | Tensor) -> dict[str, float]:
    """Return statistics of a partition.

    ``counts``: int ``[clients, classes]``, each client's examples of each class.
    Returns: ``clients``, ``examples``; ``size_min``, ``size_median``, ``size_max``, ``size_mean``, ``size_std``
        (population); and means over the clients that hold anything: ``classes_per_client`` (classes with at least one
        example), ``gini_impurity`` (``1 - sum p^2``: 0 for one class, ``1 - 1/C`` when balanced) and ``label_entropy``
        in nats (0 to ``ln C``).
    """
    table = np.asarray(counts, dtype=np.float64)
    if table.ndim != 2 or table.sum() <= 0:
        raise ValueError(f"Counts must be [clients, classes] with at least one example, not of shape {table.shape}.")
    sizes = table.sum(axis=1)
    held = table[sizes > 0]
    share = held / held.sum(axis=1, keepdims=True)
    # 0 ln 0 is 0: the logarithm of an absent class is taken of 1 instead.
    entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1)
    return {
        "clients": len(table),
        "examples": int(sizes.sum()),
        **{f"size_{name}": value for name, value in size_statistics(sizes).items()},
        "classes_per_client": float((held > 0).sum(axis=1).mean()),
        "gini_impurity": float((1.0 - (share**2).sum(axis=1)).mean()),
        "label_entropy": float(entropy.mean()),
    }
