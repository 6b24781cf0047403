"""Aggregation by optimal transport: a model is aligned with another's neurons before the two are mixed.

Singh & Jaggi, 2020, "Model fusion via optimal transport"; in FedSKF (Electronics 2024, 13, 1772) the mean of the
clients' models is aligned with one of them, a different one each round. It needs weights only, no data.

The units of a hidden layer have no inherent order: a network computes the same after a permutation of the units and of
the inputs of the layers that read them. Layers whose outputs are added share an order (the residual blocks of a
ResNet). `channel_groups` finds these groups once for an architecture, from its network. The result consists of names,
and so is valid for every model of the architecture.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fedkeep.errors import ConfigError
from fedkeep.models import Weights
from fedkeep.models.networks import MaxPool2
from fedkeep.models.weights import tied_parameters

# Operations that treat all channels alike, so that they commute with a permutation of channels.
_EACH_ALIKE: tuple[type[nn.Module], ...] = (
    *(nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout2d),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
    *(MaxPool2, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
_ALIKE_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(torch.flatten, torch.relu, torch.tanh, torch.sigmoid, torch.dropout),
    *(functional.relu, functional.leaky_relu, functional.elu, functional.gelu, functional.silu, functional.dropout),
    *(functional.max_pool2d, functional.avg_pool2d, functional.adaptive_avg_pool2d, functional.adaptive_max_pool2d),
)
_ALIKE_METHODS = ("flatten", "relu", "tanh", "sigmoid", "contiguous")
_SUMS: tuple[Callable[..., Any], ...] = (operator.add, operator.iadd, torch.add)


@dataclass(frozen=True)
class ChannelLayer:
    """A convolution or a linear layer, and the groups of channels that it reads and writes.

    ``name``: Name of the module, with tensors ``name.weight`` [outputs, inputs, ...] and, optionally, ``name.bias``.
    ``reads``: Group of the input channels, with the name of the first layer that writes it; None for pixels, whose
        order is fixed. A linear layer that reads flattened maps has several adjacent inputs for each channel.
    ``writes``: Group of the output channels; None for classes, whose order is fixed.
    ``norms``: Names of the batch norms between this layer and the next.
    """

    name: str
    reads: str | None
    writes: str | None
    norms: tuple[str, ...] = ()


def channel_groups(network: nn.Module) -> tuple[ChannelLayer, ...]:
    """Find the channel groups of a network.

    ``network``: A network of convolutions, linear layers, batch norms, sums, and operations that treat all channels
        alike, such as pooling and ReLU.
    Returns: The layers in the order in which they are computed.
    """
    if tied := tied_parameters(network):
        raise ConfigError(f"{type(network).__name__}.{tied[0]} stands at several places, and has one order. {_ADVICE}")
    try:
        graph = _Tracer().trace(network)
    except Exception as error:
        # The user's code may fail in any way when it is called with a proxy instead of a tensor.
        raise ConfigError(f"cannot follow the channels through {type(network).__name__}: {error}. {_ADVICE}") from error
    finder = _GroupFinder(network)
    for node in graph.nodes:
        finder.follow(node)
    return finder.layers_by_group()


_ADVICE = (
    "Fusion by optimal transport needs networks of convolutions, linear layers, batch norms, sums, pooling, ReLU and "
    "the like. Use such a network, or the plain mean: fedskf.pit=off."
)


def _makes_rows(_: Any = None, start_dim: Any = 0, end_dim: Any = -1, **kwargs: Any) -> bool:
    """Tell whether a call of flatten makes one row of each image."""
    return start_dim in (1, -3) and end_dim in (-1, 3)


def _is_size(node: Any, *, of_batch: bool = False) -> bool:
    """Tell whether a node is a shape or a number in it, such as ``x.size(0)``; or the number of images."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is operator.getitem:
        return _is_size(node.args[0]) and not (of_batch and node.args[1] != 0)
    if node.op == "call_method" and node.target == "size":
        return not of_batch or node.args[1:] == (0,)
    return node.target is getattr and node.args[1] == "shape" and not of_batch


