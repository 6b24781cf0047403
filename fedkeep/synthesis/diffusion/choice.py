"""Which generator a run has: a section of its recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fedkeep.data.known import data_folder
from fedkeep.errors import ConfigError
from fedkeep.options import Options, option
from fedkeep.synthesis.diffusion.generator import Generator, Regime
from fedkeep.synthesis.diffusion.pixel import CARD, Initial, Space, load_generator, read_regime
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

    def regime(self, data_dir: str | Path | None = None) -> Regime:
        """Return what it saw, without loading its weights; errors are those of `load`."""
        return "ldm" if self.name == "ldm" else read_regime(self._folder(data_dir))

    def _folder(self, data_dir: str | Path | None) -> Path:
        here, root = Path(self.name).expanduser(), data_folder(data_dir)
        there = None if root is None else root / self.name
        return there if there and not (here / CARD).is_file() and (there / CARD).is_file() else here
