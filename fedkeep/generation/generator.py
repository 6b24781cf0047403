"""The interface of a generator, a frozen diffusion model that is conditioned on prototypes; its noise and samplers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from fedkeep.data.dataset import format_shape
from fedkeep.errors import ConfigError, DataError, MissingExtra, ValueRefused, require_optional
from fedkeep.models import Shape
from fedkeep.options import Options, option

_WHAT, _EXTRA = "A diffusion generator", "diffusion"


def diffusers() -> Any:
    """Return the module `diffusers`; raise `MissingExtra` with the install line if it is missing."""
    return require_optional("diffusers", _WHAT, _EXTRA)


def transformers() -> Any:
    """Return the module `transformers`; raise `MissingExtra` with the install line if it is missing."""
    return require_optional("transformers", _WHAT, _EXTRA)


def check_installed() -> None:
    """Raise `MissingExtra` if `diffusers` is missing, without the seconds that importing it takes."""
    if find_spec("diffusers") is None:
        raise MissingExtra(_WHAT, _EXTRA)


SamplerMethod = Literal["ddim", "dpm-solver++", "ddpm"]


@dataclass(frozen=True)
class NoiseSchedule(Options):
    """How noisy an image is at timestep t: x_t = sqrt(a_t) x + sqrt(1 - a_t) e; a_t is the product of 1 - beta up to t.

    The default is that of Ho et al. (2020): Denoising diffusion probabilistic models. FedDCL's generator of grey images
    has 500 timesteps. The latent text-to-image model has ``scaled_linear`` betas from 0.00085 to 0.012.
    """

    num_timesteps: int = option(1000, "number of timesteps", low=2)
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = option(
        "linear", "how beta grows: in equal steps, its square root in equal steps, or as a squared cosine requires"
    )
    beta_start: float = option(1e-4, "first beta; the squared cosine ignores it", low=0.0, high=1.0)
    beta_end: float = option(0.02, "last beta; the squared cosine ignores it", low=0.0, high=1.0)
    clip_sample: bool = option(True, "samplers clip images to -1..1; false for latents, which have no bounds")

    def add_noise(self, images: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return images as noisy as the schedule makes them.

        ``images``: Clean images, [b, ...].
        ``noise``: Standard normal noise of the same shape.
        ``timesteps``: int64 [b], in 0..num_timesteps - 1.
        """
        noisy: Tensor = diffusers().DDPMScheduler(**self._diffusers_config()).add_noise(images, noise, timesteps)
        return noisy

    def _diffusers_config(self) -> dict[str, Any]:
        """Return the schedule as keyword arguments of the schedulers of `diffusers`."""
        return {
            "num_train_timesteps": self.num_timesteps,
            "beta_schedule": self.beta_schedule,
            "beta_start": self.beta_start,
            "beta_end": self.beta_end,
        }


@dataclass(frozen=True)
class Sampler(Options):
    """How images are sampled from noise.

    ``ddim`` (Song et al., 2021, eta = 0) and ``dpm-solver++`` (Lu et al., 2022, order 2) use no noise after the first
    and are good in few steps. ``ddpm`` (Ho et al., 2020) adds noise sqrt(beta_t) at every step; FedDCL samples its grey
    images with it, in 500 steps.
    """

    method: SamplerMethod = option("ddim", "solver that removes the noise")
    steps: int = option(50, "calls of the network", low=1)
    guidance: float = option(
        2.0,
        "weight g of e = e_null + g (e_class - e_null) (Ho & Salimans, 2022); 1: no guidance, half the work; the "
        "latent model takes 10",
        low=0.0,
    )

    def scheduler(self, noise_schedule: NoiseSchedule) -> Any:
        """Return a new scheduler of `diffusers` with its timesteps set.

        ``noise_schedule``: The noise schedule that the network was trained with.
        """
        if self.steps > noise_schedule.num_timesteps:
            raise ConfigError(
                f"Sampler.steps is {self.steps}, but the generator knows {noise_schedule.num_timesteps} times only."
            )
        library, clips = diffusers(), noise_schedule.clip_sample
        # Pixels start from pure noise. Latents use the latent model's own sampler, whose timesteps are shifted by one.
        spacing, offset = ("trailing", 0) if clips else ("leading", 1)
        config = noise_schedule._diffusers_config() | {"timestep_spacing": spacing, "steps_offset": offset}
        if self.method == "ddim":
            scheduler = library.DDIMScheduler(**config, clip_sample=clips, set_alpha_to_one=clips)
        elif self.method == "dpm-solver++":  # it has no clip_sample; its threshold of 1 is the same
            scheduler = library.DPMSolverMultistepScheduler(**config, thresholding=clips)
        else:
            scheduler = library.DDPMScheduler(**config, clip_sample=clips, variance_type="fixed_large")
        scheduler.set_timesteps(self.steps)
        return scheduler


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
