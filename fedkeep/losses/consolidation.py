"""Elastic weight consolidation (Kirkpatrick et al., 2017) of a model whose classifier grows.

The penalty itself is `fedkeep.losses.Quadratic`: where the model before had no rows, anchor and curvature are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeep.models import Weights


@torch.no_grad()
def padded(older: Weights, model: Weights) -> dict[str, Tensor]:
    """Return an older model's tensors with rows of zeros at the end, as many rows as the model's have.

    Parameters
    ----------
    older : an anchor, or curvatures by parameter, with at most as many rows.
    model : of the same names; others of its own do not matter.
    """
    return {name: _longer(tensor, len(model[name])) if tensor.ndim else tensor for name, tensor in older.items()}


@torch.no_grad()
def merged_fisher(old: Weights, new: Weights, share: float, limit: float = 1e-4) -> dict[str, Tensor]:
    """Return share * old + (1 - share) * min(new, limit), and min(new, limit) alone in rows that old lacks.

    As in the code of TARGET (Zhang et al., 2023), where the share is that of old classes among all seen.

    Parameters
    ----------
    old, new : diagonals of the Fisher information by parameter; ``old`` is empty in the first task.
    """
    limited = {name: tensor.clamp(max=limit) for name, tensor in new.items()}
    before = padded(old, limited)
    merged = {name: share * before[name] + (1 - share) * limited[name] for name in before}
    return {name: _with_rows(merged[name], tensor, old[name]) if old else tensor for name, tensor in limited.items()}


def _longer(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat((tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])))


def _with_rows(merged: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the merged rows that old has, and then the new ones."""
    return torch.cat((merged[: len(old)], new[len(old) :])) if new.ndim else merged
