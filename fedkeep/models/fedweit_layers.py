"""Layers as sums: shared weights times a mask by unit, plus what a party has of its own, and what it takes from others.

theta = B * sigmoid(mask) + A + sum_j a_j A_j (FedWeIT, Yoon et al., 2021). A model of such layers is a flat dict: B and
all that is not decomposed under the network's names, a layer's other tensors under its name behind a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkeep.models.weights import Weights

MASK, ADAPTIVE, ATTENTION = "mask.", "adaptive.", "attention."


def add_prefix(prefix: str, tensors: Weights) -> dict[str, Tensor]:
    """Return tensors by name with a prefix before each name."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def remove_prefix(prefix: str, tensors: Weights) -> dict[str, Tensor]:
    """Return those tensors whose names have a prefix, by name without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def broadcast_units(numbers: Tensor, layer: Tensor) -> Tensor:
    """Return a number for each output unit, [units], so that it multiplies a layer's weights, [units, ...]."""
    return numbers.view(-1, *[1] * (layer.ndim - 1))


@dataclass(frozen=True, eq=False)
class FedWeITParametrization:
    """Computes a network's weights from a model of decomposed layers.

    Attributes
    ----------
    others : by layer the frozen A_j, [j, units, ...]; may be empty.
    """

    others: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, model: Weights) -> dict[str, Tensor]:
        """Return the weights that the network has: a tensor for each name that has no prefix."""
        masks, adaptive, attention = (remove_prefix(prefix, model) for prefix in (MASK, ADAPTIVE, ATTENTION))
        weights = {n: tensor for n, tensor in model.items() if not n.startswith((MASK, ADAPTIVE, ATTENTION))}
        for name, mask in masks.items():
            weights[name] = weights[name] * broadcast_units(mask.sigmoid(), weights[name]) + adaptive[name]
            if name in self.others:
                weights[name] = weights[name] + torch.tensordot(attention[name], self.others[name], 1)
        return weights


@dataclass(frozen=True, eq=False)
class SparseTensors:
    """The larger numbers of layers: ``values`` [n], at ``places`` [n], int32, rising, in all layers in a row."""

    values: Tensor
    places: Tensor

    def fault(self, numbers: int) -> str | None:
        """Return what is wrong with it, if there should be places below ``numbers``; None if nothing is."""
        if self.values.dtype != torch.float32 or self.places.dtype != torch.int32:
            return f"sparse layers of {self.values.dtype} at {self.places.dtype} instead of float32 at int32"
        if self.values.ndim != 1 or self.values.shape != self.places.shape:
            return f"{list(self.values.shape)} numbers at {list(self.places.shape)} places"
        if len(self.places) and not 0 <= int(self.places.min()) <= int(self.places.max()) < numbers:
            return f"places outside of the {numbers} that there are"
        if bool((self.places.diff() <= 0).any()):
            return "places that are not in rising order, each once"
        return None


def to_sparse(layers: Weights, limit: float) -> SparseTensors:
    """Return the numbers of layers that are larger than ``limit`` in size."""
    numbers = torch.cat([layer.flatten() for layer in layers.values()])
    places = (numbers.abs() > limit).nonzero().flatten()
    return SparseTensors(numbers[places], places.int())


def to_dense(few: SparseTensors, like: Weights) -> dict[str, Tensor]:
    """Return sparse layers with zeros in all other places; names and shapes are those of ``like``, in its order."""
    sizes = [layer.numel() for layer in like.values()]
    numbers = few.values.new_zeros(sum(sizes)).index_put_((few.places.long(),), few.values)
    parts = torch.split(numbers, sizes)
    return {name: part.view(layer.shape) for (name, layer), part in zip(like.items(), parts, strict=True)}


def stack_dense(several: Sequence[SparseTensors], like: Weights) -> dict[str, Tensor]:
    """Return by layer the dense ones of several, [number, units, ...]; nothing without any."""
    each = [to_dense(few, like) for few in several]
    return {name: torch.stack([one[name] for one in each]) for name in like} if each else {}


def active_units(mask: Tensor, sparsity: float) -> Tensor:
    """Return which units count, bool [units]: all but that share whose masks are the smallest in size."""
    size = mask.abs()
    return size >= size.sort().values[int(len(size) * sparsity)]


def active_weights(layers: Weights, masks: Weights, sparsity: float) -> Tensor:
    """Return the weights of the units that count, one layer after another, [n]."""
    return torch.cat([layer[active_units(masks[name], sparsity)].flatten() for name, layer in layers.items()])


def num_active_weights(layers: Weights, masks: Weights, sparsity: float) -> int:
    """Return how many numbers `active_weights` has."""
    return sum(int(active_units(masks[n], sparsity).sum()) * layer[0].numel() for n, layer in layers.items())
