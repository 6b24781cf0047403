"""The generator of a run, or of each of its tasks: the recipe's section ``[generator]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedkeep._utils.files import check_path
from fedkeep.data.catalog import data_folder
from fedkeep.data.combine import shared_classes
from fedkeep.data.dataset import format_shape
from fedkeep.errors import ConfigError
from fedkeep.generation.diffusion.generator import REGIMES, Generator, Regime, Sampler, SamplerMethod
from fedkeep.generation.diffusion.pixel import (
    CARD,
    PrototypeInit,
    PrototypeSpace,
    load_generator,
    read_card,
    read_fingerprints,
    read_hash,
)
from fedkeep.generation.diffusion.text_to_image import CHECKPOINT, load_latent
from fedkeep.models import Shape
from fedkeep.options import Options, option


@dataclass(frozen=True)
class GeneratorConfig(Options):
    """The frozen generator that every party has before the run begins; or several, one for each task.

    Most methods are about one generator. A configuration of several is split by `per_task` and `for_task`.
    """

    name: str = option("", "its folder, from here or in the data folder, or ldm for the text-to-image model; or none")
    by_task: tuple[str, ...] = option((), "instead of name: one for each task, in their order")
    space: PrototypeSpace = option(
        "embedding", "what a prototype is: the network's embedding of a class, or a class code, a mixture of classes"
    )
    initial: PrototypeInit = option(
        "mean", "where the search for a prototype begins: at the mean of the classes, or at the null class"
    )
    checkpoint: str = option(CHECKPOINT, "of ldm: a folder, or a Hub id")
    sampler: SamplerMethod = option("ddim", "how images are sampled from it")
    sampler_steps: int = option(50, "steps of the sampler", low=1)
    guidance_scale: float = option(2.0, "weight of classifier-free guidance; 1: none", low=0.0)

    def check(self) -> None:
        """Raise `ConfigError` if a task's generator has no name, or a name can be no folder's."""
        for name in (self.name, *self.by_task):
            check_path(name, "generator.name")
        if "" in self.by_task:
            raise ConfigError("generator.by_task has an empty name. Give the folder of each task's generator.")

    @property
    def per_task(self) -> tuple[GeneratorConfig, ...]:
        """The configuration of each task's generator; one if all tasks share it, none if there is no generator."""
        names = self.by_task or filter(None, [self.name])
        return tuple(replace(self, name=name, by_task=()) for name in names)

    def for_task(self, task: int) -> GeneratorConfig:
        """Return the configuration of a task's generator."""
        return self.per_task[task - 1] if self.by_task else self

    def at_site(self, folders: str) -> GeneratorConfig:
        """Return the same configuration with a site's own folders.

        ``folders``: One folder, or those of each task with commas between them.
        """
        if not self.by_task:
            return replace(self, name=folders)
        names = tuple(name.strip() for name in folders.split(","))
        if len(names) != len(self.by_task):
            raise ConfigError(
                f"generator={folders!r} names {len(names)} folders, and this run has {len(self.by_task)} generators. "
                "Name one for each task, in the order of the tasks, with commas between them."
            )
        return replace(self, by_task=names)

    def describe(self, data_dir: str | Path | None = None) -> str:
        """Return what is printed with results: the name, or those of each task, and what each was trained on."""
        names: dict[Regime, list[str]] = {}
        for task, config in enumerate(self.per_task, start=1):
            suffix = f" in task {task}" if self.by_task else ""
            names.setdefault(config.regime(data_dir), []).append(config.name + suffix)
        each = ", each for its task" if self.by_task else ""
        seen = dict(REGIMES)
        if self.checkpoint != CHECKPOINT:
            seen["ldm"] = f"the text-to-image pipeline {self.checkpoint}: what it has seen is not known here"
        return "; ".join(f"{', '.join(group)} ({regime}{each}): {seen[regime]}" for regime, group in names.items())

    def load(self, side: int, device: torch.device, data_dir: str | Path | None = None) -> Generator:
        """Return the generator.

        ``side``: Side in pixels of the data set's images, to which the text-to-image model's are resized.
        """
        if not self.name:
            raise ConfigError("the recipe names no generator. Train one with fedkeep generator train, and name it.")
        generator: Generator
        if self.name == "ldm":
            generator = load_latent(self.checkpoint, side, device)
        else:
            generator = load_generator(self._folder(data_dir), device, space=self.space, initial=self.initial)
        generator.sampler = Sampler(self.sampler, self.sampler_steps, self.guidance_scale)
        return generator

    def exists(self, data_dir: str | Path | None = None) -> bool:
        """Tell whether a generator is named and its folder exists."""
        return bool(self.name) and (self._folder(data_dir) / CARD).is_file()

    def regime(self, data_dir: str | Path | None = None) -> Regime:
        """Return the regime without loading the weights; errors are those of `load`."""
        return "ldm" if self.name == "ldm" else read_card(self._folder(data_dir)).regime

    def hash(self, data_dir: str | Path | None = None) -> str:
        """Return the hash of the weights without loading them; for the text-to-image model, its checkpoint's name."""
        return self.checkpoint if self.name == "ldm" else read_hash(self._folder(data_dir))

    def image_hashes(self, data_dir: str | Path | None = None) -> Tensor:
        """Return fingerprints of the images that a run must keep from its clients, int64 [m].

        A generator of the regime ``same_classes`` was trained on these images. For other regimes there are none. Errors
        are those of `load`.
        """
        is_excluded = self.regime(data_dir) == "same_classes"
        return read_fingerprints(self._folder(data_dir)) if is_excluded else torch.zeros(0, dtype=torch.int64)

    def check_shape(self, shape: Shape, data_dir: str | Path | None = None) -> None:
        """Raise `ConfigError` if the generator's images have another shape (channels, height, width) than the run's."""
        side = shape[-1]  # the text-to-image model's images are resized
        theirs = (3, side, side) if self.name == "ldm" else read_card(self._folder(data_dir)).shape
        if theirs != shape:
            raise ConfigError(
                f"the generator {self.name} draws images of {format_shape(theirs)}, and this run's are "
                f"{format_shape(shape)} (channels, height, width). Name one that was trained on such images."
            )

    def check_classes(self, label_names: Sequence[str], data_dir: str | Path | None = None) -> None:
        """Raise `ConfigError` if a generator of the regime ``disjoint`` was trained on some of these classes."""
        if self.regime(data_dir) != "disjoint":
            return
        card = read_card(self._folder(data_dir))
        shared = [
            f"{name!r} ({other!r} there)" for name, other in shared_classes(label_names, card.label_names).items()
        ]
        if shared:
            more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
            raise ConfigError(
                f"the generator {self.name} is of the regime 'disjoint', and yet it learned classes of this run, from "
                f"{card.data}: {', '.join(shared[:3])}{more}. Train one on other classes, or with the regime "
                "same_classes or paper, so that results say what it has seen."
            )

    def check_task(self, task: int, label_names: Sequence[str], data_dir: str | Path | None = None) -> None:
        """Raise `ConfigError` if a task's own generator should know the task's classes by its regime, and does not."""
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
        folder, root = Path(self.name).expanduser(), data_folder(data_dir)
        in_root = None if root is None else root / self.name
        return in_root if in_root and not (folder / CARD).is_file() and (in_root / CARD).is_file() else folder
