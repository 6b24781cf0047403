"""Model inversion: images that a frozen classifier recognises with confidence, found by training a generator."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, pad

from fedkeep._utils import seeds
from fedkeep.data import Augmentation, Data, ImageFormat
from fedkeep.errors import ConfigError, RunError, nearest
from fedkeep.losses.features import bounding_loss
from fedkeep.models.custom import split_classifier

FORMATS = (
    "a .csv file with a line for each class, its name and then the numbers; or a .safetensors file with a vector "
    "under each class's name"
)


def read_anchors(path: str, names: Sequence[str]) -> Tensor:
    """Return the vectors of some classes, float32 [classes, width], in their order.

    ``path``: A file with a vector for each class, and perhaps for others: see `FORMATS`.
    """
    file = Path(path).expanduser()
    reader = _READERS.get(file.suffix)
    if reader is None:
        raise ConfigError(f"cannot read anchors from {path!r}: expected {FORMATS}.")
    try:
        found = reader(file)
    except Exception as error:  # each library has its own
        raise ConfigError(f"cannot read anchors from {path!r}: {error}. Expected {FORMATS}.") from error
    missing = [name for name in names if name not in found]
    if missing:
        others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"{path!r} has no anchor for class {missing[0]!r}{others}.{nearest(missing[0], found)} Name them as the "
            "data set does."
        )
    vectors = [found[name].flatten().float() for name in names]
    widths = sorted({len(vector) for vector in vectors})
    if len(widths) > 1:
        raise ConfigError(f"anchors must be of one length, and {path!r} has {widths[0]} and {widths[-1]} numbers.")
    anchors = torch.stack(vectors)
    if not bool(anchors.isfinite().all()):
        raise ConfigError(f"some numbers in {path!r} are not finite. Anchors must be.")
    return anchors


def _from_csv(file: Path) -> Mapping[str, Tensor]:
    with file.open(encoding="utf-8", newline="") as lines:
        return {row[0]: torch.tensor([float(number) for number in row[1:]]) for row in csv.reader(lines) if row}


_READERS: Mapping[str, Callable[[Path], Mapping[str, Tensor]]] = {".csv": _from_csv, ".safetensors": load_file}


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
                module.register_forward_pre_hook(partial(self._record_moments, len(self.running)))
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

    def _record_moments(self, number: int, norm: nn.Module, inputs: tuple[Tensor]) -> None:
        """Note a batch before it goes through a batch norm."""
        dims = [dim for dim in range(inputs[0].ndim) if dim != 1]
        self.batch[number] = torch.stack((inputs[0].mean(dims), inputs[0].var(dims, correction=0)))


IMAGES_PER_LAYER = 10  # images that share one noisy layer, as in LANDER's code


class LatentDecoder(nn.Sequential):
    """Images with pixels in 0..1 from latent vectors, as in the code of TARGET (Zhang et al., 2023).

    A linear layer gives feature maps of a quarter of the images' side. Two upsamplings, each before a convolution with
    batch norm, lead to the full size.

    ``maps``: Channels before the image; twice as many before that.
    ``shape``: Channels, height and width of an image, of any size.
    """

    def __init__(self, latent: int, maps: int, shape: tuple[int, int, int]) -> None:
        channels, height, width = shape
        quarter, half = ((ceil(height / n), ceil(width / n)) for n in (4, 2))
        super().__init__(
            nn.Linear(latent, 2 * maps * quarter[0] * quarter[1]),
            nn.Unflatten(1, (2 * maps, *quarter)),
            nn.BatchNorm2d(2 * maps),
            nn.Upsample(half),
            nn.Conv2d(2 * maps, 2 * maps, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * maps),
            nn.LeakyReLU(0.2),
            nn.Upsample((height, width)),
            nn.Conv2d(2 * maps, maps, 3, padding=1, bias=False),
            nn.BatchNorm2d(maps),
            nn.LeakyReLU(0.2),
            nn.Conv2d(maps, channels, 3, padding=1),
            nn.Sigmoid(),
        )


class TextDecoder(nn.Module):
    """Images of given classes from the anchors of their names, as in the code of LANDER (Tran et al., 2024).

    An anchor, normalised over the batch, passes through one of several linear layers and then through a
    `LatentDecoder`. These *noisy layers* are reinitialised for every batch of images: without them all images of a
    class would be equal.

    ``anchors``: [classes, width].
    ``batch_size``: The largest number of images at once.
    ``latent``: Length of a latent vector, see `LatentDecoder`.
    ``maps``: Channels before the image, see `LatentDecoder`.
    ``shape``: Channels, height and width of an image.
    """

    anchors: Tensor

    def __init__(self, anchors: Tensor, batch_size: int, latent: int, maps: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        layers, width = ceil(batch_size / IMAGES_PER_LAYER), anchors.shape[1]
        self.register_buffer("anchors", anchors)
        self.norm = nn.BatchNorm1d(width)
        self.weight = nn.Parameter(torch.zeros(layers, width, latent))
        self.bias = nn.Parameter(torch.zeros(layers, 1, latent))
        self.decoder = LatentDecoder(latent, maps, shape)

    @torch.no_grad()
    def reset_noisy_layers(self, rng: torch.Generator) -> None:
        """Draw the noisy layers' weights from N(0, 1), and set their biases to 0."""
        self.weight.copy_(torch.randn(self.weight.shape, generator=rng))
        self.bias.zero_()

    def forward(self, labels: Tensor) -> Tensor:
        """Return images of these classes, int64 [b]; neighbours in the batch share a noisy layer."""
        rows = self.norm(self.anchors[labels])
        layers, width, _ = self.weight.shape
        padding = (0, 0, 0, layers * IMAGES_PER_LAYER - len(rows))
        groups = pad(rows, padding).view(layers, IMAGES_PER_LAYER, width)
        latent = (groups @ self.weight + self.bias).flatten(0, 1)[: len(rows)]
        images: Tensor = self.decoder(latent)
        return images


