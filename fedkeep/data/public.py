"""Images that are nobody's secret: clients and server say what their models think of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedkeep._utils import seeds
from fedkeep.data.dataset import Data, DataSet, describe
from fedkeep.errors import ConfigError, DataError
from fedkeep.options import Options, option


@dataclass(frozen=True)
class Public(Options):
    """Where the public set comes from: training images of another data set. Its labels are not used."""

    name: str = option("", "data set, Hub id or path, as in [data]; empty: there is no public set")
    images: int = option(0, "how many, drawn at random once for a seed; 0: all", low=0)
    classes: tuple[str, ...] = option((), "only images of these classes, by name; empty: of all")

    def check(self) -> None:
        if not self.name and (self.images or self.classes):
            raise ConfigError("[public] says how many images or which classes, but not of what. Give it a name.")

    def draw(self, source: DataSet, like: DataSet, seed: int) -> Data:
        """Return the images, all under label 0, for a run on another data set.

        Raises
        ------
        DataError
            If the images are of another shape, there are too few, or a class is not there.
        """
        if source.shape != like.shape:
            raise DataError(
                f"[public] {source.name} has images of {describe(source.shape)}, and {like.name} has images of "
                f"{describe(like.shape)}. Choose a public set with images of that size."
            )
        unknown = [name for name in self.classes if name not in source.label_names]
        if unknown:
            raise DataError(
                f"[public] {source.name} has no class {unknown[0]!r}. It has: {', '.join(source.label_names)}."
            )
        labels = source.train["label"].cpu()
        wanted = torch.tensor([source.label_names.index(name) for name in self.classes], dtype=labels.dtype)
        rows = (torch.isin(labels, wanted) if self.classes else torch.ones_like(labels).bool()).nonzero().flatten()
        if len(rows) < max(self.images, 1):
            raise DataError(
                f"[public] asks for {self.images or 'some'} images, and {source.name} has only {len(rows)} of these "
                "classes. Lower public.images or name more classes."
            )
        if self.images:
            chosen = torch.randperm(len(rows), generator=seeds.generator(seed, "public set"))[: self.images]
            rows = rows[chosen]
        return {"image": source.train["image"][rows], "label": torch.zeros(len(rows), dtype=torch.int64)}
