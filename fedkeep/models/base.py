"""The base classes: a network is features and a classifier, and an architecture with options builds it."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, TypeAlias

from torch import Tensor, nn

from fedkeep.errors import ConfigError, did_you_mean
from fedkeep.options import Options

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


def image_shape(name: str, shape: Shape) -> tuple[int, int, int]:
    """Return the shape of the images that a network of convolutions needs.

    ``name``: Name of the architecture, for the error message.
    Returns: Channels, height and width.
    """
    if len(shape) != 3:
        raise ConfigError(
            f"{name} needs images, and these inputs have the shape {list(shape)}. Use mlp for rows of numbers, "
            "embedding-bag for token ids, or a model of your own."
        )
    return shape[0], shape[1], shape[2]


def architectures() -> Mapping[str, type[Architecture]]:
    """Find all architectures: those of this package, and any others that have been imported.

    Returns: The architectures by name, in alphabetical order.
    """
    package = importlib.import_module("fedkeep.models")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"fedkeep.models.{module.name}")
    found: dict[str, type[Architecture]] = {}
    pending = list(Architecture.__subclasses__())
    for cls in pending:
        pending.extend(cls.__subclasses__())
        name = cls.__dict__.get("name")
        if not isinstance(name, str):
            continue  # without its own name: a base class, or a class whose instances have names
        other = found.get(name)
        # A class that is defined again, as in a notebook's cell, replaces itself; a different class must not.
        if other is not None and _full_name(other) != _full_name(cls):
            raise ConfigError(f"{_full_name(other)} and {_full_name(cls)} are both named {name!r}. Rename yours.")
        found[name] = cls
    return MappingProxyType(dict(sorted(found.items())))


def get_architecture(name: str) -> type[Architecture]:
    """Return an architecture by name.

    ``name``: The name; upper and lower case are the same.
    """
    known = architectures()
    if name.lower() not in known:
        raise ConfigError(
            f"there is no model {name!r}.{did_you_mean(name.lower(), known)} "
            "Name your own model as package.module:function."
        )
    return known[name.lower()]


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
