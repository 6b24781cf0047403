"""The decomposed layers of FedWeIT (Yoon et al., 2021): theta = B * sigmoid(mask) + A + sum_j a_j A_j.

B is shared by all clients, the mask has one number for each output unit, A is the client's own adaptive part, and the
A_j, with attentions a_j, are the adaptive parts of others. A model of such layers is a flat dict: B and everything that
is not decomposed under the network's names, and a layer's other tensors under its name with a prefix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkeep.models.weights import Weights

MASK, ADAPTIVE, ATTENTION = "mask.", "adaptive.", "attention."


def add_prefix(prefix: str, tensors: Weights) -> dict[str, Tensor]:
    """Add a prefix to the names of tensors.

    ``tensors``: The tensors by name.
    """
    return {prefix + name: tensor for name, tensor in tensors.items()}


def remove_prefix(prefix: str, tensors: Weights) -> dict[str, Tensor]:
    """Select the tensors whose names have a prefix.

    ``tensors``: The tensors by name.
    """
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def broadcast_units(numbers: Tensor, layer: Tensor) -> Tensor:
    """Reshape one number for each output unit so that it multiplies a layer's weights.

    ``numbers``: The numbers, [units].
    ``layer``: The weights, [units, ...].
    Returns: The numbers, [units, 1, ...].
    """
    return numbers.view(-1, *[1] * (layer.ndim - 1))


@dataclass(frozen=True, eq=False)
class FedWeITParametrization:
    """Computes a network's weights from a model of decomposed layers, as a `Parametrization`.

    ``others``: The frozen A_j by layer, [j, units, ...]; may be empty.
    """

    others: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, model: Weights) -> dict[str, Tensor]:
        """Compute the weights."""
        masks, adaptive, attention = (remove_prefix(prefix, model) for prefix in (MASK, ADAPTIVE, ATTENTION))
        weights = {n: tensor for n, tensor in model.items() if not n.startswith((MASK, ADAPTIVE, ATTENTION))}
        for name, mask in masks.items():
            weights[name] = weights[name] * broadcast_units(mask.sigmoid(), weights[name]) + adaptive[name]
            if name in self.others:
                weights[name] = weights[name] + torch.tensordot(attention[name], self.others[name], 1)
        return weights


@dataclass(frozen=True, eq=False)
class SparseTensors:
    """The largest numbers of several layers.

    ``values``: The numbers, float32 [n].
    ``places``: Their indices in the concatenation of all flattened layers, int32 [n], in ascending order.
    """

    values: Tensor
    places: Tensor

    def fault(self, numbers: int) -> str | None:
        """Check the types, shapes and indices.

        ``numbers``: Number of elements of all layers.
        Returns: What is wrong; None if nothing is.
        """
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
    """Keep only the large numbers of layers.

    ``limit``: Numbers with an absolute value above this are kept.
    """
    numbers = torch.cat([layer.flatten() for layer in layers.values()])
    places = (numbers.abs() > limit).nonzero().flatten()
    return SparseTensors(numbers[places], places.int())


def to_dense(few: SparseTensors, like: Weights) -> dict[str, Tensor]:
    """Restore layers, with zeros for the numbers that were not kept.

    ``like``: Layers of the same names, shapes and order.
    """
    sizes = [layer.numel() for layer in like.values()]
    numbers = few.values.new_zeros(sum(sizes)).index_put_((few.places.long(),), few.values)
    parts = torch.split(numbers, sizes)
    return {name: part.view(layer.shape) for (name, layer), part in zip(like.items(), parts, strict=True)}


def stack_dense(several: Sequence[SparseTensors], like: Weights) -> dict[str, Tensor]:
    """Restore several sparse versions of the same layers and stack them.

    ``like``: Layers of the same names, shapes and order.
    Returns: The layers, [number, units, ...]; empty without sparse versions.
    """
    each = [to_dense(few, like) for few in several]
    return {name: torch.stack([one[name] for one in each]) for name in like} if each else {}


def active_units(mask: Tensor, sparsity: float) -> Tensor:
    """Select a layer's active units: all but those with the smallest absolute masks.

    ``mask``: The mask, [units].
    Returns: Whether each unit is active, bool [units].
    """
    size = mask.abs()
    return size >= size.sort().values[int(len(size) * sparsity)]


def active_weights(layers: Weights, masks: Weights, sparsity: float) -> Tensor:
    """Return the weights of the active units.

    Returns: The weights, one layer after another, [n].
    """
    return torch.cat([layer[active_units(masks[name], sparsity)].flatten() for name, layer in layers.items()])
