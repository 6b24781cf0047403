"""The base classes: a network is features and a classifier, and an architecture with options builds it."""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from torch import Tensor, nn

from fedkeep.errors import ConfigError
from fedkeep.options import Options, find_named, named_subclasses

Shape: TypeAlias = tuple[int, ...]
"""The shape of one input: channels, height and width of an image, the number of features, or of token ids."""


class Network(nn.Module):
    """A network of two parts: a body that computes features, and a linear classifier.

    ``body``: Maps inputs, such as images, float32 [b, channels, height, width], to features, [b, width].
    """

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.classifier = nn.Linear(width, classes)

    def features(self, images: Tensor) -> Tensor:
        """Compute the input of the classifier.

        ``images``: Images, float32 [b, channels, height, width].
        Returns: Features, [b, width].
        """
        features: Tensor = self.body(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits.

        ``images``: Images, float32 [b, channels, height, width].
        Returns: Logits, [b, classes].
        """
        logits: Tensor = self.classifier(self.features(images))
        return logits


@dataclass(frozen=True)
class Architecture(Options, ABC):
    """Base class of architectures: a frozen set of options that builds a network for a data set.

    A subclass with a ``name`` is found by that name, in recipes too. Its parameters must be float32, and its other
    buffers float32 or integers.

    ``reads_token_ids``: Whether inputs are token ids, of which the option ``vocabulary`` says how many there are.
    """

    name: ClassVar[str]
    reads_token_ids: ClassVar[bool] = False

    @abstractmethod
    def build(self, shape: Shape, classes: int) -> nn.Module:
        """Build a network with PyTorch's default initial weights, which come from its default generator.

        ``shape``: The shape of one input; of an image: channels, height and width.
        """


def image_shape(name: str, shape: Shape, smallest: int = 1, advice: str = "") -> tuple[int, int, int]:
    """Return the shape of the images that a network of convolutions needs.

    ``name``: Name of the architecture, for the error message.
    ``smallest``: The least height and width, in pixels; for smaller images the error gives the advice.
    Returns: Channels, height and width.
    """
    if len(shape) != 3:
        raise ConfigError(
            f"{name} needs images, and these inputs have the shape {list(shape)}. Use mlp for rows of numbers, "
            "embedding-bag for token ids, or a model of your own."
        )
    channels, height, width = shape
    if min(height, width) < smallest:
        raise ConfigError(
            f"{name} needs images of at least {smallest}x{smallest} pixels, and these are {height}x{width}. {advice}"
        )
    return channels, height, width


def architectures() -> Mapping[str, type[Architecture]]:
    """Find all architectures: those of this package, and any others that have been imported.

    Returns: The architectures by name, in alphabetical order.
    """
    package = importlib.import_module("fedkeep.models")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"fedkeep.models.{module.name}")
    # A class without a name of its own is a base class, or one whose instances have names.
    found = named_subclasses(Architecture, lambda cls: cls.__dict__.get("name"), "Rename yours.")  # type: ignore[type-abstract]
    return dict(sorted(found.items()))


def get_architecture(name: str) -> type[Architecture]:
    """Return an architecture by name.

    ``name``: The name; upper and lower case are the same.
    """
    return find_named(name, architectures(), "model", "Name your own model as package.module:function.")
