"""How far apart label distributions are, and SFedKD's selection and weights of teachers, which follow from it.

Source: Xu et al., 2025, "SFedKD: sequential federated learning with discrepancy-aware multi-teacher knowledge
distillation", eqs. 5 and 6 and algorithm 1. Distributions are float tensors [..., classes] that sum to one.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Discrepancy = Literal["kl", "l1", "l2", "js"]

SMOOTHING = 1e-4
"""Added to every share of both distributions before a KL divergence."""
EPSILON = 1e-4
"""Added to distances before they are inverted."""


def divergence(first: Tensor, second: Tensor, metric: Discrepancy) -> Tensor:
    """Compute d(first, second) over the last dimension.

    ``first``, ``second``: [..., classes], distributions.
    ``metric``: ``kl`` is KL(first || second) in nats, with 0 ln 0 = 0, and infinite where only ``second`` is zero;
        ``l1`` the sum of absolute differences, 0 to 2; ``l2`` the Euclidean distance; ``js`` the mean of the two
        divergences to the midpoint, at most ln 2 (no square root).
    Returns: [...].
    """
    if metric == "l1":
        return (first - second).abs().sum(-1)
    if metric == "l2":
        return (first - second).square().sum(-1).sqrt()
    if metric == "js":
        middle = (first + second) / 2
        return (divergence(first, middle, "kl") + divergence(second, middle, "kl")) / 2
    return (torch.xlogy(first, first) - torch.xlogy(first, second)).sum(-1)


def smooth(proportions: Tensor, amount: float = SMOOTHING) -> Tensor:
    """Return (D + amount) / (1 + classes * amount): no zero is left, and equal distributions stay equal.

    ``proportions``: [..., classes], distributions.
    ``amount``: What every class gets.
    Returns: [..., classes].
    """
    return (proportions + amount) / (1 + proportions.shape[-1] * amount)


def proportions(counts: Tensor) -> Tensor:
    """Return label counts as shares of their sum, in float64.

    Single precision would not do: shares of large clients differ by less than its rounding, and ties would not be ties.

    ``counts``: [..., classes].
    Returns: float64 [..., classes]; all zero for a client without examples.
    """
    counts = counts.double()
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


def discrepancies(teachers: Tensor, student: Tensor, metric: Discrepancy) -> Tensor:
    """Compute d(D_teacher, D_student) for each teacher.

    For the KL divergence, which is infinite where the student lacks a class, both distributions are smoothed; equal
    ones stay at distance 0.

    ``teachers``: [k, classes], label counts.
    ``student``: [classes], label counts.
    Returns: float64 [k], not negative.
    """
    first, second = proportions(teachers), proportions(student)
    if metric == "kl":
        first, second = smooth(first), smooth(second)
    # Rounding may leave -1e-17 between equal distributions, and a weight of the wrong sign.
    return divergence(first, second, metric).clamp(min=0.0)


def teacher_weights(distances: Tensor) -> tuple[Tensor, Tensor]:
    """Compute SFedKD's weights of teachers (eqs. 5 and 6).

    g_k = d_k / sum_j d_j: far teachers know what the student does not, and lead on the non-target part.
    h_k = (d_k + epsilon)^-1 / sum_j (d_j + epsilon)^-1: near teachers lead on the target part.

    ``distances``: [k], d, not negative; at least one.
    Returns: (g, h), each [k] and summing to one. If all distances are zero, g is undefined: 1/k.
    """
    total = distances.sum()
    g = distances / total if total > 1e-12 else torch.full_like(distances, 1 / len(distances))
    inverse = 1 / (distances + EPSILON)
    return g, inverse / inverse.sum()


def select_complementary(
    candidates: Sequence[str], proportions: Mapping[str, Tensor], count: int, metric: Discrepancy = "kl"
) -> list[str]:
    """Choose teachers one after another so that together they cover the classes evenly (SFedKD, algorithm 1).

    Each step takes the candidate whose proportions, added to those chosen so far and divided by their mass, come
    nearest to the uniform distribution. Distances within 1e-12 of the least are ties, and the earliest candidate wins.

    ``proportions``: [classes] by name.
    ``count``: How many to choose; fewer if there are fewer candidates.
    Returns: The chosen names, in the order of choice.
    """
    chosen: list[str] = []
    remaining = list(candidates)
    while remaining and len(chosen) < count:
        covered = sum((proportions[name].double() for name in chosen), torch.zeros(()).double())
        sums = torch.stack([covered + proportions[name].double() for name in remaining])
        sums = sums / sums.sum(-1, keepdim=True)
        uniform = torch.full_like(sums, 1 / sums.shape[-1])
        # A candidate without examples covers nothing: 0 / 0 above, and the last choice.
        distances = divergence(sums, uniform, metric).nan_to_num(nan=torch.inf)
        earliest = int((distances <= distances.min() + 1e-12).nonzero()[0])
        chosen.append(remaining.pop(earliest))
    return chosen
