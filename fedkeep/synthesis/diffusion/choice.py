"""Which generator a run has: a section of its recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedkeep.data.combine import in_common
from fedkeep.data.dataset import describe
from fedkeep.data.known import data_folder
from fedkeep.errors import ConfigError
from fedkeep.models import Shape
from fedkeep.options import Options, option
from fedkeep.synthesis.diffusion.generator import Generator, Regime
from fedkeep.synthesis.diffusion.pixel import CARD, Initial, Space, load_generator, read_card, read_hash, read_seen
from fedkeep.synthesis.diffusion.text_to_image import CHECKPOINT, load_latent


@dataclass(frozen=True)
class GeneratorChoice(Options):
    """The frozen generator that every party has before the run begins."""

    name: str = option("", "its folder, from here or in the data folder, or ldm for the text-to-image model; or none")
    space: Space = option("embedding", "what a prototype is: what the network is told, or a mixture of its classes")
    initial: Initial = option("mean", "where the search for a prototype begins: at the classes' mean, or at nothing")
    checkpoint: str = option(CHECKPOINT, "of ldm: a folder, or a Hub id")

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
                f"the generator {self.name} draws images of {describe(theirs)}, and this run's are {describe(shape)} "
                "(channels, height, width). Name one that was trained on such images."
            )

    def check_classes(self, label_names: Sequence[str], data_dir: str | Path | None = None) -> None:
        """Raise `ConfigError` if a generator of the regime ``disjoint`` learned some of these classes (`in_common`)."""
        if self.regime(data_dir) != "disjoint":
            return
        card = read_card(self._folder(data_dir))
        both = [f"{name!r} ({there!r} there)" for name, there in in_common(label_names, card.label_names).items()]
        if both:
            more = f" and {len(both) - 3} more" if len(both) > 3 else ""
            raise ConfigError(
                f"the generator {self.name} is of the regime 'disjoint', and yet it learned classes of this run, from "
                f"{card.data}: {', '.join(both[:3])}{more}. Train one on other classes, or with the regime "
                "same_classes or paper, so that results say what it has seen."
            )

    def _folder(self, data_dir: str | Path | None) -> Path:
        here, root = Path(self.name).expanduser(), data_folder(data_dir)
        there = None if root is None else root / self.name
        return there if there and not (here / CARD).is_file() and (there / CARD).is_file() else here
