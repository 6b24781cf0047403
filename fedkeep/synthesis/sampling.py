"""Images from prototypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeep.synthesis.generator import Generator
from fedkeep.synthesis.noise import Sampler

OnImages = Callable[[int], None]
"""Told after every batch how many images are drawn."""


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
    """Draw one image for each seed.

    All that is random about an image comes from its own seed. So it does not depend on the batch size, except that
    networks round differently for other batches: here and there a pixel is off by a level.

    Parameters
    ----------
    generator : draws. prototypes : [classes, ...], of its size.
    rows : which prototype each image is drawn of. image_seeds : as many.
    batch_size : images at once; guidance asks for twice as many.

    Returns
    -------
    uint8 [images, channels, height, width], on the CPU.

    Raises
    ------
    ValueRefused
        For prototypes of another size.
    ConfigError
        For more steps than the generator knows times.
    """
    generator.check_prototypes(prototypes)
    parts: list[Tensor] = [torch.zeros(0, *generator.shape, dtype=torch.uint8)]
    with torch.no_grad():
        told = generator.conditions(prototypes.to(generator.device))
        for start in range(0, len(rows), batch_size):
            chosen = torch.tensor(rows[start : start + batch_size], device=generator.device)
            parts.append(_batch(generator, told[chosen], image_seeds[start : start + batch_size], sampler).cpu())
            if on_images is not None:
                on_images(start + len(chosen))
    return torch.cat(parts)


def _batch(generator: Generator, told: Tensor, image_seeds: Sequence[int], sampler: Sampler) -> Tensor:
    scheduler = sampler.scheduler(generator.noise)
    rngs = [torch.Generator().manual_seed(seed) for seed in image_seeds]
    noise = [torch.randn(generator.drawn, generator=rng) for rng in rngs]
    drawn = torch.stack(noise).to(generator.device) * scheduler.init_noise_sigma
    random: dict[str, Any] = {"generator": rngs} if sampler.method == "ddpm" else {}  # the others draw nothing more
    for time in scheduler.timesteps:
        seen = scheduler.scale_model_input(drawn, time)
        found = _guided(generator, seen, time, told, sampler.guidance)
        drawn = scheduler.step(found, time, drawn, **random).prev_sample
    return generator.decode(drawn)


def _guided(generator: Generator, noisy: Tensor, time: Tensor, told: Tensor, guidance: float) -> Tensor:
    """Return the predicted noise, moved away from what is predicted for no class."""
    times = time.to(noisy.device).expand(len(noisy))
    if guidance == 1:
        return generator.predict(noisy, times, told)
    both = torch.cat((told, generator.null().expand_as(told)))
    named, null = generator.predict(torch.cat((noisy, noisy)), torch.cat((times, times)), both).chunk(2)
    return null + guidance * (named - null)
