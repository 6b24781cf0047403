"""Examples that are held out: a test split for data that come without one, or a part to choose options on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep._utils.seeds import numpy_rng
from fedkeep.data.dataset import DataSet
from fedkeep.errors import DataError


def hold_out(groups: Tensor, share: float, purpose: str = "test split") -> Tensor:
    """Choose rows for a test split: the same share of every group, always the same rows.

    Parameters
    ----------
    groups : int64 ``[n]``: the class (a stratified split) or the writer of each row.
    share : of each group's rows, rounded to the nearest whole number.
    purpose : rows for another one are others.

    Returns
    -------
    bool ``[n]``, true for a test row. With a share of at most one half every group keeps a training row.
    """
    values: np.ndarray[Any, np.dtype[np.int64]] = groups.numpy()
    # No seed of a run: the split is part of the data set, and every run must be tested on the same rows.
    keys = numpy_rng(0, purpose).random(len(values))
    order = np.lexsort((keys, values))
    _, starts, sizes = np.unique(values[order], return_index=True, return_counts=True)
    rank = np.arange(len(values)) - np.repeat(starts, sizes)
    chosen = np.empty(len(values), dtype=bool)
    chosen[order] = rank < np.repeat(np.floor(sizes * share + 0.5), sizes)
    return torch.from_numpy(chosen)


def validated(dataset: DataSet, share: float) -> DataSet:
    """Return a data set whose test split is the same share of each class of its training split, which loses it.

    Options are chosen on it, so that the test split stays unseen. The rows are the same for all seeds of a run.

    Raises
    ------
    DataError
        If the share is too small for a single image.
    """
    chosen = hold_out(dataset.train["label"].cpu(), share, "validation split")
    if not bool(chosen.any()):
        raise DataError(
            f"{dataset.name} has {len(chosen)} training images, of which data.validation={share} holds none out. "
            "Raise it."
        )
    train, test = ({name: column[rows] for name, column in dataset.train.items()} for rows in (~chosen, chosen))
    note = f"Evaluated on {share:.0%} of each class's training images, held out; the test images are not used."
    return replace(dataset, train=train, test=test, note=" ".join(filter(None, (dataset.note, note))))
