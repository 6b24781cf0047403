"""Aggregation by optimal transport: a model is aligned with another's neurons before the two are mixed.

Singh & Jaggi, 2020, "Model fusion via optimal transport"; in FedSKF (Electronics 2024, 13, 1772) the mean of the
clients' models is aligned with one of them, a different one each round. It needs weights only, no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedkeep.aggregation.transport_plans import (
    Cost,
    Plan,
    Solver,
    apply_plan,
    compute_plan,
    cost_matrix,
    diagonal_share,
    mean_plan,
)
from fedkeep.models import Weights
from fedkeep.models.channel_groups import ChannelLayer
from fedkeep.models.weights import mean
from fedkeep.options import Options, option

Skip = Literal["tied", "sj", "refine"]

MAX_SWEEPS = 20  # of refining


class LayerPlans(NamedTuple):
    """The plans on a layer's two sides; None where channels keep their order: an image's channels, and the classes."""

    reads: Plan | None
    writes: Plan | None


@dataclass(frozen=True, eq=False)
class Projection:
    """A model that was aligned with another's neurons.

    ``model``: The result, aligned or fused.
    ``diagonal``: The share of each plan's mass that stays on its channel, from 0 to 1, by the group of channels (or,
        with ``skip="sj"``, by the layer) that it is for. 1 everywhere: no neuron changed its place.
    """

    model: dict[str, Tensor]
    diagonal: dict[str, float]


@dataclass(frozen=True)
class OptimalTransport(Options):
    """How a source model is aligned with the neurons of a base; FedSKF's paper leaves all of it open.

    Layer by layer from the image on: the source's inputs are put in the base's order, the units of both are compared by
    their incoming weights, a plan maps the former to the latter, and the outputs follow. Batch norm goes along; running
    variances too, which is exact for a permutation and an approximation otherwise. The classifier's rows are never
    moved: they are the classes.

    With ``emd``, ``aligned`` and plans that are shared (``tied``, ``refine``) the result computes exactly what the
    source did, whatever the base.
    """

    cost: Cost = option("euclidean", "distance of two units' incoming weights")
    solver: Solver = option("emd", "exact plan, a permutation, or an entropic one that blurs")
    reg: float = option(0.01, "of sinkhorn: weight of the entropy, as a share of the mean cost", low=1e-6)
    skip: Skip = option(
        "tied",
        "layers whose outputs are added share one plan; or each has its own and their mean goes on (sj); or they share "
        "one that is refined by what reads them",
    )
    bias_in_cost: bool = option(False, "compare biases and batch norms' scales too, not the weights alone")
    result: Literal["fused", "aligned"] = option("fused", "mix the aligned source with the base, or take it alone")
    eta: float = option(0.5, "of fused: the base's share", low=0, high=1)

    def fuse(self, models: Sequence[Weights], turn: int, layers: Sequence[ChannelLayer]) -> Projection:
        """Align the plain mean of the models with one of them.

        ``turn``: The number of the base; after the last model the first follows.
        ``layers``: Of that architecture, from `fedkeep.models.channel_groups.channel_groups`.
        """
        return self.project(mean(models), models[turn % len(models)], layers)

    @torch.no_grad()
    def project(self, source: Weights, base: Weights, layers: Sequence[ChannelLayer]) -> Projection:
        """Align the source with the base's neurons.

        ``source``, ``base``: Models of one architecture.
        ``layers``: Of that architecture, from `fedkeep.models.channel_groups.channel_groups`.
        """
        make_plans = {"tied": self._tied, "sj": self._separate, "refine": self._refined}[self.skip]
        plans = make_plans(source, base, layers)
        model = align(source, layers, plans)
        if self.result == "fused":
            model = {name: _mix(tensor, base[name], self.eta) for name, tensor in model.items()}
        shares = {
            (layer.name if self.skip == "sj" else layer.writes): diagonal_share(writes)
            for layer in layers
            if layer.writes is not None and (writes := plans[layer.name].writes) is not None
        }
        return Projection(model, shares)

    def _tied(self, source: Weights, base: Weights, layers: Sequence[ChannelLayer]) -> dict[str, LayerPlans]:
        """Return one plan for each group: made when it is first read, from all that was written until then.

        Layers that write into the group later (a residual block's own branch) use the same plan.
        """
        plans: dict[str | None, Plan | None] = {None: None}
        written: dict[str, list[tuple[ChannelLayer, Plan | None]]] = {}
        for layer in layers:
            if layer.reads is not None and layer.reads not in plans:
                plans[layer.reads] = self._plan(source, base, written[layer.reads])
            if layer.writes is not None and layer.writes not in plans:
                written.setdefault(layer.writes, []).append((layer, plans[layer.reads]))
        return {layer.name: LayerPlans(plans[layer.reads], plans.get(layer.writes)) for layer in layers}

    def _separate(self, source: Weights, base: Weights, layers: Sequence[ChannelLayer]) -> dict[str, LayerPlans]:
        """Return plans of which every layer has its own, as Singh & Jaggi handle skip connections.

        A group is read through the mean of the plans of what was written since it was last read: after a block, of its
        branch and its shortcut. A shortcut without weights counts for nothing.
        """
        current: dict[str | None, Plan | None] = {None: None}
        fresh: dict[str | None, list[Plan]] = {}
        found = {}
        for layer in layers:
            if layer.reads in fresh:
                current[layer.reads] = mean_plan(fresh.pop(layer.reads))
            reads, writes = current[layer.reads], None
            if layer.writes is not None:
                writes = self._plan(source, base, [(layer, reads)])
                fresh.setdefault(layer.writes, []).append(writes)
            found[layer.name] = LayerPlans(reads, writes)
        return found

    def _refined(self, source: Weights, base: Weights, layers: Sequence[ChannelLayer]) -> dict[str, LayerPlans]:
        """Return the plans of `_tied` after coordinate descent (Ainsworth et al., 2023, "Git Re-Basin").

        One group after the other gets the best plan given those of all others, by everything that writes it and reads
        it, until none changes. With the cost ``sq`` each step brings the aligned weights closer to the base's; with
        others it usually does.
        """
        tied = self._tied(source, base, layers)
        plans: dict[str | None, Plan | None] = {None: None}
        plans |= {layer.writes: tied[layer.name].writes for layer in layers}
        for _ in range(MAX_SWEEPS):
            before = dict(plans)
            for group in plans:
                if group is not None:
                    written = [(layer, plans[layer.reads]) for layer in layers if layer.writes == group]
                    read = [(layer, plans[layer.writes]) for layer in layers if layer.reads == group]
                    plans[group] = self._plan(source, base, written, read)
            if all(_is_same(plan, before[group]) for group, plan in plans.items()):
                break
        return {layer.name: LayerPlans(plans[layer.reads], plans[layer.writes]) for layer in layers}

    def _plan(
        self,
        source: Weights,
        base: Weights,
        written: Sequence[tuple[ChannelLayer, Plan | None]],
        read: Sequence[tuple[ChannelLayer, Plan | None]] = (),
    ) -> Plan:
        """Return the plan of the channels that ``written`` write and ``read`` read.

        Each layer comes with the plan on its other side: of what it reads, or of what it writes.
        """
        ours = [rows for layer, reads in written for rows in self._rows(layer, source, reads)]
        theirs = [rows for layer, _ in written for rows in self._rows(layer, base, None)]
        channels = len(ours[0])
        ours += [_columns(layer, source, writes, channels) for layer, writes in read]
        theirs += [_columns(layer, base, None, channels) for layer, _ in read]
        return compute_plan(cost_matrix(torch.cat(ours, 1), torch.cat(theirs, 1), self.cost), self.solver, self.reg)

    def _rows(self, layer: ChannelLayer, model: Weights, reads: Plan | None) -> list[Tensor]:
        """Return what a layer's units are compared by, each [units, ...]."""
        rows = [apply_plan(model[f"{layer.name}.weight"], reads, 1).flatten(1)]
        if self.bias_in_cost:
            names = [f"{layer.name}.bias", *(f"{norm}.{what}" for norm in layer.norms for what in ("weight", "bias"))]
            # A batch norm after a flattened map has several entries for each unit.
            rows += [model[name].reshape(len(rows[0]), -1) for name in names if name in model]
        return rows


def align(source: Weights, layers: Sequence[ChannelLayer], plans: Mapping[str, LayerPlans]) -> dict[str, Tensor]:
    """Return a model whose channels are moved by plans."""
    model = dict(source)
    for layer in layers:
        reads, writes = plans[layer.name]
        weight = f"{layer.name}.weight"
        model[weight] = apply_plan(apply_plan(source[weight], reads, 1), writes, 0)
        model |= {name: apply_plan(source[name], writes, 0) for name in _per_unit_names(layer, source)}
    return model


def _per_unit_names(layer: ChannelLayer, model: Weights) -> list[str]:
    """Return the names of the vectors that move as a layer's outputs do."""
    norms = (f"{n}.{what}" for n in layer.norms for what in ("weight", "bias", "running_mean", "running_var"))
    return [name for name in (f"{layer.name}.bias", *norms) if name in model]


def _columns(layer: ChannelLayer, model: Weights, writes: Plan | None, channels: int) -> Tensor:
    """Return what a layer reads of each channel, [channels, ...]."""
    weight = apply_plan(model[f"{layer.name}.weight"], writes, 0)
    return weight.reshape(len(weight), channels, -1).transpose(0, 1).flatten(1)


def _is_same(plan: Plan | None, other: Plan | None) -> bool:
    return plan is other or (plan is not None and other is not None and torch.equal(plan, other))


def _mix(ours: Tensor, base: Tensor, eta: float) -> Tensor:
    return ours.lerp(base, eta) if ours.is_floating_point() else ours
