"""What the parties of one network share on one device: the network, the settings, and a timer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fedkeep.data import Augmentation, ImageFormat
from fedkeep.errors import ConfigError
from fedkeep.generation.diffusion.generator import Generator
from fedkeep.interface import Training
from fedkeep.training.model_runner import ModelRunner

LoadGenerator = Callable[[int], Generator]


def no_generator(task: int) -> Generator:
    """Raise `ConfigError`: stands where a recipe names no generator."""
    raise ConfigError("this run has no generator of images. Name it in the recipe: generator.name or by_task.")


@dataclass
class Timer:
    """Seconds of a round.

    Attributes
    ----------
    train : float
        In local training, Fisher information included.
    teachers : float
        In inference with frozen models.
    """

    train: float = 0.0
    teachers: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.train + self.teachers

    def add(self, train: float, teachers: float) -> None:
        """Add what was timed elsewhere."""
        self.train += train
        self.teachers += teachers

    def reset(self) -> None:
        """Begin at zero again, for all who share the timer."""
        self.train = self.teachers = 0.0


@dataclass
class ClientContext:
    """What the parties of one network share on one device.

    Attributes
    ----------
    runner : ModelRunner
        The network.
    normalise : Callable[[Tensor], Tensor]
        Maps uint8 images to what the network takes.
    augmentation : Augmentation
        Of training images.
    training : Training
        Settings of local training.
    seed : int
        Of everything random.
    classes : int
        Classes seen so far.
    format : ImageFormat
        Shape and normalisation of images.
    label_names : tuple[str, ...]
        Names of all classes, in order of arrival.
    load_generator : LoadGenerator
        Returns a task's generator of images.
    old : int
        Classes that came before the current task.
    timer : Timer
        Shared by all contexts of a simulation.
    """

    runner: ModelRunner
    normalise: Callable[[Tensor], Tensor]
    augmentation: Augmentation
    training: Training
    seed: int
    classes: int
    format: ImageFormat
    label_names: tuple[str, ...]
    load_generator: LoadGenerator
    old: int = 0
    timer: Timer = field(default_factory=Timer)

    def with_runner(self, runner: ModelRunner) -> ClientContext:
        """Return the context of parties with another network; the timer is shared.

        A frozen extractor takes the place of normalisation: an image's features are computed once, and learned from as
        they are, without augmentation.
        """
        if runner.extractor is None:
            return replace(self, runner=runner)
        return replace(self, runner=runner, normalise=runner.extractor, augmentation=Augmentation())

    def set_task(self, seen: Sequence[int]) -> None:
        """Go to a task, given how many classes were seen with each from the first on."""
        self.classes, self.old = seen[-1], seen[-2] if len(seen) > 1 else 0
        self.runner.set_task(seen)

    def training_time(self) -> AbstractContextManager[None]:
        """Count the seconds of a block as training."""
        return self._timed("train")

    def inference_time(self) -> AbstractContextManager[None]:
        """Count the seconds of a block as inference with frozen models."""
        return self._timed("teachers")

    @contextmanager
    def _timed(self, name: Literal["train", "teachers"]) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.synchronize()
        setattr(self.timer, name, getattr(self.timer, name) + time.perf_counter() - began)

    def synchronize(self) -> None:
        """Wait until a GPU has done what it was given: else the next who needs a number would be charged for it."""
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)


@contextmanager
def pinned_threads(threads: int) -> Iterator[None]:
    """Let PyTorch use this many threads in the block: results depend on the number, and more slow small models down."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
