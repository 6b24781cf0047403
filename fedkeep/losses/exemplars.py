"""Exemplars of iCaRL (Rebuffi et al., 2017): which examples stand for a class, and classification by the nearest mean.

Features are scaled to length 1 first, as there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


@torch.no_grad()
def herded(features: Tensor, count: int) -> Tensor:
    """Return which examples of one class to keep, int64 [min(count, n)], the most telling first.

    Each next one is that with which the mean of those chosen comes closest to the mean of all. So the first few of a
    choice are the choice of a few: an older memory is cut short, not chosen anew.

    Parameters
    ----------
    features : [n, width], of all examples of the class; of equally good ones the first is taken.
    count : how many to keep.
    """
    rows = normalize(features.double(), dim=1)
    mean, total, chosen = rows.mean(0), rows.new_zeros(rows.shape[1]), list[int]()
    left = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for number in range(1, min(count, len(rows)) + 1):
        distances = (mean - (rows + total) / number).norm(dim=1)
        best = int(distances.masked_fill(~left, torch.inf).argmin())
        chosen.append(best)
        left[best] = False
        total = total + rows[best]
    return torch.tensor(chosen, dtype=torch.int64, device=features.device)


@torch.no_grad()
def nearest_mean(features: Tensor, means: Tensor) -> Tensor:
    """Return scores [n, classes], the highest at the nearest mean: minus the squared distance of directions.

    A class without a mean is never the nearest.

    Parameters
    ----------
    features : [n, width]. means : [classes, width], directions of length 1; NaN for a class without examples.
    """
    distances = torch.cdist(normalize(features, dim=1), means).square()
    return -distances.nan_to_num(nan=torch.inf)
