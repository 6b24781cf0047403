"""Data-free inversion: images of which a frozen network is sure, found through a generator, batch by batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil, inf

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from fedkeep.data import Augmentation, Data, ImageFormat
from fedkeep.errors import RunError
from fedkeep.options import Options, option
from fedkeep.synthesis.inversion.statistics import Statistics

AUGMENTATION = Augmentation(crop=4, flip=True)  # of what teacher and student see while images are made
BETAS = (0.5, 0.999)  # of Adam, for generators


@dataclass(frozen=True)
class Inversion(Options):
    """How a model is inverted: options in the names of TARGET's code (Zhang et al., 2023), with its values for
    CIFAR-100."""

    nums: int = option(8000, "synthetic images", low=2)
    synthesis_batch_size: int = option(256, "images that are made at a time", low=2)
    g_steps: int = option(10, "steps of the generator for each batch of images", low=1)
    warmup: int = option(20, "batches made, and thrown away, before a student is taught and challenged", low=0)
    nz: int = option(256, "length of the generator's latent vector", low=1)
    ngf: int = option(64, "channels of the generator's last maps; twice as many before", low=1)
    lr_g: float = option(2e-3, "learning rate of the generator (Adam)", low=0.0)
    oh: float = option(0.5, "weight of the cross-entropy with random labels", low=0.0)
    bn: float = option(10.0, "weight of the distance of batch-norm statistics; nothing without batch norm", low=0.0)
    bn_mmt: float = option(0.9, "how much earlier batches count in these statistics", low=0.0, high=1.0)
    adv: float = option(1.0, "weight of what the student has not learned yet", low=0.0)
    kd_steps: int = option(400, "steps of the student after each batch of images", low=0)
    sample_batch_size: int = option(256, "images in each of these", low=2)
    lr_s: float = option(0.2, "learning rate of the student (SGD with momentum 0.9); has no name there", low=0.0)
    T: float = option(20.0, "temperature at which the student is taught", low=1e-3)

    @property
    def batches(self) -> int:
        """How many batches give ``nums`` images after the warm-up, and the warm-up's."""
        return self.warmup + ceil(self.nums / self.synthesis_batch_size)


@dataclass(frozen=True, eq=False)
class Problem:
    """What is inverted.

    Attributes
    ----------
    teacher : a network with answers for ``classes`` classes; it is frozen and asked in evaluation mode.
    student : another network with such answers, which is trained in place.
    classes : how many there are. format : what images are like.
    rng : on the CPU; all randomness comes from it.
    """

    teacher: nn.Module
    student: nn.Module
    classes: int
    format: ImageFormat
    rng: torch.Generator