def _pools(node: fx.Node) -> bool:
    """Tell whether a node is the mean over an image's height and width."""
    over: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    is_pair = isinstance(over, tuple | list) and len(over) == 2
    return node.target in ("mean", torch.mean) and is_pair and {int(str(axis)) % 4 for axis in over} == {2, 3}


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    """Return the two sizes to which a node reshapes, if it makes one row of each image; else nothing."""
    given: tuple[Any, ...] = node.args[1:]
    sizes = tuple(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given
    whole = len(sizes) == 2 and (_is_size(sizes[0], of_batch=True) or (sizes[0] == -1 and isinstance(sizes[1], int)))
    return sizes if whole else ()


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return next(m.children(), None) is None


def _is_frozen(layer: nn.Module) -> bool:
    """Tell whether parameters of a layer do not travel, and so cannot move."""
    return not all(parameter.requires_grad for parameter in layer.parameters())


class _GroupFinder:
    """Follows a network's graph and collects its layers; groups are joined when their channels are added."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.layers: dict[str, ChannelLayer] = {}
        self.frozen: set[str] = set()
        self.group: dict[fx.Node, str | None] = {}  # of the outputs of each node
        self.joined: dict[str, str | None] = {}  # each joined group, and the group that it was joined to
        self.reshaped: list[str] = []  # by view(-1, n)
        self.flattened = 0  # how often

    def follow(self, node: fx.Node) -> None:
        """Record what a node does to channels."""
        read = [self._resolved(self.group[source]) for source in node.all_input_nodes]
        if node.op == "placeholder":
            self.group[node] = None
        elif node.op == "output":
            self._join(None, read[0])
        elif node.op == "call_module" and isinstance(node.target, str):
            self.group[node] = self._through(node.target, read, node)
        elif _is_size(node):
            self.group[node] = None
        elif _pools(node):
            if read[0] and isinstance(self.network.get_submodule(read[0]), nn.Linear):
                raise self._refused(f"a mean over what {read[0]} makes of a part of each image")
            self.group[node] = read[0]
        elif node.target in ("view", "reshape", torch.reshape) and (sizes := _sizes(node)):
            # view(-1, n) may also make several rows of an image: then something must put them together again.
            self.reshaped += [str(node)] if sizes[0] == -1 else []
            self.flattened += 1
            self.group[node] = read[0]
        elif len(read) == 1 and (node.target in _ALIKE_FUNCTIONS or node.target in _ALIKE_METHODS):
            if node.target in (torch.flatten, "flatten") and not _makes_rows(*node.args, **node.kwargs):
                raise self._refused("a flatten that does not make one row of each image")
            self.flattened += node.target in (torch.flatten, "flatten")
            self.group[node] = read[0]
        elif len(read) == 2 and node.target in _SUMS:
            self.group[node] = self._join(*read)
        else:
            called = getattr(node.target, "__name__", node.target)
            raise self._refused(f"{node.op.removeprefix('call_')} {called}, which is not known to treat them alike")

    def layers_by_group(self) -> tuple[ChannelLayer, ...]:
        """Return the layers with the final names of their groups."""
        if self.reshaped and self.flattened > 1:
            raise self._refused("view(-1, n) beside another flatten")
        return tuple(
            replace(layer, reads=self._resolved(layer.reads), writes=self._resolved(layer.writes))
            for layer in self.layers.values()
        )

    def _through(self, name: str, read: list[str | None], node: fx.Node) -> str | None:
        module = self.network.get_submodule(name)
        if isinstance(module, nn.Conv2d | nn.Linear):
            if getattr(module, "groups", 1) != 1:
                raise self._refused(f"the grouped convolution {name}")
            if name in self.layers:
                raise self._refused(f"{name}, which is used twice")
            before = self.network.get_submodule(read[0]) if read[0] else None
            if isinstance(before, nn.Linear) and before.out_features != getattr(module, "in_features", None):
                raise self._refused(f"{read[0]}, which reads a part of each image")
            if _is_frozen(module):  # its channels keep their order
                self.frozen.add(name)
                return self._join(None, read[0])
            self.layers[name] = ChannelLayer(name, read[0], name)
            return name
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            self._note_norm(name, node)
            return self._join(None, read[0]) if _is_frozen(module) else read[0]
        if isinstance(module, nn.Flatten) and not _makes_rows(None, module.start_dim, module.end_dim):
            raise self._refused(f"{name}, which does not make one row of each image")
        self.flattened += isinstance(module, nn.Flatten)
        if isinstance(module, _EACH_ALIKE) or (isinstance(module, nn.Sequential) and not len(module)):
            return read[0]
        raise self._refused(f"{name}, a {type(module).__name__}")

    def _note_norm(self, name: str, node: fx.Node) -> None:
        before = node.all_input_nodes[0]
        while before.target not in {*self.layers, *self.frozen} and len(before.all_input_nodes) == 1:
            before = before.all_input_nodes[0]
        if before.target in self.frozen:
            return
        if before.target not in self.layers:
            raise self._refused(f"the batch norm {name}, which normalises an image or a sum")
        if any(name in layer.norms for layer in self.layers.values()):
            raise self._refused(f"{name}, which is used twice")
        layer = self.layers[str(before.target)]
        self.layers[layer.name] = replace(layer, norms=(*layer.norms, name))

    def _join(self, *groups: str | None) -> str | None:
        """Join two groups and return the result: the group that is written first, or None if either is None."""
        order = [None, *self.layers]
        first, second = sorted(groups, key=order.index)
        if first != second:
            self.joined[str(second)] = first
        return first

    def _resolved(self, group: str | None) -> str | None:
        while group is not None and group in self.joined:
            group = self.joined[group]
        return group

    def _refused(self, what: str) -> ConfigError:
        body = getattr(self.network, "body", None) if hasattr(self.network, "own_name") else None
        named = type(self.network if body is None else body).__name__
        shown = what if body is None else re.sub(r"\bbody\.", "", what)
        return ConfigError(f"cannot follow the channels of {named} through {shown}. {_ADVICE}")


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

    ``layers``: Of that architecture, from `fedkeep.aggregation.transport.channel_groups`.
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
