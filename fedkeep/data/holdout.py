"""A test split for data that come without one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep._utils.seeds import numpy_generator


def hold_out(groups: Tensor, share: float) -> Tensor:
    """Choose rows for a test split: the same share of every group, always the same rows.

    Parameters
    ----------
    groups : int64 ``[n]``: the class (a stratified split) or the writer of each row.
    share : of each group's rows, rounded to the nearest whole number.

    Returns
    -------
    bool ``[n]``, true for a test row. With a share of at most one half every group keeps a training row.
    """
    values: np.ndarray[Any, np.dtype[np.int64]] = groups.numpy()
    # No seed of a run: the split is part of the data set, and every run must be tested on the same rows.
    keys = numpy_generator(0, "test split").random(len(values))
    order = np.lexsort((keys, values))
    _, starts, sizes = np.unique(values[order], return_index=True, return_counts=True)
    rank = np.arange(len(values)) - np.repeat(starts, sizes)
    chosen = np.empty(len(values), dtype=bool)
    chosen[order] = rank < np.repeat(np.floor(sizes * share + 0.5), sizes)
    return torch.from_numpy(chosen)
