"""How much each parameter mattered to a training, from the way that it took."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedkeep.losses.penalties import Quadratic
from fedkeep.models import Weights


class PathIntegral:
    """Watches a training and sums up how much each parameter's way lowered the loss: synaptic intelligence.

    -sum_t g_t (w_{t+1} - w_t) over the steps t (Zenke et al., 2017, "Continual learning through synaptic intelligence",
    eq. 3), with g the gradient of the loss without its ``penalty``.

    Parameters
    ----------
    start : the parameters before the first step.
    penalty : what is minimised beside the loss; None for nothing.
    """

    def __init__(self, start: Weights, penalty: Quadratic | None = None) -> None:
        self.penalty = penalty
        self.start = self.at = dict(start)
        self.slope = {name: torch.zeros_like(weight) for name, weight in start.items()}
        self.gain = dict(self.slope)

    @torch.no_grad()
    def __call__(self, weights: Mapping[str, Tensor]) -> None:
        """Take in the step that led here, and note the gradient of the next one."""
        self._arrive({name: weight.detach().clone() for name, weight in weights.items()})
        held = self.penalty.gradient(weights) if self.penalty else {}
        for name, weight in weights.items():
            slope = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self.slope[name] = slope - held[name] if name in held else slope.clone()

    def importance(self, end: Weights, damping: float) -> dict[str, Tensor]:
        """Return gain / ((end - start)^2 + damping) of each parameter, not below zero (eq. 5)."""
        self._arrive({name: end[name] for name in self.start})
        ways = {name: (self.at[name] - self.start[name]).square() + damping for name in self.start}
        return {name: (gain / ways[name]).clamp(min=0) for name, gain in self.gain.items()}

    def _arrive(self, now: dict[str, Tensor]) -> None:
        self.gain = {name: gain - self.slope[name] * (now[name] - self.at[name]) for name, gain in self.gain.items()}
        self.at = now
