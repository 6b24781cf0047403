"""A multi-layer perceptron, for images of any size and rows of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import ClassVar

from torch import nn

from fedkeep.models.base import Architecture, Network, Shape
from fedkeep.options import option


@dataclass(frozen=True)
class MLP(Architecture):
    """Fully connected layers with ReLU on the flattened input, and the classifier.

    Without hidden layers the features are the inputs, which is softmax regression.
    """

    name: ClassVar[str] = "mlp"

    hidden: tuple[int, ...] = option((64,), "units of each hidden layer", low=1)

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        """
        widths = [prod(shape), *self.hidden]
        body = nn.Sequential()
        body.add_module("flatten", nn.Flatten())
        for number, (before, after) in enumerate(pairwise(widths), start=1):
            body.add_module(f"full{number}", nn.Linear(before, after))
            body.add_module(f"relu{number}", nn.ReLU())
        return Network(body, widths[-1], classes)
