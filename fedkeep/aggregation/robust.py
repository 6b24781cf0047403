"""Aggregation that a minority of malicious clients cannot steer: median, trimmed mean, norm clipping and Krum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkeep.models import Weights


@torch.no_grad()
def trimmed_mean(tensors: Sequence[Tensor], cut: int) -> Tensor:
    """Return the coordinate-wise mean without the smallest and the largest values (Yin et al., 2018, definition 2).

    Parameters
    ----------
    tensors : Sequence[Tensor]
        One tensor of each client, all of one shape.
    cut : int
        How many values are left out at either end.

    Returns
    -------
    Tensor
        Of the same shape and type.

    Raises
    ------
    ValueError
        If nothing would be left.
    """
    if not 0 <= 2 * cut < len(tensors):
        raise ValueError(f"Cutting {cut} of {len(tensors)} values at either end leaves none.")
    ordered = torch.stack(list(tensors)).sort(0).values
    return ordered[cut : len(tensors) - cut].mean(0)


def coordinate_median(tensors: Sequence[Tensor]) -> Tensor:
    """Return the coordinate-wise median (Yin et al., 2018, definition 1); the mean of the two middle values if even.

    Parameters
    ----------
    tensors : Sequence[Tensor]
        One tensor of each client, all of one shape; at least one.

    Returns
    -------
    Tensor
        Of the same shape and type.
    """
    return trimmed_mean(tensors, (len(tensors) - 1) // 2)


@torch.no_grad()
def clip_norm(tensors: Sequence[Tensor], starts: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Shorten the update of several tensors together to a norm, without changing its direction (Sun et al., 2019).

    Parameters
    ----------
    tensors : Sequence[Tensor]
        What a client returned.
    starts : Sequence[Tensor]
        What it was sent, in the same order.
    limit : float
        The largest norm.

    Returns
    -------
    list[Tensor]
        The tensors themselves if the norm is at most ``limit``.
    """
    updates = torch._foreach_sub(list(tensors), list(starts))
    norm = joint_norm(updates)
    if norm <= limit:
        return list(tensors)
    return list(torch._foreach_add(list(starts), updates, alpha=limit / norm))


@torch.no_grad()
def joint_norm(tensors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of all tensors together; 0 without any."""
    if not tensors:
        return 0.0
    return float(torch.stack([norm.double() for norm in torch._foreach_norm(list(tensors))]).norm())


@torch.no_grad()
def select_krum(models: Sequence[Weights], malicious: int, count: int) -> list[int]:
    """Choose the models that lie nearest to their n - f - 2 nearest neighbours (Blanchard et al., 2017).

    Parameters
    ----------
    models : Sequence[Weights]
        One model of each client.
    malicious : int
        f, the number of malicious clients that is assumed.
    count : int
        How many are chosen: 1 for Krum, more for Multi-Krum.

    Returns
    -------
    list[int]
        The positions of the chosen models, the best first.
    """
    flat = [torch.cat([t.reshape(-1).double() for t in model.values() if t.is_floating_point()]) for model in models]
    stacked = torch.stack(flat)
    distances = torch.stack([(stacked - one).square().sum(1) for one in stacked])
    nearest = max(1, len(models) - malicious - 2)
    scores = distances.sort(1).values[:, 1 : nearest + 1].sum(1)
    return [int(position) for position in scores.argsort(stable=True)[:count]]