class Inverter(ABC):
    """Makes images that a teacher takes for given classes and a student, which is taught with them, does not know yet.

    For every batch of images a generator takes ``g_steps`` steps down

        oh * CE(teacher, labels) + bn * distance of batch-norm statistics - adv * KL(teacher || student),

    the last term over images that both take for the same class, and only after the warm-up. Of the images on the way
    those of the lowest loss are kept, in 8 bits. Teacher and student see them cropped and flipped at random. How a
    generator is made, and what becomes of it from batch to batch, is a subclass's matter.
    """

    def __init__(self, options: Inversion, problem: Problem) -> None:
        self.options = options
        self.problem = problem
        self.rng = problem.rng
        self.teacher = problem.teacher.eval().requires_grad_(False)
        self.student = problem.student
        self.device = next(self.teacher.parameters()).device
        self.statistics = Statistics(self.teacher, options.bn_mmt)
        parameters = self.student.parameters()
        self.learning = torch.optim.SGD(parameters, options.lr_s, momentum=0.9, weight_decay=1e-4)

    def make(self, batches: int, spared: int) -> Data:
        """Return up to ``nums`` images, uint8 [n, channels, height, width], and the labels that they were made for.

        Parameters
        ----------
        batches : how many are made. spared : how many of the first are thrown away; fewer, and not behind the warm-up.
        """
        images, labels = list[Tensor](), list[Tensor]()
        for number in range(batches):
            made, meant = self._batch(challenging=number >= self.options.warmup)
            if number >= spared:
                images.append((255 * made).round().to(torch.uint8))
                labels.append(meant)
            if self.options.warmup <= number < batches - 1:
                self._teach(torch.cat(images))
        return {"image": torch.cat(images)[: self.options.nums], "label": torch.cat(labels)[: self.options.nums]}

    @abstractmethod
    def begin(self) -> Tensor:
        """Prepare for a batch of images; return the labels that they shall have, int64 [b]."""

    @abstractmethod
    def generate(self, labels: Tensor) -> Tensor:
        """Return images with pixels in 0..1 as the generator makes them now, with gradient."""

    @abstractmethod
    def step(self, loss: Tensor) -> None:
        """Let the generator take a step down."""

    def end(self) -> None:  # noqa: B027 — not all have anything to do
        """Finish a batch of images."""

    def normalise(self, images: Tensor) -> Tensor:
        """Return images, pixels in 0..1, as networks see them while they are being made."""
        return self.problem.format.normalise(images)

    def ask(self, seen: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the teacher's logits on normalised images, and what else it costs if these are of such classes."""
        return self.teacher(seen), 0.0

    def lesson(self, seen: Tensor) -> Tensor:
        """Return the student's loss on normalised images."""
        with torch.no_grad():
            said = self.teacher(seen)
        return self.options.T**2 * divergence(said, self.student(seen), self.options.T).mean()

    def _loss(self, seen: Tensor, labels: Tensor, challenging: bool) -> Tensor:
        options = self.options
        said, more = self.ask(seen, labels)
        loss = options.oh * cross_entropy(said, labels) + options.bn * self.statistics.distance() + more
        return loss - options.adv * unlearned(said, self.student(seen)) if challenging else loss

    def _batch(self, challenging: bool) -> tuple[Tensor, Tensor]:
        """Return a batch of images, pixels in 0..1, and their labels."""
        labels = self.begin().to(self.device)
        self.student.eval()
        best, lowest = torch.empty(0), inf
        for _ in range(self.options.g_steps):
            images = self.generate(labels)
            loss = self._loss(self.normalise(AUGMENTATION.move_pixels(images, self.rng)), labels, challenging)
            if not bool(loss.isfinite()):
                raise RunError(
                    "the generator of synthetic images has diverged: its loss is not finite. Lower lr_g, or lr_s, the "
                    "student's learning rate."
                )
            if loss.item() < lowest:
                best, lowest = images.detach(), loss.item()
            self.step(loss)
        self.statistics.keep()
        self.end()
        return best, labels

    def _teach(self, images: Tensor) -> None:
        """Train the student on images, uint8, normalised as those of the data set."""
        self.student.train()
        for _ in range(self.options.kd_steps):
            rows = torch.randperm(len(images), generator=self.rng)[: self.options.sample_batch_size].to(self.device)
            self.learning.zero_grad()
            moved = AUGMENTATION.move_pixels(images[rows].float() / 255, self.rng)
            self.lesson(self.problem.format.normalise(moved)).backward()  # type: ignore[no-untyped-call]
            self.learning.step()


def divergence(teacher: Tensor, student: Tensor, tau: float = 1.0) -> Tensor:
    """Return KL(teacher || student) of each image, [b], from logits [b, classes] at temperature tau."""
    told, own = log_softmax(teacher / tau, -1), log_softmax(student / tau, -1)
    return kl_div(own, told, reduction="none", log_target=True).sum(-1)


def unlearned(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the mean of KL(teacher || student) over all images, 0 where they disagree about the class."""
    return (divergence(teacher, student) * (teacher.argmax(-1) == student.argmax(-1))).mean()
