"""Sampling images from prototypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeep.generation.diffusion.generator import Generator
from fedkeep.generation.diffusion.schedules import Sampler

OnImages = Callable[[int], None]
"""Called after every batch with the number of images so far."""


def sample(
    generator: Generator,
    prototypes: Tensor,
    rows: Sequence[int],
    image_seeds: Sequence[int],
    sampler: Sampler,
    *,
    batch_size: int = 256,
    on_images: OnImages | None = None,
) -> Tensor:
    """Sample one image for each seed.

    All randomness of an image comes from its own seed. So an image does not depend on the batch size, except that
    networks round differently for other batches: a few pixels may differ by one level.

    ``prototypes``: [classes, ...], of a shape that the generator accepts.
    ``sampler``: How noise is removed.
    ``batch_size``: Images at once; guidance evaluates the network on twice as many.
    ``on_images``: Called after every batch with the number of images so far.
    Returns: uint8 [images, channels, height, width], on the CPU.
    """
    generator.check_prototypes(prototypes)
    batches: list[Tensor] = [torch.zeros(0, *generator.shape, dtype=torch.uint8)]
    with torch.no_grad():
        conditioning = generator.conditioning(prototypes.to(generator.device))
        for start in range(0, len(rows), batch_size):
            chosen = torch.tensor(rows[start : start + batch_size], device=generator.device)
            seeds = image_seeds[start : start + batch_size]
            batches.append(_sample_batch(generator, conditioning[chosen], seeds, sampler).cpu())
            if on_images is not None:
                on_images(start + len(chosen))
    return torch.cat(batches)


def _sample_batch(generator: Generator, conditioning: Tensor, image_seeds: Sequence[int], sampler: Sampler) -> Tensor:
    scheduler = sampler.scheduler(generator.noise_schedule)
    rngs = [torch.Generator().manual_seed(seed) for seed in image_seeds]
    noise = [torch.randn(generator.sample_shape, generator=rng) for rng in rngs]
    samples = torch.stack(noise).to(generator.device) * scheduler.init_noise_sigma
    # Only ddpm adds noise after the first.
    step_options: dict[str, Any] = {"generator": rngs} if sampler.method == "ddpm" else {}
    for timestep in scheduler.timesteps:
        scaled = scheduler.scale_model_input(samples, timestep)
        predicted = _guided_noise(generator, scaled, timestep, conditioning, sampler.guidance)
        samples = scheduler.step(predicted, timestep, samples, **step_options).prev_sample
    return generator.decode(samples)


def _guided_noise(
    generator: Generator, noisy: Tensor, timestep: Tensor, conditioning: Tensor, guidance: float
) -> Tensor:
    """Return the predicted noise with classifier-free guidance."""
    timesteps = timestep.to(noisy.device).expand(len(noisy))
    if guidance == 1:
        return generator.predict_noise(noisy, timesteps, conditioning)
    both = torch.cat((conditioning, generator.null_conditioning().expand_as(conditioning)))
    predicted = generator.predict_noise(torch.cat((noisy, noisy)), torch.cat((timesteps, timesteps)), both)
    of_class, of_null = predicted.chunk(2)
    return of_null + guidance * (of_class - of_null)
