"""Penalties on the weights, and how much each parameter mattered (elastic weight consolidation).

One quadratic and one linear term serve proximal, curvature and control-variate methods; an L1 penalty makes weights
sparse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkeep.losses.base import Batch, Loss, ModelView
from fedkeep.models import Weights


@dataclass(frozen=True, eq=False)
class QuadraticPenalty(Loss):
    """factor * sum_j c_j (w_j - a_j)^2 over the parameters that have an anchor; buffers take no part.

    Attributes
    ----------
    anchor : Weights
        a, a whole model, or some of its tensors, such as its classifier.
    factor : float
        The factor, such as mu / 2 for FedProx.
    curvature : Weights
        c by parameter, not negative; empty means 1 everywhere.
    """

    anchor: Weights
    factor: float
    curvature: Weights = field(default_factory=dict)

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        anchored = {name: weight for name, weight in model.weights.items() if name in self.anchor}
        squares = {name: (weight - self.anchor[name]).square() for name, weight in anchored.items()}
        if self.curvature:
            squares = {name: self.curvature[name] * square for name, square in squares.items()}
        if not squares:  # as in the first round of a method whose anchor is an average
            return torch.zeros((), device=next(iter(model.weights.values())).device)
        return self.factor * torch.stack([square.sum() for square in squares.values()]).sum()


@dataclass(frozen=True, eq=False)
class LinearTerm(Loss):
    """sum_j g_j w_j over the parameters: it adds g to every gradient (SCAFFOLD's correction).

    Attributes
    ----------
    gradient : Weights
        g, by parameter; a parameter without g, such as each in a first round, takes no part.
    """

    gradient: Weights

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        # Over the network's parameters, not over g: a whole model has buffers too, which are not trained.
        terms = [(self.gradient[n] * weight).sum() for n, weight in model.weights.items() if n in self.gradient]
        return torch.stack(terms).sum() if terms else next(iter(model.weights.values())).new_zeros(())


@dataclass(frozen=True, eq=False)
class L1Penalty(Loss):
    """factor * sum_j |w_j| over some parameters."""

    names: tuple[str, ...]
    factor: float

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        return self.factor * torch.stack([model.weights[name].abs().sum() for name in self.names]).sum()


@torch.no_grad()
def pad_rows(older: Weights, model: Weights) -> dict[str, Tensor]:
    """Append rows of zeros to an older model's tensors, up to as many rows as a model has.

    For elastic weight consolidation (Kirkpatrick et al., 2017) of a model whose classifier grows: where the older model
    had no rows, anchor and curvature are 0.

    ``model``: With at least the same names.
    """
    return {name: _pad(tensor, len(model[name])) if tensor.ndim else tensor for name, tensor in older.items()}


@torch.no_grad()
def merge_fisher(old: Weights, new: Weights, share: float, limit: float = 1e-4) -> dict[str, Tensor]:
    """Return share * old + (1 - share) * min(new, limit), and min(new, limit) alone in rows that old lacks.

    As in the code of TARGET (Zhang et al., 2023), where the share is that of old classes among all seen.

    ``old``, ``new``: Diagonals of the Fisher information by parameter; ``old`` is empty in the first task.
    """
    limited = {name: tensor.clamp(max=limit) for name, tensor in new.items()}
    padded = pad_rows(old, limited)
    merged = {name: share * padded[name] + (1 - share) * limited[name] for name in padded}
    return {name: _with_rows(merged[name], tensor, old[name]) if old else tensor for name, tensor in limited.items()}


def _pad(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat((tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])))


def _with_rows(merged: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the merged rows that old has, and then the new ones."""
    return torch.cat((merged[: len(old)], new[len(old) :])) if new.ndim else merged
