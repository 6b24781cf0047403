"""Which generator a run has, or each of its tasks: a section of its recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedkeep.data.catalog import data_folder
from fedkeep.data.combine import shared_classes
from fedkeep.data.dataset import format_shape
from fedkeep.errors import ConfigError
from fedkeep.models import Shape
from fedkeep.options import Options, option
from fedkeep.synthesis.diffusion.generator import REGIMES, Generator, Regime
from fedkeep.synthesis.diffusion.pixel import CARD, Initial, Space, load_generator, read_card, read_hash, read_seen
from fedkeep.synthesis.diffusion.text_to_image import CHECKPOINT, load_latent


@dataclass(frozen=True)
class GeneratorChoice(Options):
    """The frozen generator that every party has before the run begins; or several, one for each task.

    What is asked of a choice is asked of one generator; a choice of several is asked by `each` and `of`.
    """

    name: str = option("", "its folder, from here or in the data folder, or ldm for the text-to-image model; or none")
    by_task: tuple[str, ...] = option((), "instead of name: one of each task, in their order")
    space: Space = option(
        "embedding", "what a prototype is: what the network makes of a class code, or the code, a mixture of classes"
    )
    initial: Initial = option("mean", "where the search for a prototype begins: at the classes' mean, or at nothing")
    checkpoint: str = option(CHECKPOINT, "of ldm: a folder, or a Hub id")

    def check(self) -> None:
        """Refuse a task's generator without a name."""
        if "" in self.by_task:
            raise ConfigError("generator.by_task has an empty name. Give the folder of each task's generator.")

    @property
    def each(self) -> tuple[GeneratorChoice, ...]:
        """The choice of each task's generator, or of the one for all, or none."""
        names = self.by_task or filter(None, [self.name])
        return tuple(replace(self, name=name, by_task=()) for name in names)

    def of(self, task: int) -> GeneratorChoice:
        """Return the choice of a task's generator."""
        return self.each[task - 1] if self.by_task else self

    def at(self, place: str) -> GeneratorChoice:
        """Return the same choice where a party names its own folders: one, or those of each task with commas.

        Raises
        ------
        ConfigError
            If they are more or fewer than the tasks.
        """
        if not self.by_task:
            return replace(self, name=place)
        folders = tuple(name.strip() for name in place.split(","))
        if len(folders) != len(self.by_task):
            raise ConfigError(
                f"generator={place!r} names {len(folders)} folders, and this run has {len(self.by_task)} generators. "
                "Name one for each task, in the order of the tasks, with commas between them."
            )
        return replace(self, by_task=folders)

    def about(self, data_dir: str | Path | None = None) -> str:
        """Return what is printed with results: its name, or those of each task, and what each has seen."""
        named: dict[Regime, list[str]] = {}
        for task, one in enumerate(self.each, start=1):
            named.setdefault(one.regime(data_dir), []).append(one.name + (f" in task {task}" if self.by_task else ""))
        each = ", each for its task" if self.by_task else ""
        return "; ".join(f"{', '.join(names)} ({regime}{each}): {REGIMES[regime]}" for regime, names in named.items())

    def load(self, side: int, device: torch.device, data_dir: str | Path | None = None) -> Generator:
        """Load it.

        Parameters
        ----------
        side : pixels of the data set's images, to which the text-to-image model's are made smaller.

        Raises
        ------
        ConfigError
            Where none is named.
        RunError
            Where it cannot be read.
        MissingExtra
            Without the packages it needs.
        """
        if not self.name:
            raise ConfigError("the recipe names no generator. Train one with fedkeep generator train, and name it.")
        if self.name == "ldm":
            return load_latent(self.checkpoint, side, device)
        return load_generator(self._folder(data_dir), device, space=self.space, initial=self.initial)

    def is_there(self, data_dir: str | Path | None = None) -> bool:
        """Tell whether one is named, and is a folder that is there."""
        return bool(self.name) and (self._folder(data_dir) / CARD).is_file()

    def regime(self, data_dir: str | Path | None = None) -> Regime:
        """Return what it saw, without loading its weights; errors are those of `load`."""
        return "ldm" if self.name == "ldm" else read_card(self._folder(data_dir)).regime

    def hash(self, data_dir: str | Path | None = None) -> str:
        """Return the hash of its weights without loading them; for the text-to-image model, where that is from."""
        return self.checkpoint if self.name == "ldm" else read_hash(self._folder(data_dir))

    def seen(self, data_dir: str | Path | None = None) -> Tensor:
        """Return fingerprints of the images that a run must keep from its clients, int64 [m].

        They are what a generator of the regime ``same_classes`` learned from; of others there are none. Errors are
        those of `load`.
        """
        kept_apart = self.regime(data_dir) == "same_classes"
        return read_seen(self._folder(data_dir)) if kept_apart else torch.zeros(0, dtype=torch.int64)

    def check_shape(self, shape: Shape, data_dir: str | Path | None = None) -> None:
        """Raise `ConfigError` if it draws images of another shape (channels, height, width) than the run's."""
        side = shape[-1]  # the text-to-image model's images are made as small as they have to be
        theirs = (3, side, side) if self.name == "ldm" else read_card(self._folder(data_dir)).shape
        if theirs != shape:
            raise ConfigError(
                f"the generator {self.name} draws images of {format_shape(theirs)}, and this run's are "
                f"{format_shape(shape)} (channels, height, width). Name one that was trained on such images."
            )

    def check_classes(self, label_names: Sequence[str], data_dir: str | Path | None = None) -> None:
        """Raise `ConfigError` if a generator of the regime ``disjoint`` learned some of these `shared_classes`."""
        if self.regime(data_dir) != "disjoint":
            return
        card = read_card(self._folder(data_dir))
        both = [f"{name!r} ({there!r} there)" for name, there in shared_classes(label_names, card.label_names).items()]
        if both:
            more = f" and {len(both) - 3} more" if len(both) > 3 else ""
            raise ConfigError(
                f"the generator {self.name} is of the regime 'disjoint', and yet it learned classes of this run, from "
                f"{card.data}: {', '.join(both[:3])}{more}. Train one on other classes, or with the regime "
                "same_classes or paper, so that results say what it has seen."
            )

    def check_task(self, task: int, label_names: Sequence[str], data_dir: str | Path | None = None) -> None:
        """Raise `ConfigError` if a task's own generator is said to have learned its classes, and did not."""
        if self.regime(data_dir) not in ("paper", "same_classes"):
            return
        known = shared_classes(label_names, read_card(self._folder(data_dir)).label_names)
        missing = [repr(name) for name in label_names if name not in known]
        if missing:
            raise ConfigError(
                f"generator.by_task gives {self.name} to task {task}, of whose classes it did not learn "
                f"{', '.join(missing[:3])}, and yet it is of the regime {self.regime(data_dir)!r}. Name the generators "
                "in the order of the tasks, and let classes arrive in the data set's order: "
                "tasks.class_order=source."
            )

    def _folder(self, data_dir: str | Path | None) -> Path:
        here, root = Path(self.name).expanduser(), data_folder(data_dir)
        there = None if root is None else root / self.name
        return there if there and not (here / CARD).is_file() and (there / CARD).is_file() else here
