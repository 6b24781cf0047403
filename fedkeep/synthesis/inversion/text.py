"""Inversion as in LANDER: images grow out of what their classes are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fedkeep._utils import seeds
from fedkeep.losses.features import bounding_loss
from fedkeep.models.custom import split_classifier
from fedkeep.synthesis.inversion.decoders import TextDecoder
from fedkeep.synthesis.inversion.inverter import BETAS, Inversion, Inverter, Problem, divergence


class TextInverter(Inverter):
    """The inverter of LANDER (Tran et al., 2024), after NAYER (Tran et al., 2024).

    Labels are all classes in turn. The generator reads their anchors, through layers drawn anew for each batch; it is
    not copied. The teacher's features are bound to the anchors as in training, and images reach it through a mean and a
    standard deviation that are learned too. The student also learns the teacher's features.

    Parameters
    ----------
    anchors : [at least classes, width], as wide as the teacher's features.
    ltc, r : weight of the bounding loss, and the distance that costs nothing.
    """

    def __init__(self, options: Inversion, problem: Problem, anchors: Tensor, ltc: float, r: float) -> None:
        super().__init__(options, problem)
        self.ltc, self.r = ltc, r
        self.anchors = anchors.to(self.device)
        with seeds.temporary_seed(int(torch.randint(2**62, (), generator=self.rng))):
            decoder = TextDecoder(
                self.anchors, options.synthesis_batch_size, options.nz, options.ngf, problem.format.shape
            )
        self.generator = decoder.to(self.device)
        channels = problem.format.shape[0]
        self.mean = torch.full((channels, 1, 1), 0.5, device=self.device, requires_grad=True)
        self.std = torch.full((channels, 1, 1), 0.2, device=self.device, requires_grad=True)

    def begin(self) -> Tensor:
        self.generator.renew(self.rng)
        groups: list[dict[str, Any]] = [
            {"params": self.generator.parameters()},
            {"params": [self.mean, self.std], "lr": 0.01},
        ]
        self.optimiser = torch.optim.Adam(groups, self.options.lr_g, betas=BETAS)
        size, classes = self.options.synthesis_batch_size, self.problem.classes
        left = torch.randint(classes, (size % classes,), generator=self.rng)
        return torch.cat((torch.arange(classes).repeat(size // classes), left))

    def generate(self, labels: Tensor) -> Tensor:
        images: Tensor = self.generator(labels)
        return images

    def step(self, loss: Tensor) -> None:
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()

    def normalise(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std

    def ask(self, seen: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | float]:
        features, said = read(self.teacher, seen)
        return said, self.ltc * bounding_loss(features, self.anchors[labels], self.r)

    def lesson(self, seen: Tensor) -> Tensor:
        with torch.no_grad():
            known, said = read(self.teacher, seen)
        own, answer = read(self.student, seen)
        return self.options.T**2 * divergence(said, answer, self.options.T).mean() + self.ltc * mse_loss(own, known)


def read(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return a network's features [b, width], and its logits [b, classes]."""
    features, classifier = split_classifier(network)
    found = features(images)
    return found, classifier(found)