# Of images that teacher and student see during the inversion.
AUGMENTATION = Augmentation(crop_padding=4, horizontal_flip=True)
BETAS = (0.5, 0.999)  # of Adam, for generators
LATENT_SIZE = 256  # of a generator's latent vector
W_LABELS = 0.5  # weight of the cross-entropy with random labels
MOMENTUM = 0.9  # weight of earlier batches in the statistics of batch norms
TAU = 20.0  # temperature of the student's distillation


@dataclass(frozen=True)
class InversionConfig:
    """How a model is inverted: names of TARGET's code (Zhang et al., 2023), and its values for CIFAR-100.

    ``num_images``: Generated images.
    ``synthesis_batch_size``: Images that are generated at a time.
    ``generator_steps``: Steps of the generator for each batch of images.
    ``warmup``: Batches that are discarded, before a student is trained and challenged.
    ``generator_channels``: Channels of the generator's last feature maps; twice as many before.
    ``generator_lr``: Learning rate of the generator (Adam).
    ``w_batch_norm``: Weight of the distance of batch-norm statistics; nothing without batch norm.
    ``w_adversarial``: Weight of the divergence of the student from the teacher.
    ``student_steps``: Steps of the student after each batch of images.
    ``student_batch_size``: Images in each of these.
    ``student_lr``: Learning rate of the student (SGD with momentum 0.9).
    """

    num_images: int = 8000
    synthesis_batch_size: int = 256
    generator_steps: int = 10
    warmup: int = 20
    generator_channels: int = 64
    generator_lr: float = 2e-3
    w_batch_norm: float = 10.0
    w_adversarial: float = 1.0
    student_steps: int = 400
    student_batch_size: int = 256
    student_lr: float = 0.2

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

        W_LABELS * CE(teacher, labels) + w_batch_norm * distance of batch-norm statistics
            - w_adversarial * KL(teacher || student),

    the last term over images that both classify alike, and only after the warm-up. Of the images on the way those of
    the lowest loss are kept, in 8 bits. Teacher and student see them cropped and flipped at random. The student is
    trained with the images so far. Subclasses say what a generator is, and what becomes of it from batch to batch.

    ``optimizer``: The generator's, for the present batch of images.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, config: InversionConfig, problem: InversionProblem) -> None:
        self.config = config
        self.problem = problem
        teacher = problem.teacher.eval().requires_grad_(False)
        self.device = next(teacher.parameters()).device
        self.statistics = BatchNormStatistics(teacher, MOMENTUM)
        parameters = problem.student.parameters()
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
        kept = slice(self.config.num_images)
        return {"input": torch.cat(images)[kept], "label": torch.cat(labels)[kept]}

    @abstractmethod
    def begin_batch(self) -> Tensor:
        """Prepare for a batch of images; return their labels, int64 [b]."""

    @abstractmethod
    def generate(self, labels: Tensor) -> Tensor:
        """Return the generator's present images, pixels in 0..1, with gradient."""

    def step(self, loss: Tensor) -> None:
        """Let the generator take a step."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def end_batch(self) -> None:  # noqa: B027 — not all inverters have anything to do
        """Finish a batch of images."""

    def normalise(self, images: Tensor) -> Tensor:
        """Return images, pixels in 0..1, normalised for the networks."""
        return self.problem.format.normalise(images)

    def teacher_loss(self, normalised: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the teacher's logits on normalised images, and a loss besides their cross-entropy."""
        return self.problem.teacher(normalised), 0.0

    def student_loss(self, normalised: Tensor) -> Tensor:
        """Return the student's loss on normalised images."""
        with torch.no_grad():
            teacher_logits = self.problem.teacher(normalised)
        divergence = kl_divergence(teacher_logits, self.problem.student(normalised), TAU)
        return TAU**2 * divergence.mean()

    def _generator_loss(self, normalised: Tensor, labels: Tensor, challenging: bool) -> Tensor:
        config = self.config
        logits, extra_loss = self.teacher_loss(normalised, labels)
        distance = self.statistics.distance()
        loss = W_LABELS * cross_entropy(logits, labels) + config.w_batch_norm * distance + extra_loss
        if challenging:
            loss = loss - config.w_adversarial * agreed_divergence(logits, self.problem.student(normalised))
        return loss

    def _generate_batch(self, challenging: bool) -> tuple[Tensor, Tensor]:
        """Return a batch of images, pixels in 0..1, and their labels."""
        labels = self.begin_batch().to(self.device)
        self.problem.student.eval()
        best, lowest = torch.empty(0), inf
        for _ in range(self.config.generator_steps):
            images = self.generate(labels)
            augmented = AUGMENTATION.move_pixels(images, self.problem.rng)
            loss = self._generator_loss(self.normalise(augmented), labels, challenging)
            if not bool(loss.isfinite()):
                raise RunError(
                    "the generator of images has diverged: its loss is not finite. Take fewer generator_steps or "
                    "student_steps, or a lower training.lr."
                )
            if loss.item() < lowest:
                best, lowest = images.detach(), loss.item()
            self.step(loss)
        self.statistics.update()
        self.end_batch()
        return best, labels

    def _train_student(self, images: Tensor) -> None:
        """Train the student on images, uint8, normalised as those of the data set."""
        self.problem.student.train()
        for _ in range(self.config.student_steps):
            rows = torch.randperm(len(images), generator=self.problem.rng)[: self.config.student_batch_size]
            self.student_optimizer.zero_grad()
            augmented = AUGMENTATION.move_pixels(images[rows.to(self.device)].float() / 255, self.problem.rng)
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


