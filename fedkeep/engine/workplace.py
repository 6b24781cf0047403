"""What parties of one network share on one device, and the clock that runs while they use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedkeep.data import Augmentation, ImageFormat
from fedkeep.engine.fit import Assignment, fit
from fedkeep.engine.networks import Networks
from fedkeep.errors import ConfigError
from fedkeep.interface import Fit, Training

if TYPE_CHECKING:
    from fedkeep.generation.diffusion.generator import Generator


LoadGenerator = Callable[[int], "Generator"]


def no_generator(task: int) -> Generator:
    """Raise `ConfigError`: stands where a recipe names no generator."""
    raise ConfigError("this run has no generator of images. Name it in the recipe: generator.name or by_task.")


@dataclass
class Clock:
    """Seconds of a round: in local training, Fisher information included, and in asking frozen models."""

    train: float = 0.0
    teachers: float = 0.0

    @property
    def worked(self) -> float:
        """Both."""
        return self.train + self.teachers

    def restart(self) -> None:
        """Begin at zero again, for all who share the clock."""
        self.train = self.teachers = 0.0


@dataclass
class Workplace:
    """What parties of one network share on one device: it, what it reads of images, the settings, and a clock.

    ``classes`` are those seen so far, of which ``old`` came before the task; ``label_names`` names all, in order of
    arrival. ``format`` is what images are like. ``load_generator`` gives a task's generator.
    """

    networks: Networks
    normalise: Callable[[Tensor], Tensor]
    augmentation: Augmentation
    training: Training
    seed: int
    classes: int
    format: ImageFormat
    label_names: tuple[str, ...]
    load_generator: LoadGenerator
    old: int = 0
    clock: Clock = field(default_factory=Clock)

    def of(self, networks: Networks) -> Workplace:
        """Return the place of parties with other networks, the clock shared.

        A frozen extractor takes the place of normalisation: what it says of an image is computed once, and learned
        from as it is, without augmentation.
        """
        if networks.extractor is None:
            return replace(self, networks=networks)
        return replace(self, networks=networks, normalise=networks.extractor, augmentation=Augmentation())

    def enter(self, seen: Sequence[int]) -> None:
        """Go to a task, given how many classes were seen with each from the first on."""
        self.classes, self.old = seen[-1], seen[-2] if len(seen) > 1 else 0
        self.networks.enter(seen)

    def train(self, assignment: Assignment) -> Fit:
        """Carry out one training."""
        with self.training_time():
            return fit(self.networks, assignment, self.training)

    def training_time(self) -> AbstractContextManager[None]:
        """Count the seconds of a block as training."""
        return self._counted("train")

    def asking(self) -> AbstractContextManager[None]:
        """Count the seconds of a block as asking frozen models."""
        return self._counted("teachers")

    @contextmanager
    def _counted(self, hand: Literal["train", "teachers"]) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.catch_up()
        setattr(self.clock, hand, getattr(self.clock, hand) + time.perf_counter() - began)

    def catch_up(self) -> None:
        """Wait for a GPU to do what it was told: else a clock counts it where somebody next wants to know a number."""
        if self.networks.device.type == "cuda":
            torch.cuda.synchronize(self.networks.device)
