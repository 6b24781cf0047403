"""Inversion as in LANDER: images are generated from embeddings of class names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fedkeep._utils import seeds
from fedkeep.generation.inversion.base import BETAS, InversionConfig, InversionProblem, Inverter, kl_divergence
from fedkeep.generation.inversion.decoders import TextDecoder
from fedkeep.losses.features import bounding_loss
from fedkeep.models.custom import split_classifier


class TextInverter(Inverter):
    """The inverter of LANDER (Tran et al., 2024), after NAYER (Tran et al., 2024).

    Labels are all classes in turn. The generator reads their anchors through layers that are reinitialised for each
    batch; it is not copied. The bounding loss binds the teacher's features to the anchors as in training, and images
    reach the teacher normalised by a mean and a standard deviation that are trained too. The student also learns the
    teacher's features.

    ``anchors``: [at least classes, width], as wide as the teacher's features.
    ``radius``: Distance from the anchor that costs nothing.
    """

    def __init__(
        self, config: InversionConfig, problem: InversionProblem, anchors: Tensor, w_bounding: float, radius: float
    ) -> None:
        super().__init__(config, problem)
        self.w_bounding, self.radius = w_bounding, radius
        self.anchors = anchors.to(self.device)
        with seeds.temporary_seed(int(torch.randint(2**62, (), generator=self.rng))):
            decoder = TextDecoder(
                self.anchors,
                config.synthesis_batch_size,
                config.latent_size,
                config.generator_channels,
                problem.format.shape,
            )
        self.generator = decoder.to(self.device)
        channels = problem.format.shape[0]
        self.mean = torch.full((channels, 1, 1), 0.5, device=self.device, requires_grad=True)
        self.std = torch.full((channels, 1, 1), 0.2, device=self.device, requires_grad=True)

    def begin_batch(self) -> Tensor:
        self.generator.reset_noisy_layers(self.rng)
        groups: list[dict[str, Any]] = [
            {"params": self.generator.parameters()},
            {"params": [self.mean, self.std], "lr": 0.01},
        ]
        self.optimizer = torch.optim.Adam(groups, self.config.generator_lr, betas=BETAS)
        size, num_classes = self.config.synthesis_batch_size, self.problem.num_classes
        rest = torch.randint(num_classes, (size % num_classes,), generator=self.rng)
        return torch.cat((torch.arange(num_classes).repeat(size // num_classes), rest))

    def generate(self, labels: Tensor) -> Tensor:
        images: Tensor = self.generator(labels)
        return images

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def normalise(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std

    def teacher_loss(self, normalised: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | float]:
        features, logits = features_and_logits(self.teacher, normalised)
        return logits, self.w_bounding * bounding_loss(features, self.anchors[labels], self.radius)

    def student_loss(self, normalised: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_features, teacher_logits = features_and_logits(self.teacher, normalised)
        features, logits = features_and_logits(self.student, normalised)
        divergence = kl_divergence(teacher_logits, logits, self.config.tau).mean()
        return self.config.tau**2 * divergence + self.w_bounding * mse_loss(features, teacher_features)


def features_and_logits(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return a network's features [b, width] and logits [b, classes]."""
    extractor, classifier = split_classifier(network)
    features = extractor(images)
    return features, classifier(features)
