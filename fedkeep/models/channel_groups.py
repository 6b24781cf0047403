"""Which channels the layers of a network share: what has to move together when its neurons change places.

Units of a hidden layer have no order of their own: permute them, and the inputs of the layers that read them, and the
network computes the same. Layers whose outputs are added share one order (the residual groups of a ResNet).
`channel_groups` finds this out once for an architecture, from its network; what comes out are names, and so serves
every model of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from fedkeep.errors import ConfigError
from fedkeep.models.layers import MaxPool2

# What does the same to every channel, so that it may be done before or after channels change places.
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
    """A convolution or a linear layer, and which groups of channels it reads and writes.

    Attributes
    ----------
    name : of the module; its tensors are ``name.weight`` [outputs, inputs, ...] and, if it has one, ``name.bias``.
    reads, writes : the group of its input and of its output channels, named after the first layer that writes it; None
        for pixels and classes, whose order is given. A linear layer that reads flattened maps has several inputs for
        each channel, side by side.
    norms : names of the batch norms that follow it, before any other layer.
    """

    name: str
    reads: str | None
    writes: str | None
    norms: tuple[str, ...] = ()


def channel_groups(network: nn.Module) -> tuple[ChannelLayer, ...]:
    """Return a network's layers in the order in which they are computed.

    Parameters
    ----------
    network : made of convolutions and linear layers, batch norms, sums, and what does the same to every channel, such
        as pooling and ReLU.

    Raises
    ------
    ConfigError
        If it has anything else, or decides by the numbers what it computes.
    """
    try:
        graph = _Tracer().trace(network)
    except Exception as error:
        # The user's code may fail in any way when it is given a stand-in for a tensor.
        raise ConfigError(f"cannot follow the channels through {type(network).__name__}: {error}. {_ADVICE}") from error
    sketch = _Sketch(network)
    for node in graph.nodes:
        sketch.follow(node)
    return sketch.layers_by_group()


_ADVICE = (
    "Fusion by optimal transport needs networks of convolutions, linear layers, batch norms, sums, pooling, ReLU and "
    "the like. Use such a model, such as resnet18, or another fusion."
)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return next(m.children(), None) is None


class _Sketch:
    """The layers seen so far; groups are joined when their channels are added."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.layers: dict[str, ChannelLayer] = {}
        self.group: dict[fx.Node, str | None] = {}  # of what a node gives
        self.joined: dict[str, str | None] = {}  # a group and what it became part of

    def follow(self, node: fx.Node) -> None:
        """Note what a node does to channels."""
        read = [self._resolved(self.group[given]) for given in node.all_input_nodes]
        if node.op == "placeholder":
            self.group[node] = None
        elif node.op == "output":
            self._join(None, read[0])
        elif node.op == "call_module" and isinstance(node.target, str):
            self.group[node] = self._through(node.target, read, node)
        elif len(read) == 1 and (node.target in _ALIKE_FUNCTIONS or node.target in _ALIKE_METHODS):
            self.group[node] = read[0]
        elif len(read) == 2 and node.target in _SUMS:
            self.group[node] = self._join(*read)
        else:
            raise self._refused(f"{node.op.removeprefix('call_')} {node.target}")

    def layers_by_group(self) -> tuple[ChannelLayer, ...]:
        """Return the layers, every group by its last name."""
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
            self.layers[name] = ChannelLayer(name, read[0], name)
            return name
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            self._note_norm(name, node)
            return read[0]
        if isinstance(module, _EACH_ALIKE):
            return read[0]
        raise self._refused(f"{name}, a {type(module).__name__}")

    def _note_norm(self, name: str, node: fx.Node) -> None:
        before = node.all_input_nodes[0]
        while before.target not in self.layers and len(before.all_input_nodes) == 1:
            before = before.all_input_nodes[0]
        if before.target not in self.layers:
            raise self._refused(f"the batch norm {name}, which normalises an image or a sum")
        layer = self.layers[str(before.target)]
        self.layers[layer.name] = replace(layer, norms=(*layer.norms, name))

    def _join(self, *groups: str | None) -> str | None:
        """Make one group of two, and return it: the one that is written first, or None if either is None."""
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
        return ConfigError(f"cannot follow the channels of {type(self.network).__name__} through {what}. {_ADVICE}")
