"""A pre-trained network of which only the classifier learns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from torch import Tensor, nn

from fedkeep.models.base import Architecture, Network, Shape
from fedkeep.models.extractor import Extractor, load_extractor
from fedkeep.options import option


class FrozenNetwork(Network):
    """A classifier on the features of a frozen extractor; the classifier is all that is in its state dict.

    Parameters
    ----------
    extractor : gives the features. Networks of one extractor share it.
    classes : number of classes.
    """

    def __init__(self, extractor: Extractor, classes: int) -> None:
        super().__init__(nn.Identity(), extractor.width, classes)
        self.extractor = extractor

    def features(self, images: Tensor) -> Tensor:
        """Return what the classifier reads, [b, width], of uint8 images; features [b, width] are returned as they are.

        Raises
        ------
        ConfigError
            For images of another type, such as normalised ones.
        """
        return images if images.ndim == 2 else self.extractor(images)


@dataclass(frozen=True)
class Pretrained(Architecture):
    """A pre-trained ViT or ResNet of `transformers` whose extractor is frozen: only the classifier learns.

    FedDCL's server of its RGB benchmark; the paper names neither variant nor resolution. Images are read at the
    extractor's own resolution, with its own normalisation, and are not augmented, so that each goes through it once.
    Only the classifier is part of a model: nothing else is trained, sent, saved or changed. A ViT-B/16 has 768
    features, its classifier 7,690 parameters for 10 classes.
    """

    name: ClassVar[str] = "pretrained"

    source: str = option(
        "google/vit-base-patch16-224", "a folder, from here or in the data folder, or a name on the Hugging Face Hub"
    )

    def build(self, shape: Shape, classes: int) -> FrozenNetwork:
        """Return the network; see `Architecture.build` and, for what loading may raise, `load_extractor`."""
        return FrozenNetwork(load_extractor(self.source), classes)

    @property
    def about(self) -> str:
        """What the extractor is and what it has seen, in a line."""
        return load_extractor(self.source).about

    @property
    def learned(self) -> tuple[str, ...]:
        """The names of the classes that it was trained to tell; empty where they are not known."""
        return load_extractor(self.source).learned

    def hash(self) -> str:
        """Return the hash of the extractor's weights."""
        return load_extractor(self.source).hash()

    def located(self, root: Path | None) -> Self:
        """Return it with its folder below ``root``, if it is there and not here."""
        there = None if root is None else root / self.source
        if there is None or Path(self.source).is_dir() or not there.is_dir():
            return self
        return replace(self, source=str(there))
