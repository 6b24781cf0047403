"""Inversion as in TARGET: latent vectors and a copy of the generator are trained anew for every batch of images."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from fedkeep._utils import seeds
from fedkeep.generation.inversion.base import BETAS, InversionConfig, InversionProblem, Inverter
from fedkeep.generation.inversion.decoders import LatentDecoder

LATENT_LR = 0.01  # learning rate of the latent vectors


class LatentInverter(Inverter):
    """The inverter of TARGET (Zhang et al., 2023), after FastDFKD (Fang et al., 2022).

    For a batch, latent vectors from N(0, I) and a copy of the generator are trained together. Then the generator itself
    takes one step of Adam along the sum of the copy's gradients (first-order MAML).
    """

    def __init__(self, config: InversionConfig, problem: InversionProblem) -> None:
        super().__init__(config, problem)
        with seeds.temporary_seed(int(torch.randint(2**62, (), generator=self.rng))):
            generator = LatentDecoder(config.latent_size, config.generator_channels, problem.format.shape)
        self.generator = generator.to(self.device)
        self.meta_optimizer = torch.optim.Adam(
            self.generator.parameters(), config.generator_lr * config.generator_steps, betas=BETAS
        )

    def begin_batch(self) -> Tensor:
        size = self.config.synthesis_batch_size
        self.latent = torch.randn(size, self.config.latent_size, generator=self.rng).to(self.device).requires_grad_()
        self.meta_optimizer.zero_grad()
        self.copy = deepcopy(self.generator)
        groups: list[dict[str, Any]] = [{"params": self.copy.parameters()}, {"params": [self.latent], "lr": LATENT_LR}]
        self.optimizer = torch.optim.Adam(groups, self.config.generator_lr, betas=BETAS)
        return torch.randint(self.problem.num_classes, (size,), generator=self.rng)

    def generate(self, labels: Tensor) -> Tensor:
        images: Tensor = self.copy(self.latent)
        return images

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        # First-order MAML: the generator's gradient is the sum of its copy's over all steps.
        for own, copied in zip(self.generator.parameters(), self.copy.parameters(), strict=True):
            if copied.grad is not None:
                own.grad = copied.grad.clone() if own.grad is None else own.grad + copied.grad
        self.optimizer.step()

    def end_batch(self) -> None:
        self.meta_optimizer.step()
