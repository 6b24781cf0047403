"""The interface of a generator: a frozen diffusion model that is conditioned on prototypes."""

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
from fedkeep.generation.diffusion.schedules import NoiseSchedule, Sampler
from fedkeep.models import Shape, Weights
from fedkeep.models.weights import tensor_hash

Regime = Literal["paper", "same_classes", "disjoint", "ldm"]
"""What a generator was trained on before the federation began. It is printed with every result, since the meaning of a
result depends on it."""

REGIMES: dict[Regime, str] = {
    "paper": "trained on all training images of the clients' own classes, as in the paper: it has seen them all",
    "same_classes": "trained on a part of each of the clients' classes, which runs keep from the clients",
    "disjoint": "trained on other classes than the clients': the fair test",
    "ldm": "the public text-to-image model: it has read the classes' names, beside images of the whole web",
}


class Generator(ABC):
    """A frozen diffusion model, as the prototype search and the samplers see it.

    A prototype is a tensor that describes one class to the model. The prototypes of n classes are one tensor [n, ...].

    ``shape``: Channels, height and width of the images.
    ``noise_schedule``: The noise schedule of its training.
    ``regime``: What it was trained on.
    ``device``: Where it computes.
    ``sampler``: How images are sampled from it.
    """

    shape: Shape
    noise_schedule: NoiseSchedule
    regime: Regime
    device: torch.device
    sampler: Sampler = Sampler()

    @abstractmethod
    def initial_prototypes(self, num_classes: int) -> Tensor:
        """Return the prototypes [num_classes, ...] from which a search begins, all equal."""

    @abstractmethod
    def conditioning(self, prototypes: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Return what the network is conditioned on, [n, tokens, width]; gradients flow through.

        ``prototypes``: [n, ...], of a shape that `check_prototypes` accepts.
        ``rng``: If given, the text around a prototype is random, for training; otherwise it is always the same.
        """

    @abstractmethod
    def null_conditioning(self) -> Tensor:
        """Return the conditioning without a class, [1, tokens, width], for classifier-free guidance."""

    @abstractmethod
    def predict_noise(self, noisy: Tensor, timesteps: Tensor, conditioning: Tensor) -> Tensor:
        """Return the noise that the network finds.

        ``noisy``: Noisy images as the network represents them, [b, ...].
        ``timesteps``: int64 [b].
        ``conditioning``: [b, tokens, width].
        """

    @abstractmethod
    def encode(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Return images as the network represents them, float32 [b, ...].

        ``images``: uint8 [b, channels, height, width].
        ``rng``: The latent model flips some images at random.
        """

    @abstractmethod
    def decode(self, samples: Tensor) -> Tensor:
        """Return samples of the network as images, uint8 [b, channels, height, width]."""

    @property
    @abstractmethod
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one image as the network represents it."""

    @property
    @abstractmethod
    def prototype_shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of one prototype that the generator accepts."""

    @abstractmethod
    def hash(self) -> str:
        """Return a newly computed hash of all weights; only equal bits have equal hashes."""

    @cached_property
    def loaded_hash(self) -> str:
        """The hash of the weights as they were loaded, computed once. Parties compare theirs by it."""
        return self.hash()

    def check_images(self, images: Tensor) -> None:
        """Raise `DataError` if images are not uint8 of the generator's shape."""
        theirs = tuple(images.shape[1:])
        if images.dtype != torch.uint8 or theirs != self.shape:
            raise DataError(
                f"This generator draws uint8 images of {format_shape(self.shape)}, and these are {images.dtype} of "
                f"{format_shape(theirs)} (channels, height, width). Train a generator on images of that size."
            )

    def check_prototypes(self, prototypes: Tensor) -> None:
        """Raise `ValueRefused` if prototypes have a shape that the generator does not accept."""
        shape = tuple(prototypes.shape[1:])
        if shape not in self.prototype_shapes:
            accepted = " or ".join(str(list(known)) for known in self.prototype_shapes)
            raise ValueRefused(
                f"these prototypes are of size {list(shape)} each, and this generator takes {accepted}. Use those that "
                "were found with this generator."
            )


@contextmanager
def check_frozen(generator: Generator) -> Iterator[None]:
    """Raise `RunError` if a generator's weights after the block differ from those that were loaded."""
    before = generator.loaded_hash
    yield
    if generator.hash() != before:
        raise RunError("the weights of the generator changed while prototypes were trained: it must stay frozen.")


def hash_weights(weights: Weights) -> str:
    """Return a hash of named tensors that does not depend on the order of the names."""
    lines = "".join(f"{name} {tensor_hash(weights[name])}\n" for name in sorted(weights))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
