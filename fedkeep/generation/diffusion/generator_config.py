"""The generator of a run: the recipe's section ``[generator]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """The frozen generator that every party has before the run begins."""

    name: str = option("", "its folder, from here or in the data folder, or ldm for the text-to-image model; or none")
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
        """Raise `ConfigError` if the name can be no folder's."""
        check_path(self.name, "generator.name")

    def describe(self, data_dir: str | Path | None = None) -> str:
        """Return what is printed with results: the name, and what the generator was trained on."""
        regime = self.regime(data_dir)
        seen = REGIMES[regime]
        if regime == "ldm" and self.checkpoint != CHECKPOINT:
            seen = f"the text-to-image pipeline {self.checkpoint}: what it has seen is not known here"
        return f"{self.name} ({regime}): {seen}"

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

    def _folder(self, data_dir: str | Path | None) -> Path:
        folder, root = Path(self.name).expanduser(), data_folder(data_dir)
        in_root = None if root is None else root / self.name
        return in_root if in_root and not (folder / CARD).is_file() and (in_root / CARD).is_file() else folder
