"""What a generator is: a frozen diffusion model that is told by a prototype what to draw."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fedkeep.data.dataset import format_shape
from fedkeep.errors import DataError, RunError, ValueRefused
from fedkeep.models import Shape, Weights
from fedkeep.models.weights import tensor_hash
from fedkeep.synthesis.diffusion.noise import Noise

Regime = Literal["paper", "same_classes", "disjoint", "ldm"]
"""What a generator saw before the federation began; printed with every result, since it decides what a result means."""

REGIMES: dict[Regime, str] = {
    "paper": "trained on all training images of the clients' own classes, as in the paper: it has seen them all",
    "same_classes": "trained on a part of each of the clients' classes, which runs keep from the clients",
    "disjoint": "trained on other classes than the clients': the fair test",
    "ldm": "the public text-to-image model: it has read the classes' names, beside images of the whole web",
}


class Generator(ABC):
    """A diffusion model that never learns again, as prototypes and samplers see it.

    A prototype is a tensor that says what to draw; those of several classes are the rows of one tensor [n, ...].

    Attributes
    ----------
    shape : channels, height and width of its images. noise : its schedule. regime : what it saw.
    device : where it computes.
    """

    shape: Shape
    noise: Noise
    regime: Regime
    device: torch.device

    @abstractmethod
    def start(self, classes: int) -> Tensor:
        """Return the prototypes [classes, ...] from which a search begins, all alike."""

    @abstractmethod
    def conditions(self, prototypes: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Return what the network is told, [n, tokens, width], for prototypes [n, ...]; gradients flow through.

        Parameters
        ----------
        prototypes : of a size that `check_prototypes` lets through.
        rng : where it is given, the words around a prototype are drawn, for training; else they are always the same.
        """

    @abstractmethod
    def null(self) -> Tensor:
        """Return what the network is told when it shall draw anything, [1, tokens, width]."""

    @abstractmethod
    def predict(self, noisy: Tensor, times: Tensor, conditions: Tensor) -> Tensor:
        """Return the noise that the network sees in noisy images [b, ...], int64 times [b], told [b, tokens, width]."""

    @abstractmethod
    def encode(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Return images, uint8 [b, channels, height, width], as the network draws them, float32 [b, ...].

        The latent model turns some over, which is drawn from ``rng``.
        """

    @abstractmethod
    def decode(self, drawn: Tensor) -> Tensor:
        """Return what the network drew as images, uint8 [b, channels, height, width]."""

    @property
    @abstractmethod
    def drawn(self) -> tuple[int, ...]:
        """The shape of one image as the network draws it."""

    @property
    @abstractmethod
    def prototype_sizes(self) -> Sequence[tuple[int, ...]]:
        """The sizes of one prototype that it takes."""

    @abstractmethod
    def hash(self) -> str:
        """Return a hash of all weights, computed anew: equal for equal bits only."""

    @cached_property
    def loaded_hash(self) -> str:
        """The hash of its weights as it was loaded, computed once: by it, parties know that they have the same."""
        return self.hash()

    def check_images(self, images: Tensor) -> None:
        """Raise `DataError` for images of another size than it draws."""
        theirs = tuple(images.shape[1:])
        if images.dtype != torch.uint8 or theirs != self.shape:
            raise DataError(
                f"This generator draws uint8 images of {format_shape(self.shape)}, and these are {images.dtype} of "
                f"{format_shape(theirs)} (channels, height, width). Train a generator on images of that size."
            )

    def check_prototypes(self, prototypes: Tensor) -> None:
        """Raise `ValueRefused` for prototypes of a size that it does not take."""
        size = tuple(prototypes.shape[1:])
        if size not in self.prototype_sizes:
            taken = " or ".join(str(list(known)) for known in self.prototype_sizes)
            raise ValueRefused(
                f"these prototypes are of size {list(size)} each, and this generator takes {taken}. Use those that "
                "were found with this generator."
            )


@contextmanager
def unchanged(generator: Generator) -> Iterator[None]:
    """Raise `RunError` if a generator's weights are others after the block than they were when it was loaded."""
    before = generator.loaded_hash
    yield
    if generator.hash() != before:
        raise RunError("the weights of the generator changed while prototypes were trained: it must stay frozen.")


def hash_of(weights: Weights) -> str:
    """Return a hash of named tensors, in any order of names."""
    each = "".join(f"{name} {tensor_hash(weights[name])}\n" for name in sorted(weights))
    return hashlib.blake2b(each.encode(), digest_size=16).hexdigest()
