"""Aggregation by optimal transport: a model is aligned with another's neurons before the two are mixed.

Singh & Jaggi, 2020, "Model fusion via optimal transport"; in FedSKF (Electronics 2024, 13, 1772) the mean of the
clients' models is aligned with one of them, a different one each round. It needs weights only, no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedkeep.models import Weights
from fedkeep.models.channel_groups import ChannelLayer

Plan: TypeAlias = Tensor
"""The permutation of channels that costs least, int64 [n]: base channel j is source channel plan[j]."""


class LayerPlans(NamedTuple):
    """The plans on a layer's two sides; None where channels keep their order: an image's channels, and the classes."""

    reads: Plan | None
    writes: Plan | None


@dataclass(frozen=True, eq=False)
class Projection:
    """A model that was aligned with another's neurons.

    ``model``: The result.
    ``diagonal``: By group of channels, the share that stays in its place. 1 everywhere: no neuron was moved.
    """

    model: dict[str, Tensor]
    diagonal: dict[str, float]


@torch.no_grad()
def project(source: Weights, base: Weights, layers: Sequence[ChannelLayer], *, eta: float = 0.5) -> Projection:
    """Align the source with the base's neurons, and mix the two.

    Layer by layer from the image on: the source's inputs are put in the base's order, the units of both are compared by
    their incoming weights (Euclidean distance), the cheapest permutation maps the former to the latter, and the outputs
    follow. Layers whose outputs are added share one plan. Batch norm goes along. The classifier's rows are never moved:
    they are the classes. So the aligned model computes what the source did, whatever the base.

    ``layers``: Of that architecture, from `fedkeep.models.channel_groups.channel_groups`.
    ``eta``: The base's share of the result; 0: the aligned source alone.
    """
    plans = _plans(source, base, layers)
    model = align(source, layers, plans)
    if eta:
        model = {
            name: tensor.lerp(base[name], eta) if tensor.is_floating_point() else tensor
            for name, tensor in model.items()
        }
    shares = {
        layer.writes: float((writes == torch.arange(len(writes), device=writes.device)).double().mean())
        for layer in layers
        if layer.writes is not None and (writes := plans[layer.name].writes) is not None
    }
    return Projection(model, shares)


def _plans(source: Weights, base: Weights, layers: Sequence[ChannelLayer]) -> dict[str, LayerPlans]:
    """Return one plan for each group: made when it is first read, from all that was written until then.

    Layers that write into the group later (a residual block's own branch) use the same plan.
    """
    plans: dict[str | None, Plan | None] = {None: None}
    written: dict[str, list[tuple[str, Plan | None]]] = {}
    for layer in layers:
        if layer.reads is not None and layer.reads not in plans:
            ours, theirs = (
                torch.cat([_move(model[weight], reads, 1).flatten(1) for weight, reads in found], 1)
                for model, found in (
                    (source, written[layer.reads]),
                    (base, [(weight, None) for weight, _ in written[layer.reads]]),
                )
            )
            plans[layer.reads] = _cheapest(distances(ours, theirs))
        if layer.writes is not None and layer.writes not in plans:
            written.setdefault(layer.writes, []).append((f"{layer.name}.weight", plans[layer.reads]))
    return {layer.name: LayerPlans(plans[layer.reads], plans.get(layer.writes)) for layer in layers}


def align(source: Weights, layers: Sequence[ChannelLayer], plans: Mapping[str, LayerPlans]) -> dict[str, Tensor]:
    """Return a model whose channels are moved by plans."""
    model = dict(source)
    for layer in layers:
        reads, writes = plans[layer.name]
        weight = f"{layer.name}.weight"
        model[weight] = _move(_move(source[weight], reads, 1), writes, 0)
        norms = (f"{n}.{what}" for n in layer.norms for what in ("weight", "bias", "running_mean", "running_var"))
        model |= {name: _move(source[name], writes, 0) for name in (f"{layer.name}.bias", *norms) if name in source}
    return model


def distances(source: Tensor, base: Tensor) -> Tensor:
    """Return the Euclidean distance of each row of the source to each of the base, float64 [n, n]."""
    source, base = source.double(), base.double()
    square = source.square().sum(1)[:, None] + base.square().sum(1) - 2 * source @ base.T
    return square.clamp_min(0).sqrt()  # rounding may take the distance of equal rows below


def _cheapest(costs: Tensor) -> Plan:
    """Return the cheapest plan from uniform to uniform mass: a permutation, found as an assignment."""
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(costs.cpu().numpy())
    return torch.from_numpy(columns).argsort().to(costs.device)


def _move(tensor: Tensor, plan: Plan | None, axis: int) -> Tensor:
    """Return a tensor whose channels, on an axis, are moved; a flattened map has several entries for each."""
    if plan is None:
        return tensor
    if axis == 0:
        return tensor.reshape(len(plan), -1)[plan].reshape(tensor.shape)
    return tensor.reshape(len(tensor), len(plan), -1)[:, plan].reshape(tensor.shape)
