"""What the clients and the server share on one device: a network, the settings, and a timer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fedkeep._utils.noise_stream import KEY_BYTES, NoiseStream, derive_key
from fedkeep.data import Augmentation, ImageFormat
from fedkeep.errors import ConfigError
from fedkeep.generation.generator import Generator
from fedkeep.interface import Training
from fedkeep.interface.privacy import Privacy
from fedkeep.training.model_runner import ModelRunner

LoadGenerator = Callable[[], Generator]


def no_generator() -> Generator:
    """Raise the error for a recipe without an image generator; the default for `ClientContext.load_generator`."""
    raise ConfigError("this run has no generator of images. Name it in the recipe: generator.name.")


@dataclass
class Timer:
    """Seconds spent in a round.

    ``train``: Seconds of local training, and of Fisher information.
    ``teachers``: Seconds of inference with frozen models.
    ``by_example``: Whether Fisher information was ever computed by example, which takes memory.
    """

    train: float = 0.0
    teachers: float = 0.0
    by_example: bool = False

    @property
    def total(self) -> float:
        """Seconds of both."""
        return self.train + self.teachers

    def add(self, train: float, teachers: float) -> None:
        """Add seconds that were measured elsewhere, such as in a worker process.

        ``teachers``: Seconds of inference with frozen models.
        """
        self.train += train
        self.teachers += teachers

    def reset(self) -> None:
        """Set both to zero, for everyone who shares the timer."""
        self.train = self.teachers = 0.0


@dataclass
class ClientContext:
    """What all clients with the same architecture share on one device.

    ``runner``: The network.
    ``normalise``: Maps inputs as they are stored, such as uint8 images, to the network's input.
    ``augmentation``: Random changes of training images.
    ``training``: Settings of local training.
    ``seed``: The run's seed.
    ``seen``: Number of classes seen with each task so far, in all.
    ``image_format``: Shape and normalisation of images; None if the inputs are no images.
    ``label_names``: Names of all classes, in order of arrival.
    ``load_generator``: Returns the image generator.
    ``num_rounds``: Number of rounds of each task.
    ``timer``: Shared by all contexts of a simulation.
    ``privacy``: What of a client is noised before it leaves.
    ``noise_secret``: What a real site, or a real server, keeps to itself, so that its noise is its own; None: noise
        comes from the run's seed, which everybody knows.
    """

    runner: ModelRunner
    normalise: Callable[[Tensor], Tensor]
    augmentation: Augmentation
    training: Training
    seed: int
    seen: Sequence[int]
    image_format: ImageFormat | None
    label_names: tuple[str, ...]
    load_generator: LoadGenerator
    num_rounds: int
    timer: Timer = field(default_factory=Timer)
    privacy: Privacy = field(default_factory=Privacy)
    noise_secret: bytes | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes seen so far."""
        return self.seen[-1]

    @property
    def num_old_classes(self) -> int:
        """Number of classes that arrived before the current task."""
        return self.seen[-2] if len(self.seen) > 1 else 0

    def fresh_noise(self, purpose: str, *, task: int, round: int, client: str, use: int) -> NoiseStream:
        """Return noise for what is told once.

        A real site draws its key anew, since the same noise on two things would tell their difference: other models,
        options or runs. Its reply is stored, so that a request that is repeated gets the same one.

        ``task``, ``round``, ``client``, ``use``: Where in a simulation it is used, as for
            `fedkeep._utils.seeds.derive`.
        """
        if self.noise_secret is not None:
            return NoiseStream(secrets.token_bytes(KEY_BYTES))
        return NoiseStream(derive_key(str(self.seed).encode(), purpose, task, round, client, use))

    def repeated_noise(self, purpose: str, *told: object) -> NoiseStream:
        """Return noise for what is told again and again: the same for the same, and other noise for all else.

        New noise each time could be averaged away, and the same noise on two things would tell their difference.

        ``*told``: All that determines what is told: the exact value, whose it is, and how much noise it gets.
        """
        secret = str(self.seed).encode() if self.noise_secret is None else self.noise_secret
        return NoiseStream(derive_key(secret, purpose, *told))

    def with_runner(self, runner: ModelRunner) -> ClientContext:
        """Return a context for another network, with the same timer.

        If the network has a frozen extractor, the extractor replaces the normalisation: its features are computed once
        for each image, and there is no augmentation.
        """
        if runner.extractor is None:
            return replace(self, runner=runner)
        return replace(self, runner=runner, normalise=runner.extractor, augmentation=Augmentation())

    def set_task(self, seen: Sequence[int]) -> None:
        """Go to a task.

        ``seen``: Number of classes seen with each task so far, in all; the last is the task to go to.
        """
        self.seen = seen
        self.runner.set_task(seen)

    def training_time(self) -> AbstractContextManager[None]:
        """Measure the seconds of a block as training."""
        return self._timed("train")

    def inference_time(self) -> AbstractContextManager[None]:
        """Measure the seconds of a block as inference with frozen models."""
        return self._timed("teachers")

    @contextmanager
    def _timed(self, name: Literal["train", "teachers"]) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.synchronize()
        setattr(self.timer, name, getattr(self.timer, name) + time.perf_counter() - began)

    def synchronize(self) -> None:
        """Wait for the GPU, so that its work is not counted where its results are used later."""
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)
