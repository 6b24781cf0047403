"""A trained network as others use it: raw inputs in, a score for each class out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedkeep._utils.torch_state import plain_torch
from fedkeep.errors import ConfigError
from fedkeep.models.base import Architecture, Shape
from fedkeep.models.custom import SplitNetwork
from fedkeep.models.heads import resize_classifier
from fedkeep.models.pretrained import FrozenNetwork
from fedkeep.models.trial_step import constants_of
from fedkeep.models.weights import Weights, load_weights


class Predictor(nn.Module):
    """A network with the normalisation of its inputs: maps stored examples to scores.

    ``network``: Maps normalised inputs, float32 [b, ...], to logits, [b, classes * rows_per_class].
    ``mean``, ``std``: Mean and standard deviation of each channel, for pixels scaled to 0..1; not used for other
        inputs.
    ``rows_per_class``: Adjacent classifier rows for each class, of which the first is its score.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, network: nn.Module, mean: Sequence[float], std: Sequence[float], rows_per_class: int = 1
    ) -> None:
        super().__init__()
        self.network = network
        self.rows_per_class = rows_per_class
        self.register_buffer("mean", torch.tensor(list(mean), dtype=torch.float32).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std), dtype=torch.float32).view(-1, 1, 1), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the scores.

        ``inputs``: uint8 pixels [b, channels, height, width]; token ids and numbers go to the network as they are.
        Returns: Scores (logits), float32 [b, classes].
        """
        if inputs.dtype == torch.uint8:
            inputs = inputs.to(torch.float32).div(255).sub(self.mean).div(self.std)
        scores: Tensor = self.network(inputs)
        return scores[:, :: self.rows_per_class] if self.rows_per_class > 1 else scores


def build_predictor(
    architecture: Architecture,
    weights: Weights,
    *,
    shape: Shape,
    classes: int,
    mean: Sequence[float],
    std: Sequence[float],
    rows_per_class: int = 1,
) -> Predictor:
    """Build a network, fill it with trained weights, and give it the normalisation of its inputs.

    ``weights``: The trained weights, or those that were exported; their classifier may have grown since the network was
        first built.
    ``shape``: Shape of an input without the batch: channels, height and width.
    ``classes``: Number of classes with which the network is first built: all classes, or those of the first task.
    """
    with torch.random.fork_rng(devices=[]), plain_torch():  # the initial weights, which are replaced
        network = architecture.build(shape, classes)
    if isinstance(network, FrozenNetwork):
        raise ConfigError(
            "this network computes its features with a frozen extractor, which is not part of the trained weights. "
            "model.safetensors in the trial's folder holds the classifier; use it behind that extractor."
        )
    weights = _imported(network, weights)
    resize_classifier(network, weights)
    load_weights(network, weights)
    return Predictor(network, mean, std, rows_per_class).eval()


def exported(network: nn.Module, weights: Weights) -> Weights:
    """Return weights by the names that they have in a user's own network, as its ``load_state_dict`` takes them.

    ``network``: The network that was trained, which may be the user's network in two parts.
    """
    constants = constants_of(network)
    if not isinstance(network, SplitNetwork):
        return {**weights, **constants} if constants else weights
    return {network.own_name(name): tensor for name, tensor in weights.items()} | constants


def _imported(network: nn.Module, weights: Weights) -> Weights:
    """Return weights by a network's names, also if they have the names that `exported` gave them."""
    if constants := constants_of(network):
        weights = {name: tensor for name, tensor in weights.items() if name not in constants}
    if not isinstance(network, SplitNetwork) or weights.keys() == network.state_dict().keys():
        return weights
    names = {network.own_name(name): name for name in network.state_dict()}
    return {names.get(name, name): tensor for name, tensor in weights.items()}
