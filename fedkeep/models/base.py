"""What a network is here: features and a classifier, built by an architecture whose options are fields."""

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

Shape: TypeAlias = tuple[int, int, int]
"""Channels, height and width of an image."""


class Network(nn.Module):
    """A network in two parts: a body that gives features, and a linear classifier that reads them.

    Parameters
    ----------
    body : maps images, float32 [b, channels, height, width], to features [b, width].
    width : number of features.
    classes : number of classes.
    """

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.classifier = nn.Linear(width, classes)

    def features(self, images: Tensor) -> Tensor:
        """Return what the classifier reads, [b, width]."""
        features: Tensor = self.body(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, [b, classes]."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


@dataclass(frozen=True)
class Architecture(Options, ABC):
    """Base of the architectures: a frozen set of options that builds a network for a data set.

    A subclass with a ``name`` is found by it, in recipes too. Its weights must be float32, its other buffers integers.
    """

    name: ClassVar[str]

    @abstractmethod
    def build(self, shape: Shape, classes: int) -> nn.Module:
        """Return a network with PyTorch's default initial weights, drawn from its default generator.

        Parameters
        ----------
        shape : channels, height and width of an image.
        classes : number of classes.

        Raises
        ------
        ConfigError
            If images of this shape are too small for the layers; the message says how large they must be.
        """


def architectures() -> Mapping[str, type[Architecture]]:
    """Return every architecture by name: those of this package, found by looking, and any that have been imported.

    Raises
    ------
    ConfigError
        If two classes have one name.
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
            continue  # no name of its own: a base of others, or one that is named by its instances
        other = found.get(name)
        # A class that was defined again, as in a notebook's cell, replaces itself; another class must not.
        if other is not None and _place(other) != _place(cls):
            raise ConfigError(f"{_place(other)} and {_place(cls)} are both named {name!r}. Rename your own.")
        found[name] = cls
    return MappingProxyType(dict(sorted(found.items())))


def get_architecture(name: str) -> type[Architecture]:
    """Return an architecture by name, case ignored; raise `ConfigError` with the nearest name for an unknown one."""
    known = architectures()
    if name.lower() not in known:
        raise ConfigError(
            f"there is no model {name!r}.{did_you_mean(name.lower(), known)} "
            "A model of your own is named as package.module:function."
        )
    return known[name.lower()]


def _place(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
