"""How a client trains: the settings of local SGD."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from fedkeep.models import Weights
from fedkeep.options import Options, option

Precision = Literal["float32", "bfloat16"]
EpochEndsWith = Literal["first", "shortest"]
"""With which data set a pass over several ends: the first, or the shortest."""
Parametrization: TypeAlias = Callable[[Weights], Weights]
"""Computes a network's weights from the tensors that are trained, by operations that PyTorch can differentiate."""

StepCallback: TypeAlias = Callable[[Mapping[str, Tensor]], None]
"""Looks before every step of a training at the weights that are trained, by name, with their gradients in ``grad``."""


@dataclass(frozen=True)
class Training(Options):
    """Local stochastic gradient descent, with a fresh optimiser at every visit; the last short batch is kept."""

    epochs: int = option(5, "passes over a client's data at each visit", low=1)
    batch_size: int = option(64, "examples a step", low=1)
    lr: float = option(0.01, "learning rate in round one", low=0.0)
    lr_decay: float = option(1.0, "factor on the learning rate after every round", low=0.0, high=1.0)
    momentum: float = option(0.0, "SGD momentum; starts at zero at every visit", low=0.0, high=1.0)
    weight_decay: float = option(0.0, "L2 penalty of SGD, on all parameters", low=0.0)
    clip: float | None = option(None, "largest gradient norm; none: no clipping", low=1e-12)
    precision: Precision = option(
        "float32",
        "of the layers in a training step; bfloat16 is quicker for convolutions, and coarser; weights stay float32",
    )

    def lr_at(self, round: int) -> float:
        """Return the learning rate of a round, counted from 1."""
        return self.lr * self.lr_decay ** (round - 1)
