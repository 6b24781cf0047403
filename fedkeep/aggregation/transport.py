"""Fusion by optimal transport: a model is laid onto another's neurons before the two are mixed.

Singh & Jaggi, 2020, "Model fusion via optimal transport"; in FedSKF (Electronics 2024, 13, 1772) the mean of the
clients' models is laid onto one of them, a different one each round. Weights alone decide, so it needs no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedkeep.aggregation.plans import Cost, Plan, Solver, cost_matrix, diagonal, mean_plan, moved, plan_of
from fedkeep.models import Weights
from fedkeep.models.channels import Layer
from fedkeep.models.weights import mean
from fedkeep.options import Options, option

Skip = Literal["tied", "sj", "refine"]

SWEEPS = 20  # of refining, at most


class Maps(NamedTuple):
    """The maps on a layer's two sides; None where the order is given."""

    reads: Plan | None
    writes: Plan | None


@dataclass(frozen=True, eq=False)
class Projection:
    """What comes of laying a model onto another's neurons.

    Attributes
    ----------
    model : the result, aligned or fused.
    diagonal : the share of each plan's mass that stays on its channel, from 0 to 1, by the group of channels (or, with
        ``skip="sj"``, by the layer) that it is for. 1 everywhere: no neuron changed its place.
    last : the map of the channels that the classifier reads, for `laid_classifier`; None if they are pixels.
    """

    model: dict[str, Tensor]
    diagonal: dict[str, float]
    last: Plan | None


