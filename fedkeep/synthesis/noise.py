"""The noise that a diffusion model learns to find, and the samplers that take it away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fedkeep.errors import ConfigError
from fedkeep.options import Options, option
from fedkeep.synthesis.libraries import diffusers


@dataclass(frozen=True)
class Noise(Options):
    """How noisy an image is at each time t: x_t = sqrt(a_t) x + sqrt(1 - a_t) e, a_t the product of 1 - beta up to t.

    The default is that of Ho et al. (2020): Denoising diffusion probabilistic models. FedDCL's grey generator has 500
    times; the latent text-to-image model has ``scaled_linear`` betas from 0.00085 to 0.012.
    """

    times: int = option(1000, "number of times", low=2)
    betas: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = option(
        "linear", "how beta grows: in equal steps, its root in equal steps, or as a squared cosine asks"
    )
    first: float = option(1e-4, "first beta; of no meaning for the squared cosine", low=0.0, high=1.0)
    last: float = option(0.02, "last beta, likewise", low=0.0, high=1.0)
    bounded: bool = option(True, "images lie in -1..1 and samplers clip to it; false for latents, which have no bounds")

    def add(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return images [b, ...] as noisy as they are at ``times``, int64 [b] in 0..times - 1."""
        noisy: Tensor = diffusers().DDPMScheduler(**self._common()).add_noise(images, noise, times)
        return noisy

    def _common(self) -> dict[str, Any]:
        """Return the schedule in the words of `diffusers`."""
        return {
            "num_train_timesteps": self.times,
            "beta_schedule": self.betas,
            "beta_start": self.first,
            "beta_end": self.last,
        }


@dataclass(frozen=True)
class Sampler(Options):
    """How images are drawn from noise.

    ``ddim`` (Song et al., 2021, eta = 0) and ``dpm-solver++`` (Lu et al., 2022, order 2) draw nothing after the first
    noise and are good in few steps; ``ddpm`` is Ho et al.'s own, with noise sqrt(beta_t) at every step: FedDCL's grey
    generator samples so, in 500 steps.
    """

    method: Literal["ddim", "dpm-solver++", "ddpm"] = option("ddim", "which solver takes the noise away")
    steps: int = option(50, "times at which the network is asked", low=1)
    guidance: float = option(
        2.0,
        "weight g of e = e_null + g (e_class - e_null) (Ho & Salimans, 2022); 1: none, half the work; the "
        "latent model takes 10",
        low=0.0,
    )

    def scheduler(self, noise: Noise) -> Any:
        """Return a fresh scheduler of `diffusers`, its times set.

        Raises
        ------
        ConfigError
            For more steps than there are times.
        """
        if self.steps > noise.times:
            raise ConfigError(f"Sampler.steps is {self.steps}, but the generator knows {noise.times} times only.")
        library = diffusers()
        # Images: from pure noise on. Latents: as the latent model's own sampler, whose times are shifted by one.
        spacing, offset = ("trailing", 0) if noise.bounded else ("leading", 1)
        common = noise._common() | {"timestep_spacing": spacing, "steps_offset": offset}
        if self.method == "ddim":
            made = library.DDIMScheduler(**common, clip_sample=noise.bounded, set_alpha_to_one=noise.bounded)
        elif self.method == "dpm-solver++":  # has no clip_sample; its threshold of 1 is the same
            made = library.DPMSolverMultistepScheduler(**common, thresholding=noise.bounded)
        else:
            made = library.DDPMScheduler(**common, clip_sample=noise.bounded, variance_type="fixed_large")
        made.set_timesteps(self.steps)
        return made
