"""Fusion rules that remember: the step from the model to the clients' mean is taken by an optimiser of the server.

Reddi et al., 2021, "Adaptive federated optimization", algorithm 2, and Hsu et al., 2019, "Measuring the effects of
non-identical data distribution", for momentum. ``step`` is mean - model over the parameters; buffers follow the mean.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from fedkeep.models import Weights


@torch.no_grad()
def with_momentum(
    model: Weights, mean: Weights, velocity: Weights, names: Collection[str], *, lr: float, momentum: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (new model, new velocity): v <- momentum v + (mean - model), w <- model + lr v.

    ``names`` are the parameters; an empty ``velocity`` means zero. With lr 1 and momentum 0 the new model is the mean.
    """
    new = {name: mean[name] - model[name] + momentum * velocity.get(name, torch.zeros(())) for name in names}
    return dict(mean) | {name: model[name] + lr * v for name, v in new.items()}, new


@torch.no_grad()
def with_adam(
    model: Weights,
    mean: Weights,
    moments: tuple[Weights, Weights],
    names: Collection[str],
    *,
    lr: float,
    betas: tuple[float, float],
    tau: float,
) -> tuple[dict[str, Tensor], tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return (new model, new moments): w <- model + lr m / (sqrt(v) + tau), without bias correction.

    m <- b1 m + (1 - b1) step, v <- b2 v + (1 - b2) step^2; empty moments mean m = 0 and v = tau^2, as in the paper.
    """
    first, second = betas
    m, v = {}, {}
    for name in names:
        step = mean[name] - model[name]
        m[name] = first * moments[0].get(name, torch.zeros_like(step)) + (1 - first) * step
        v[name] = second * moments[1].get(name, torch.full_like(step, tau**2)) + (1 - second) * step.square()
    moved = {name: model[name] + lr * m[name] / (v[name].sqrt() + tau) for name in names}
    return dict(mean) | moved, (m, v)
