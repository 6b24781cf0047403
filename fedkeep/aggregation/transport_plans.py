"""Transport plans between the units of two layers, as maps from the source's channels to the base's.

A plan T holds how much of source channel i becomes base channel j; its columns sum to 1. It is int64 [n] if it is a
permutation (base channel j is source channel T[j]) and float64 [n, n] if it mixes channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import one_hot

Plan: TypeAlias = Tensor
Cost = Literal["euclidean", "sq", "cosine", "unit_norm_rows"]
Solver = Literal["emd", "sinkhorn"]

MAX_ITERATIONS, TOLERANCE = 1000, 1e-9  # of Sinkhorn's iteration: how many at most, and how far sums may be off


def cost_matrix(source: Tensor, base: Tensor, cost: Cost) -> Tensor:
    """Compute the cost of moving each unit of the source onto each of the base.

    ``source``, ``base``: [n, inputs], the units' incoming weights.
    ``cost``: ``euclidean`` distance of rows, its square (``sq``), 1 - their ``cosine``, or the Euclidean distance of
        rows of length 1 (``unit_norm_rows``).
    Returns: float64 [n, n].
    """
    source, base = source.double(), base.double()
    if cost in ("cosine", "unit_norm_rows"):
        source, base = (rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12) for rows in (source, base))
    if cost == "cosine":
        return 1 - source @ base.T
    square = source.square().sum(1)[:, None] + base.square().sum(1) - 2 * source @ base.T
    square = square.clamp_min(0)  # rounding may take the distance of equal rows below
    return square if cost == "sq" else square.sqrt()


def compute_plan(costs: Tensor, solver: Solver, reg: float) -> Plan:
    """Compute the cheapest plan from uniform to uniform mass.

    ``emd`` is exact. With equal masses on n units each side, an optimal plan is a permutation, so it is found as an
    assignment; `scipy` does so faster than a solver of the general problem (benchmarks/transport.md). ``sinkhorn``
    adds ``reg`` times the mean cost times the plan's negative entropy, which spreads each unit over several (Cuturi,
    2013); its columns are divided by their actual sums, since the iteration may end before they agree.

    ``costs``: float64 [n, n].
    Returns: int64 [n] for ``emd``, float64 [n, n] for ``sinkhorn``.
    """
    if solver == "sinkhorn":
        return _sinkhorn(costs, reg)
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(costs.cpu().numpy())
    return torch.from_numpy(columns).argsort().to(costs.device)


def apply_plan(tensor: Tensor, plan: Plan | None, axis: int) -> Tensor:
    """Return sum_i T_ij tensor[..., i, ...], in the tensor's own type.

    ``tensor``: Its ``axis`` runs over channels. It may hold several entries for each channel, side by side, as
        flattened maps do.
    ``plan``: T; None leaves the tensor as it is.
    """
    if plan is None:
        return tensor
    if axis == 0:
        if not plan.is_floating_point():
            return tensor.reshape(len(plan), -1)[plan].reshape(tensor.shape)
        return (plan.T @ tensor.double().reshape(len(plan), -1)).reshape(tensor.shape).to(tensor.dtype)
    grouped = tensor.reshape(len(tensor), len(plan), -1)
    if not plan.is_floating_point():
        return grouped[:, plan].reshape(tensor.shape)
    return torch.einsum("oik,ij->ojk", grouped.double(), plan).reshape(tensor.shape).to(tensor.dtype)


def mean_plan(plans: Sequence[Plan]) -> Plan:
    """Return the mean of plans; one, or several equal ones, as they are.

    ``plans``: At least one, between the same layers.
    """
    first = plans[0]
    if all(plan.dtype == first.dtype and torch.equal(plan, first) for plan in plans[1:]):
        return first
    return torch.stack([_dense(plan) for plan in plans]).mean(0)


def diagonal_share(plan: Plan) -> float:
    """Return the share of mass that stays on its channel: 1 for the identity.

    Returns: From 0 to 1.
    """
    if plan.is_floating_point():
        return float(plan.diagonal().mean())
    return float((plan == torch.arange(len(plan), device=plan.device)).double().mean())


def _dense(plan: Plan) -> Tensor:
    if plan.is_floating_point():
        return plan
    return one_hot(plan, len(plan)).T.double()


def _sinkhorn(costs: Tensor, reg: float) -> Plan:
    # In logarithms: exp(-cost / reg) itself underflows for a small reg. A cost that is 0 everywhere has no scale.
    kernel = -costs / (reg * costs.mean().clamp_min(1e-300))
    columns = costs.new_zeros(len(costs))
    for _ in range(MAX_ITERATIONS):
        rows = -(kernel + columns).logsumexp(1)
        previous, columns = columns, -(kernel + rows[:, None]).logsumexp(0)
        if float((columns - previous).abs().max()) < TOLERANCE:
            break
    plan = (kernel + rows[:, None] + columns).exp()
    return plan / plan.sum(0)
