"""Noise schedules of diffusion models, and the samplers that remove the noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fedkeep.errors import ConfigError
from fedkeep.generation.diffusion._libraries import diffusers
from fedkeep.options import Options, option

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
        library = diffusers()
        # Pixels start from pure noise. Latents use the latent model's own sampler, whose timesteps are shifted by one.
        spacing, offset = ("trailing", 0) if noise_schedule.clip_sample else ("leading", 1)
        config = noise_schedule._diffusers_config() | {"timestep_spacing": spacing, "steps_offset": offset}
        if self.method == "ddim":
            scheduler = library.DDIMScheduler(
                **config, clip_sample=noise_schedule.clip_sample, set_alpha_to_one=noise_schedule.clip_sample
            )
        elif self.method == "dpm-solver++":  # it has no clip_sample; its threshold of 1 is the same
            scheduler = library.DPMSolverMultistepScheduler(**config, thresholding=noise_schedule.clip_sample)
        else:
            scheduler = library.DDPMScheduler(
                **config, clip_sample=noise_schedule.clip_sample, variance_type="fixed_large"
            )
        scheduler.set_timesteps(self.steps)
        return scheduler
