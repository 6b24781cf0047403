"""Inversion as in TARGET: every batch of images has latent vectors of its own and a copy of the generator, from which
the generator learns to begin better."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from fedkeep._utils import seeds
from fedkeep.synthesis.inversion.decoders import Decoder
from fedkeep.synthesis.inversion.inverter import BETAS, Inversion, Inverter, Problem

REPTILE = 67.0  # in the code of TARGET, times the way that the copy went


class LatentInverter(Inverter):
    """The inverter of TARGET (Zhang et al., 2023), after FastDFKD (Fang et al., 2022).

    For a batch, latent vectors from N(0, I) and a copy of the generator are fitted together. Then the generator itself
    takes one step of Adam: down the sum of the copy's gradients (first-order MAML, ``is_maml``), or towards the copy
    (Reptile).

    Parameters
    ----------
    lr_z : learning rate of the latent vectors.
    is_maml : which meta update.
    """

    def __init__(self, options: Inversion, problem: Problem, lr_z: float, is_maml: bool) -> None:
        super().__init__(options, problem)
        self.lr_z, self.is_maml = lr_z, is_maml
        with seeds.temporary_seed(int(torch.randint(2**62, (), generator=self.rng))):
            generator = Decoder(options.nz, options.ngf, problem.format.shape)
        self.generator = generator.to(self.device)
        self.meta = torch.optim.Adam(self.generator.parameters(), options.lr_g * options.g_steps, betas=BETAS)

    def begin(self) -> Tensor:
        size = self.options.synthesis_batch_size
        self.latent = torch.randn(size, self.options.nz, generator=self.rng).to(self.device).requires_grad_()
        self.meta.zero_grad()
        self.copy = deepcopy(self.generator)
        groups: list[dict[str, Any]] = [{"params": self.copy.parameters()}, {"params": [self.latent], "lr": self.lr_z}]
        self.optimiser = torch.optim.Adam(groups, self.options.lr_g, betas=BETAS)
        return torch.randint(self.problem.classes, (size,), generator=self.rng)

    def generate(self, labels: Tensor) -> Tensor:
        images: Tensor = self.copy(self.latent)
        return images

    def step(self, loss: Tensor) -> None:
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.is_maml:
            self._learn(1.0, [copied.grad for copied in self.copy.parameters()])
        self.optimiser.step()

    def end(self) -> None:
        if not self.is_maml:
            pairs = zip(self.generator.parameters(), self.copy.parameters(), strict=True)
            self._learn(REPTILE, [(own - copied).detach() for own, copied in pairs])
        self.meta.step()

    def _learn(self, factor: float, gradients: list[Tensor | None]) -> None:
        """Add to the generator's gradients."""
        for own, gradient in zip(self.generator.parameters(), gradients, strict=True):
            if gradient is not None:
                own.grad = factor * gradient if own.grad is None else own.grad + factor * gradient
