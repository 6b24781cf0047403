"""How far apart label distributions are, and what follows for teachers: SFedKD's selection and weights.

Source: Xu et al., 2025, "SFedKD: sequential federated learning with discrepancy-aware multi-teacher knowledge
distillation", eqs. 5 and 6 and algorithm 1. Distributions are float tensors [..., classes] that sum to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Metric = Literal["kl", "l1", "l2", "js"]
Smoothing = Literal["both", "student_only", "count_laplace"]


def divergence(first: Tensor, second: Tensor, metric: Metric) -> Tensor:
    """Return d(first, second) over the last dimension.

    ``kl`` is KL(first || second) in nats, with 0 ln 0 = 0, and infinite where only ``second`` is zero; ``l1`` the sum
    of absolute differences, 0 to 2; ``l2`` the Euclidean distance; ``js`` the mean of the two divergences to the
    midpoint, at most ln 2 (no square root).
    """
    if metric == "l1":
        return (first - second).abs().sum(-1)
    if metric == "l2":
        return (first - second).square().sum(-1).sqrt()
    if metric == "js":
        middle = (first + second) / 2
        return (divergence(first, middle, "kl") + divergence(second, middle, "kl")) / 2
    return (torch.xlogy(first, first) - torch.xlogy(first, second)).sum(-1)


def smoothed(proportions: Tensor, amount: float) -> Tensor:
    """Return (D + amount) / (1 + classes * amount): no zero is left, and equal distributions stay equal."""
    return (proportions + amount) / (1 + proportions.shape[-1] * amount)


def proportions(counts: Tensor) -> Tensor:
    """Return label counts [..., classes] as shares of their sum, in float64; all zero for a client without examples.

    Single precision would not do: shares of large clients differ by less than its rounding, and ties would not be ties.
    """
    counts = counts.double()
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


def discrepancies(
    teachers: Tensor, student: Tensor, metric: Metric, smoothing: Smoothing, amount: float, student_first: bool = False
) -> Tensor:
    """Return d(D_teacher, D_student), [k], from label counts: teachers [k, classes], student [classes].

    Only the KL divergence is smoothed, which is infinite for classes that its second argument lacks: ``both`` smooths
    both distributions by ``amount`` (the default: equal distributions stay at distance 0), ``student_only`` only the
    second argument, which is the student's unless ``student_first`` turns them round, ``count_laplace`` adds ``amount``
    examples of each class to both counts.
    """
    first, second = (student, teachers) if student_first else (teachers, student)
    if metric == "kl" and smoothing == "count_laplace":
        first, second = proportions(first + amount), proportions(second + amount)
    else:
        first, second = proportions(first), proportions(second)
        if metric == "kl":
            first, second = first if smoothing == "student_only" else smoothed(first, amount), smoothed(second, amount)
    # Rounding may leave -1e-17 between equal distributions, and a weight of the wrong sign.
    return divergence(first, second, metric).clamp(min=0.0)


def teacher_weights(
    distances: Tensor, epsilon: float, zero: Literal["uniform", "off"] = "uniform"
) -> tuple[Tensor, Tensor]:
    """Return (g, h), each [k] and summing to one: weights of the teachers at distances d >= 0, [k].

    g_k = d_k / sum_j d_j (eq. 5: far teachers know what the student does not, and lead on the non-target part);
    h_k = (d_k + epsilon)^-1 / sum_j (d_j + epsilon)^-1 (near teachers lead on the target part). If all distances are
    zero, g is undefined: 1/k (``uniform``) or 0 (``off``).
    """
    if not len(distances):
        return distances, distances
    total = distances.sum()
    if total > 1e-12:
        far = distances / total
    else:
        far = torch.full_like(distances, 1 / len(distances) if zero == "uniform" else 0.0)
    inverse = 1 / (distances + epsilon)
    return far, inverse / inverse.sum()


def select_complementary(
    candidates: Sequence[str],
    proportions: Mapping[str, Tensor],
    count: int,
    metric: Metric = "kl",
    aggregate: Literal["normalised", "sum"] = "normalised",
) -> list[str]:
    """Choose ``count`` of the candidates, one after another, so that together they cover the classes evenly.

    Each step takes the candidate whose proportions, added to those chosen so far, come nearest to the uniform
    distribution (algorithm 1). ``normalised`` divides the sum by its mass first; ``sum`` compares it as it is, which
    changes the choice for ``l1`` and ``js`` only. Distances within 1e-12 of the least are ties, and the
    earliest candidate wins.
    """
    chosen: list[str] = []
    remaining = list(candidates)
    while remaining and len(chosen) < count:
        held = sum((proportions[name].double() for name in chosen), torch.zeros(()).double())
        sums = torch.stack([held + proportions[name].double() for name in remaining])
        if aggregate == "normalised":
            sums = sums / sums.sum(-1, keepdim=True)
        uniform = torch.full_like(sums, 1 / sums.shape[-1])
        distances = divergence(sums, uniform, metric)
        earliest = int((distances <= distances.min() + 1e-12).nonzero()[0])
        chosen.append(remaining.pop(earliest))
    return chosen
