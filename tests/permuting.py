"""Networks whose neurons have changed places: they compute the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedkeep.aggregation.transport import ChannelLayer
from fedkeep.models import Weights
from fedkeep.models.weights import state_dict_copy


def lively(network: nn.Module, noise: torch.Generator) -> dict[str, Tensor]:
    """Return a network's weights with batch norms, statistics too, that differ from channel to channel."""
    model = state_dict_copy(network)
    for name in list(model):
        if name.endswith("running_mean"):
            norm = name.removesuffix(".running_mean")
            for tensor in ("weight", "bias", "running_mean", "running_var"):
                model[f"{norm}.{tensor}"] = torch.rand(len(model[name]), generator=noise) + 0.5
    return model


def permuted(model: Weights, layers: Sequence[ChannelLayer], noise: torch.Generator) -> dict[str, Tensor]:
    """Return the same function with the channels of every group in a random order."""
    moved = dict(model)
    orders: dict[str, Tensor] = {}
    for layer in layers:
        weight = moved[f"{layer.name}.weight"]
        if layer.reads is not None:
            order = orders[layer.reads]
            # Several inputs a channel where maps were flattened, or the pixels of a kernel.
            weight = weight.reshape(len(weight), len(order), -1)[:, order].reshape(weight.shape)
        if layer.writes is not None:
            order = orders.setdefault(layer.writes, torch.randperm(len(weight), generator=noise))
            weight = weight[order]
            follow = [f"{layer.name}.bias"]
            follow += [f"{n}.{t}" for n in layer.norms for t in ("weight", "bias", "running_mean", "running_var")]
            moved |= {name: moved[name][order] for name in follow if name in moved}
        moved[f"{layer.name}.weight"] = weight
    return moved
