"""Batch norm as a memory of the data: how unlike them made images are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Statistics:
    """How far a batch is, at a network's batch norms, from the data that the network was trained on.

    As in DeepInversion (Yin et al., 2020) with the norms of TARGET's code: the sum over batch norms of
    ||mean - running mean||_2 + ||variance - running variance||_2. A network without batch norm has no such memory, and
    the distance is 0.

    Parameters
    ----------
    network : the distance is about the last batch that it saw, in evaluation mode.
    momentum : how much the batches before count besides it, see `keep`.
    """

    def __init__(self, network: nn.Module, momentum: float) -> None:
        self.momentum = momentum
        self.remembered: list[Tensor] = []  # mean and variance of each batch norm, [2, channels]
        self.seen: dict[int, Tensor] = {}  # of the last batch
        self.kept: dict[int, Tensor] = {}  # of those before
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                assert module.running_var is not None
                module.register_forward_pre_hook(self._noting(len(self.remembered)))
                self.remembered.append(torch.stack((module.running_mean, module.running_var)))

    def distance(self) -> Tensor | float:
        """Return the distance, with gradient."""
        distances = [
            (self._moments(number) - running).norm(dim=1).sum() for number, running in enumerate(self.remembered)
        ]
        return torch.stack(distances).sum() if distances else 0.0

    def keep(self) -> None:
        """Let the last batch count among those before."""
        self.kept = {number: self._moments(number).detach() for number in self.seen}

    def _moments(self, number: int) -> Tensor:
        moments = self.seen[number]
        return torch.lerp(moments, self.kept[number], self.momentum) if number in self.kept else moments

    def _noting(self, number: int) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def note(norm: nn.Module, given: tuple[Tensor]) -> None:
            over = [dimension for dimension in range(given[0].ndim) if dimension != 1]
            self.seen[number] = torch.stack((given[0].mean(over), given[0].var(over, correction=0)))

        return note
