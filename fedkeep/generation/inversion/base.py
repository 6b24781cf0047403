"""Data-free inversion: images that a frozen network classifies with confidence, found by training a generator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil, inf

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from fedkeep.data import Augmentation, Data, ImageFormat
from fedkeep.errors import RunError
from fedkeep.generation.inversion.batch_norm_statistics import BatchNormStatistics

AUGMENTATION = Augmentation(
    crop_padding=4, horizontal_flip=True
)  # of images that teacher and student see during the inversion
BETAS = (0.5, 0.999)  # of Adam, for generators


@dataclass(frozen=True)
class InversionConfig:
    """How a model is inverted: names of TARGET's code (Zhang et al., 2023), and its values for CIFAR-100.

    ``num_images``: Generated images.
    ``synthesis_batch_size``: Images that are generated at a time.
    ``generator_steps``: Steps of the generator for each batch of images.
    ``warmup``: Batches that are discarded, before a student is trained and challenged.
    ``latent_size``: Length of the generator's latent vector.
    ``generator_channels``: Channels of the generator's last feature maps; twice as many before.
    ``generator_lr``: Learning rate of the generator (Adam).
    ``w_labels``: Weight of the cross-entropy with random labels.
    ``w_batch_norm``: Weight of the distance of batch-norm statistics; nothing without batch norm.
    ``batch_norm_momentum``: Weight of earlier batches in these statistics.
    ``w_adversarial``: Weight of the divergence of the student from the teacher.
    ``student_steps``: Steps of the student after each batch of images.
    ``student_batch_size``: Images in each of these.
    ``student_lr``: Learning rate of the student (SGD with momentum 0.9).
    ``tau``: Temperature of the student's distillation.
    """

    num_images: int = 8000
    synthesis_batch_size: int = 256
    generator_steps: int = 10
    warmup: int = 20
    latent_size: int = 256
    generator_channels: int = 64
    generator_lr: float = 2e-3
    w_labels: float = 0.5
    w_batch_norm: float = 10.0
    batch_norm_momentum: float = 0.9
    w_adversarial: float = 1.0
    student_steps: int = 400
    student_batch_size: int = 256
    student_lr: float = 0.2
    tau: float = 20.0

    @property
    def num_batches(self) -> int:
        """Number of batches that give ``num_images`` images after the warm-up, with those of the warm-up."""
        return self.warmup + ceil(self.num_images / self.synthesis_batch_size)


@dataclass(frozen=True, eq=False)
class InversionProblem:
    """What is inverted.

    ``teacher``: A network for ``num_classes`` classes; it is frozen, in evaluation mode.
    ``student``: Another network for these classes, which is trained in place.
    ``num_classes``: Number of classes.
    ``format``: The shape and the normalisation of images.
    ``rng``: The source of all randomness, on the CPU.
    """

    teacher: nn.Module
    student: nn.Module
    num_classes: int
    format: ImageFormat
    rng: torch.Generator


class Inverter(ABC):
    """Generates images that a teacher classifies as given classes and that a student does not know yet.

    For every batch of images a generator takes ``generator_steps`` steps to minimise

        w_labels * CE(teacher, labels) + w_batch_norm * distance of batch-norm statistics
            - w_adversarial * KL(teacher || student),

    the last term over images that both classify alike, and only after the warm-up. Of the images on the way those of
    the lowest loss are kept, in 8 bits. Teacher and student see them cropped and flipped at random. The student is
    trained with the images so far. Subclasses say what a generator is, and what becomes of it from batch to batch.
    """

    def __init__(self, config: InversionConfig, problem: InversionProblem) -> None:
        self.config = config
        self.problem = problem
        self.rng = problem.rng
        self.teacher = problem.teacher.eval().requires_grad_(False)
        self.student = problem.student
        self.device = next(self.teacher.parameters()).device
        self.statistics = BatchNormStatistics(self.teacher, config.batch_norm_momentum)
        parameters = self.student.parameters()
        self.student_optimizer = torch.optim.SGD(parameters, config.student_lr, momentum=0.9, weight_decay=1e-4)

    def synthesize(self, num_batches: int, num_discarded: int) -> Data:
        """Return up to ``num_images`` images, uint8 [n, channels, height, width], and their labels.

        ``num_discarded``: How many of the first are discarded; fewer than ``num_batches``, and at most the warm-up.
        """
        images, labels = list[Tensor](), list[Tensor]()
        for number in range(num_batches):
            batch, batch_labels = self._generate_batch(challenging=number >= self.config.warmup)
            if number >= num_discarded:
                images.append((255 * batch).round().to(torch.uint8))
                labels.append(batch_labels)
            if self.config.warmup <= number < num_batches - 1:
                self._train_student(torch.cat(images))
        return {
            "input": torch.cat(images)[: self.config.num_images],
            "label": torch.cat(labels)[: self.config.num_images],
        }

    @abstractmethod
    def begin_batch(self) -> Tensor:
        """Prepare for a batch of images; return their labels, int64 [b]."""

    @abstractmethod
    def generate(self, labels: Tensor) -> Tensor:
        """Return the generator's present images, pixels in 0..1, with gradient."""

    @abstractmethod
    def step(self, loss: Tensor) -> None:
        """Let the generator take a step."""

    def end_batch(self) -> None:  # noqa: B027 — not all inverters have anything to do
        """Finish a batch of images."""

    def normalise(self, images: Tensor) -> Tensor:
        """Return images, pixels in 0..1, normalised for the networks."""
        return self.problem.format.normalise(images)

    def teacher_loss(self, normalised: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the teacher's logits on normalised images, and a loss besides their cross-entropy."""
        return self.teacher(normalised), 0.0

    def student_loss(self, normalised: Tensor) -> Tensor:
        """Return the student's loss on normalised images."""
        with torch.no_grad():
            teacher_logits = self.teacher(normalised)
        divergence = kl_divergence(teacher_logits, self.student(normalised), self.config.tau)
        return self.config.tau**2 * divergence.mean()

    def _generator_loss(self, normalised: Tensor, labels: Tensor, challenging: bool) -> Tensor:
        config = self.config
        logits, extra_loss = self.teacher_loss(normalised, labels)
        distance = self.statistics.distance()
        loss = config.w_labels * cross_entropy(logits, labels) + config.w_batch_norm * distance + extra_loss
        return (
            loss - config.w_adversarial * agreed_divergence(logits, self.student(normalised)) if challenging else loss
        )

    def _generate_batch(self, challenging: bool) -> tuple[Tensor, Tensor]:
        """Return a batch of images, pixels in 0..1, and their labels."""
        labels = self.begin_batch().to(self.device)
        self.student.eval()
        best, lowest = torch.empty(0), inf
        for _ in range(self.config.generator_steps):
            images = self.generate(labels)
            augmented = AUGMENTATION.move_pixels(images, self.rng)
            loss = self._generator_loss(self.normalise(augmented), labels, challenging)
            if not bool(loss.isfinite()):
                raise RunError(
                    "the generator of generated images has diverged: its loss is not finite. Lower generator_lr, "
                    "or student_lr, the "
                    "student's learning rate."
                )
            if loss.item() < lowest:
                best, lowest = images.detach(), loss.item()
            self.step(loss)
        self.statistics.update()
        self.end_batch()
        return best, labels

    def _train_student(self, images: Tensor) -> None:
        """Train the student on images, uint8, normalised as those of the data set."""
        self.student.train()
        for _ in range(self.config.student_steps):
            rows = torch.randperm(len(images), generator=self.rng)[: self.config.student_batch_size].to(self.device)
            self.student_optimizer.zero_grad()
            augmented = AUGMENTATION.move_pixels(images[rows].float() / 255, self.rng)
            loss = self.student_loss(self.problem.format.normalise(augmented))
            loss.backward()  # type: ignore[no-untyped-call]
            self.student_optimizer.step()


def kl_divergence(teacher: Tensor, student: Tensor, tau: float = 1.0) -> Tensor:
    """Return KL(teacher || student) of each image, [b], from logits [b, classes] at temperature tau."""
    teacher_log_probs, student_log_probs = log_softmax(teacher / tau, -1), log_softmax(student / tau, -1)
    return kl_div(student_log_probs, teacher_log_probs, reduction="none", log_target=True).sum(-1)


def agreed_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the mean of KL(teacher || student) over all images, 0 for those that they classify differently."""
    return (kl_divergence(teacher, student) * (teacher.argmax(-1) == student.argmax(-1))).mean()