LATENT_LR = 0.01  # learning rate of the latent vectors


class LatentInverter(Inverter):
    """The inverter of TARGET (Zhang et al., 2023), after FastDFKD (Fang et al., 2022).

    For a batch, latent vectors from N(0, I) and a copy of the generator are trained together. Then the generator itself
    takes one step of Adam along the sum of the copy's gradients (first-order MAML).
    """

    def __init__(self, config: InversionConfig, problem: InversionProblem) -> None:
        super().__init__(config, problem)
        with seeds.temporary_seed(int(torch.randint(2**62, (), generator=self.problem.rng))):
            generator = LatentDecoder(LATENT_SIZE, config.generator_channels, problem.format.shape)
        self.generator = generator.to(self.device)
        self.meta_optimizer = torch.optim.Adam(
            self.generator.parameters(), config.generator_lr * config.generator_steps, betas=BETAS
        )

    def begin_batch(self) -> Tensor:
        size = self.config.synthesis_batch_size
        self.latent = torch.randn(size, LATENT_SIZE, generator=self.problem.rng).to(self.device).requires_grad_()
        self.meta_optimizer.zero_grad()
        self.copy = deepcopy(self.generator)
        groups: list[dict[str, Any]] = [{"params": self.copy.parameters()}, {"params": [self.latent], "lr": LATENT_LR}]
        self.optimizer = torch.optim.Adam(groups, self.config.generator_lr, betas=BETAS)
        return torch.randint(self.problem.num_classes, (size,), generator=self.problem.rng)

    def generate(self, labels: Tensor) -> Tensor:
        images: Tensor = self.copy(self.latent)
        return images

    def step(self, loss: Tensor) -> None:
        super().step(loss)
        # First-order MAML: the generator's gradient is the sum of its copy's over all steps.
        for own, copied in zip(self.generator.parameters(), self.copy.parameters(), strict=True):
            if copied.grad is not None:
                own.grad = copied.grad.clone() if own.grad is None else own.grad + copied.grad

    def end_batch(self) -> None:
        self.meta_optimizer.step()


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
        with seeds.temporary_seed(int(torch.randint(2**62, (), generator=self.problem.rng))):
            size, maps = config.synthesis_batch_size, config.generator_channels
            decoder = TextDecoder(self.anchors, size, LATENT_SIZE, maps, problem.format.shape)
        self.generator = decoder.to(self.device)
        channels = problem.format.shape[0]
        self.mean = torch.full((channels, 1, 1), 0.5, device=self.device, requires_grad=True)
        self.std = torch.full((channels, 1, 1), 0.2, device=self.device, requires_grad=True)

    def begin_batch(self) -> Tensor:
        self.generator.reset_noisy_layers(self.problem.rng)
        groups: list[dict[str, Any]] = [
            {"params": self.generator.parameters()},
            {"params": [self.mean, self.std], "lr": 0.01},
        ]
        self.optimizer = torch.optim.Adam(groups, self.config.generator_lr, betas=BETAS)
        size, num_classes = self.config.synthesis_batch_size, self.problem.num_classes
        rest = torch.randint(num_classes, (size % num_classes,), generator=self.problem.rng)
        return torch.cat((torch.arange(num_classes).repeat(size // num_classes), rest))

    def generate(self, labels: Tensor) -> Tensor:
        images: Tensor = self.generator(labels)
        return images

    def normalise(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std

    def teacher_loss(self, normalised: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | float]:
        features, logits = features_and_logits(self.problem.teacher, normalised)
        return logits, self.w_bounding * bounding_loss(features, self.anchors[labels], self.radius)

    def student_loss(self, normalised: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_features, teacher_logits = features_and_logits(self.problem.teacher, normalised)
        features, logits = features_and_logits(self.problem.student, normalised)
        divergence = kl_divergence(teacher_logits, logits, TAU).mean()
        return TAU**2 * divergence + self.w_bounding * mse_loss(features, teacher_features)


def features_and_logits(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return a network's features [b, width] and logits [b, classes]."""
    extractor, classifier = split_classifier(network)
    features = extractor(images)
    return features, classifier(features)