@dataclass(frozen=True)
class Transport(Options):
    """How a source model is laid onto the neurons of a base; FedSKF's paper leaves all of it open.

    Layer by layer from the image on: the source's inputs are put in the base's order, the units of both are compared by
    their incoming weights, a plan says which becomes which, and the outputs follow. Batch norm goes along; running
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
    result: Literal["fused", "aligned"] = option("fused", "mix the laid source with the base, or take it alone")
    eta: float = option(0.5, "of fused: the base's share", low=0, high=1)

    def fuse(self, models: Sequence[Weights], turn: int, layers: Sequence[Layer]) -> Projection:
        """Lay the plain mean of the models onto number ``turn``, counted on from the first again after the last."""
        return self.project(mean(models), models[turn % len(models)], layers)

    @torch.no_grad()
    def project(self, source: Weights, base: Weights, layers: Sequence[Layer]) -> Projection:
        """Return the source on the base's neurons.

        Parameters
        ----------
        source, base : models of one architecture.
        layers : its `fedkeep.models.channels.channels`.
        """
        ways = {"tied": self._tied, "sj": self._each_its_own, "refine": self._refined}
        maps = ways[self.skip](source, base, layers)
        model = laid(source, layers, maps)
        if self.result == "fused":
            model = {name: _mixed(tensor, base[name], self.eta) for name, tensor in model.items()}
        shares = {
            (layer.name if self.skip == "sj" else layer.writes): diagonal(writes)
            for layer in layers
            if layer.writes is not None and (writes := maps[layer.name].writes) is not None
        }
        return Projection(model, shares, maps[layers[-1].name].reads)

    def _tied(self, source: Weights, base: Weights, layers: Sequence[Layer]) -> dict[str, Maps]:
        """Return maps such that every group has one: made when it is first read, from all that was written until then.

        What is written into the group later (a residual block's own branch) depends on it, and follows it.
        """
        plans: dict[str | None, Plan | None] = {None: None}
        written: dict[str, list[tuple[Layer, Plan | None]]] = {}
        for layer in layers:
            if layer.reads is not None and layer.reads not in plans:
                plans[layer.reads] = self._plan(source, base, written[layer.reads])
            if layer.writes is not None and layer.writes not in plans:
                written.setdefault(layer.writes, []).append((layer, plans[layer.reads]))
        return {layer.name: Maps(plans[layer.reads], plans.get(layer.writes)) for layer in layers}

    def _each_its_own(self, source: Weights, base: Weights, layers: Sequence[Layer]) -> dict[str, Maps]:
        """Return maps of which every layer has its own, as Singh & Jaggi handle skip connections.

        A group is read through the mean of the maps of what was written since it was last read: after a block, of its
        branch and its shortcut. A shortcut without weights counts for nothing.
        """
        current: dict[str | None, Plan | None] = {None: None}
        fresh: dict[str | None, list[Plan]] = {}
        maps = {}
        for layer in layers:
            if layer.reads in fresh:
                current[layer.reads] = mean_plan(fresh.pop(layer.reads))
            reads, writes = current[layer.reads], None
            if layer.writes is not None:
                writes = self._plan(source, base, [(layer, reads)])
                fresh.setdefault(layer.writes, []).append(writes)
            maps[layer.name] = Maps(reads, writes)
        return maps

    def _refined(self, source: Weights, base: Weights, layers: Sequence[Layer]) -> dict[str, Maps]:
        """Return the maps of `_tied` after coordinate descent (Ainsworth et al., 2023, "Git Re-Basin").

        One group after the other gets the best map given those of all others, by everything that writes it and reads
        it, until none changes. With the cost ``sq`` each step brings the laid weights closer to the base's; with others
        it usually does.
        """
        tied = self._tied(source, base, layers)
        plans: dict[str | None, Plan | None] = {None: None}
        plans |= {layer.writes: tied[layer.name].writes for layer in layers}
        for _ in range(SWEEPS):
            before = dict(plans)
            for group in plans:
                if group is not None:
                    written = [(layer, plans[layer.reads]) for layer in layers if layer.writes == group]
                    read = [(layer, plans[layer.writes]) for layer in layers if layer.reads == group]
                    plans[group] = self._plan(source, base, written, read)
            if all(_same(plan, before[group]) for group, plan in plans.items()):
                break
        return {layer.name: Maps(plans[layer.reads], plans[layer.writes]) for layer in layers}

    def _plan(
        self,
        source: Weights,
        base: Weights,
        written: Sequence[tuple[Layer, Plan | None]],
        read: Sequence[tuple[Layer, Plan | None]] = (),
    ) -> Plan:
        """Return the map of channels that these layers write, each with the map of what it reads, and that others read,
        each with the map of what it writes."""
        ours = [rows for layer, reads in written for rows in self._rows(layer, source, reads)]
        theirs = [rows for layer, _ in written for rows in self._rows(layer, base, None)]
        channels = len(ours[0])
        ours += [_columns(layer, source, writes, channels) for layer, writes in read]
        theirs += [_columns(layer, base, None, channels) for layer, _ in read]
        return plan_of(cost_matrix(torch.cat(ours, 1), torch.cat(theirs, 1), self.cost), self.solver, self.reg)

    def _rows(self, layer: Layer, model: Weights, reads: Plan | None) -> list[Tensor]:
        """Return what a layer's units are compared by, each [units, ...]."""
        rows = [moved(model[f"{layer.name}.weight"], reads, 1).flatten(1)]
        if self.bias_in_cost:
            names = [f"{layer.name}.bias", *(f"{norm}.{what}" for norm in layer.norms for what in ("weight", "bias"))]
            rows += [model[name][:, None] for name in names if name in model]
        return rows


def laid(source: Weights, layers: Sequence[Layer], maps: Mapping[str, Maps]) -> dict[str, Tensor]:
    """Return a model whose layers read and write through these maps, by the layer's name."""
    model = dict(source)
    for layer in layers:
        reads, writes = maps[layer.name]
        weight = f"{layer.name}.weight"
        model[weight] = moved(moved(source[weight], reads, 1), writes, 0)
        model |= {name: moved(source[name], writes, 0) for name in _follow(layer, source)}
    return model


def laid_classifier(head: Weights, last: Plan | None) -> dict[str, Tensor]:
    """Return a classifier whose columns read features in the base's order: a client's own, after a projection.

    Parameters
    ----------
    head : with ``classifier.weight`` [classes, width]; what else there is stays as it is.
    last : the projection's map.
    """
    return {name: moved(tensor, last, 1) if name == "classifier.weight" else tensor for name, tensor in head.items()}


def _follow(layer: Layer, model: Weights) -> list[str]:
    """Return the names of the tensors, one number a unit, that go where a layer's outputs go."""
    norms = (f"{n}.{what}" for n in layer.norms for what in ("weight", "bias", "running_mean", "running_var"))
    return [name for name in (f"{layer.name}.bias", *norms) if name in model]


def _columns(layer: Layer, model: Weights, writes: Plan | None, channels: int) -> Tensor:
    """Return what a layer reads of each channel, [channels, ...]."""
    weight = moved(model[f"{layer.name}.weight"], writes, 0)
    return weight.reshape(len(weight), channels, -1).transpose(0, 1).flatten(1)


def _same(plan: Plan | None, other: Plan | None) -> bool:
    return plan is other or (plan is not None and other is not None and torch.equal(plan, other))


def _mixed(ours: Tensor, base: Tensor, eta: float) -> Tensor:
    return ours.lerp(base, eta) if ours.is_floating_point() else ours
