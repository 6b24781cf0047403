"""A pre-trained network of which only the classifier is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from torch import Tensor, nn

from fedkeep.models.base import Architecture, Network, Shape, image_shape
from fedkeep.models.extractor import Extractor, load_extractor
from fedkeep.options import option


class FrozenNetwork(Network):
    """A classifier on the features of a frozen extractor; its state dict contains only the classifier.

    ``extractor``: Computes the features; several networks may share it.
    """

    def __init__(self, extractor: Extractor, classes: int) -> None:
        super().__init__(nn.Identity(), extractor.width, classes)
        self.extractor = extractor

    def features(self, images: Tensor) -> Tensor:
        """Compute the input of the classifier.

        ``images``: Images, uint8 [b, channels, height, width], or features, [b, width], which are returned unchanged.
        Returns: Features, [b, width].
        """
        return images if images.ndim == 2 else self.extractor(images)


@dataclass(frozen=True)
class Pretrained(Architecture):
    """A pre-trained ViT or ResNet of `transformers` with a frozen extractor: only the classifier is trained.

    FedDCL uses this in its RGB benchmark; the paper names neither variant nor resolution. Images are processed with the
    extractor's resolution and normalisation, and without augmentation, so that each image is processed only once. A
    model contains only the classifier: nothing else is trained, sent or saved. A ViT-B/16 has 768 features, and its
    classifier 7,690 parameters for 10 classes.
    """

    name: ClassVar[str] = "pretrained"

    source: str = option(
        "google/vit-base-patch16-224",
        "a folder, relative to the working directory or the data folder, or a name on the Hugging Face Hub",
    )

    def build(self, shape: Shape, classes: int) -> FrozenNetwork:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        Returns: The network (see `load_extractor` for what may be raised).
        """
        image_shape(self.name, shape)
        return FrozenNetwork(load_extractor(self.source), classes)

    @property
    def about(self) -> str:
        """A line about the extractor and its training data."""
        return load_extractor(self.source).about

    @property
    def learned(self) -> tuple[str, ...]:
        """Names of the classes on which the extractor was trained; empty if they are not known."""
        return load_extractor(self.source).learned

    def hash(self) -> str:
        """Return the hash of the extractor's weights."""
        return load_extractor(self.source).hash()

    def located(self, root: Path | None) -> Self:
        """Look for the extractor's folder below another folder.

        Returns: With the folder below ``root`` if it exists there and not in the working directory; otherwise
            unchanged.
        """
        folder = None if root is None else root / self.source
        if folder is None or Path(self.source).is_dir() or not folder.is_dir():
            return self
        return replace(self, source=str(folder))
