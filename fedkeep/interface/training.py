"""Settings of local training, and the types of what can be passed to `Party.fit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from fedkeep.models import Weights
from fedkeep.options import Options, option

Precision = Literal["float32", "bfloat16"]
EpochEndsWith = Literal["first", "shortest"]
"""When an epoch over several data sets ends: with the first data set, or with the shortest one."""
Parametrization: TypeAlias = Callable[[Weights], Weights]
"""A differentiable function that computes a network's weights from the tensors that are trained."""

StepCallback: TypeAlias = Callable[[Mapping[str, Tensor]], None]
"""Called in every step before the update, with the trained weights by name and their gradients in ``grad``."""


@dataclass(frozen=True)
class Training(Options):
    """Settings of SGD on a client.

    The optimizer starts afresh in every local training. The last batch of an epoch may be smaller; it is not dropped.
    """

    epochs: int = option(5, "passes over a client's data in each local training", low=1)
    batch_size: int = option(64, "examples in a batch", low=1)
    lr: float = option(0.01, "learning rate in the first round", low=0.0)
    lr_decay: float = option(1.0, "factor on the learning rate after every round", low=0.0, high=1.0)
    momentum: float = option(0.0, "momentum of SGD; starts at zero in every local training", low=0.0, high=1.0)
    weight_decay: float = option(0.0, "weight decay of SGD (an L2 penalty), on all parameters", low=0.0)
    max_grad_norm: float | None = option(None, "largest norm of the gradient; none: no clipping", low=1e-12)
    precision: Precision = option(
        "float32",
        "of the layers in a training step; bfloat16 is faster for convolutions, and less exact; weights stay float32",
    )

    def lr_at(self, round: int) -> float:
        """Return the learning rate of a round.

        Parameters
        ----------
        round : int
            The round, counted from 1.

        Returns
        -------
        float
            The learning rate after ``round - 1`` decays.
        """
        return self.lr * self.lr_decay ** (round - 1)
