"""How far a batch's statistics at batch norms are from those of the data that a network was trained on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class BatchNormStatistics:
    """The distance of a batch to a network's training data, measured at its batch norms.

    As in DeepInversion (Yin et al., 2020) with the norms of TARGET's code: the sum over batch norms of
    ||mean - running mean||_2 + ||variance - running variance||_2. For a network without batch norm the distance is 0.

    ``network``: The distance is about the last batch that it saw, in evaluation mode.
    ``momentum``: The weight of earlier batches in the statistics, see `update`.
    """

    def __init__(self, network: nn.Module, momentum: float) -> None:
        self.momentum = momentum
        self.running: list[Tensor] = []  # mean and variance of each batch norm, [2, channels]
        self.batch: dict[int, Tensor] = {}  # of the last batch
        self.earlier: dict[int, Tensor] = {}  # of the batches before it
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                assert module.running_var is not None
                module.register_forward_pre_hook(self._record_moments(len(self.running)))
                self.running.append(torch.stack((module.running_mean, module.running_var)))

    def distance(self) -> Tensor | float:
        """Return the distance, with gradient."""
        distances = [(self._moments(number) - running).norm(dim=1).sum() for number, running in enumerate(self.running)]
        return torch.stack(distances).sum() if distances else 0.0

    def update(self) -> None:
        """Include the last batch in the earlier ones."""
        self.earlier = {number: self._moments(number).detach() for number in self.batch}

    def _moments(self, number: int) -> Tensor:
        moments = self.batch[number]
        return torch.lerp(moments, self.earlier[number], self.momentum) if number in self.earlier else moments

    def _record_moments(self, number: int) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(norm: nn.Module, inputs: tuple[Tensor]) -> None:
            dims = [dim for dim in range(inputs[0].ndim) if dim != 1]
            self.batch[number] = torch.stack((inputs[0].mean(dims), inputs[0].var(dims, correction=0)))

        return hook
