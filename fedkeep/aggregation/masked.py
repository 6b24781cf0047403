"""The mean of what clients send of layers that are masked by unit (FedWeIT)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkeep.models import Weights
from fedkeep.models.decomposed import active, by_unit


def masked_mean(
    layers: Weights, sent: Sequence[Tensor], masks: Sequence[Weights], sparsity: float
) -> dict[str, Tensor]:
    """Return for each unit the mean over those clients who sent it; one that nobody sent stays as it is.

    Parameters
    ----------
    layers : by name, [units, ...], as they are.
    sent, masks : by client, what `fedkeep.models.decomposed.rows` gave, and the masks, by layer [units], with which.
    """
    total = {name: torch.zeros_like(layer) for name, layer in layers.items()}
    count = {name: layer.new_zeros(len(layer)) for name, layer in layers.items()}
    for numbers, mask in zip(sent, masks, strict=True):
        chosen = {name: active(mask[name], sparsity) for name in layers}
        sizes = [int(chosen[name].sum()) * layer[0].numel() for name, layer in layers.items()]
        for name, part in zip(layers, torch.split(numbers, sizes), strict=True):
            total[name][chosen[name]] += part.view(-1, *layers[name].shape[1:])
            count[name] += chosen[name]
    shares = {name: by_unit(count[name], layer) for name, layer in layers.items()}
    return {n: torch.where(shares[n] > 0, total[n] / shares[n].clamp(min=1), layer) for n, layer in layers.items()}
