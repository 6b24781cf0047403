"""The server steps from the model towards the clients' mean by an optimiser with a state.

Reddi et al., 2021, "Adaptive federated optimization", algorithm 2, and Hsu et al., 2019, "Measuring the effects of
non-identical data distribution", for momentum. The step is mean - model over the parameters; buffers follow the mean.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from fedkeep.models import Weights


@torch.no_grad()
def momentum_step(
    model: Weights, mean: Weights, velocity: Weights, names: Collection[str], *, lr: float, momentum: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take a step with momentum: v <- momentum v + (mean - model), w <- model + lr v.

    With lr 1 and momentum 0 the new model is the mean.

    ``velocity``: v by parameter; empty means zero.
    """
    new = {name: mean[name] - model[name] + momentum * velocity.get(name, torch.zeros(())) for name in names}
    return dict(mean) | {name: model[name] + lr * v for name, v in new.items()}, new


@torch.no_grad()
def adam_step(
    model: Weights,
    mean: Weights,
    moments: tuple[Weights, Weights],
    names: Collection[str],
    *,
    lr: float,
    betas: tuple[float, float],
    tau: float,
) -> tuple[dict[str, Tensor], tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Take a step of Adam without bias correction: w <- model + lr m / (sqrt(v) + tau).

    m <- b1 m + (1 - b1) step, v <- b2 v + (1 - b2) step^2.

    ``moments``: (m, v) by parameter; empty means m = 0 and v = tau^2, as in the paper.
    ``lr``: Learning rate of the server.
    """
    beta1, beta2 = betas
    m, v = {}, {}
    for name in names:
        step = mean[name] - model[name]
        m[name] = beta1 * moments[0].get(name, torch.zeros_like(step)) + (1 - beta1) * step
        v[name] = beta2 * moments[1].get(name, torch.full_like(step, tau**2)) + (1 - beta2) * step.square()
    stepped = {name: model[name] + lr * m[name] / (v[name].sqrt() + tau) for name in names}
    return dict(mean) | stepped, (m, v)
