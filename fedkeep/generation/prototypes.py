"""Prototypes, and images sampled from them, found by clients and averaged (FedDCL); both are kept on disk."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor
from torch.nn.functional import mse_loss

from fedkeep._utils import progress, seeds
from fedkeep._utils.digests import DamagedFile, read_sealed, write_sealed
from fedkeep.data import Data
from fedkeep.data.cache import cache_folder
from fedkeep.errors import DataError, RunError, ValueRefused
from fedkeep.generation.generator import Generator, Sampler
from fedkeep.models.weights import tensor_hash
from fedkeep.options import Options, as_table, option

AverageRule = Literal["uniform", "holders", "count"]
"""Which clients count in the mean of a class's prototypes: all, those with examples of it, or these by their number."""


@dataclass(frozen=True)
class PrototypeSearch(Options):
    """How a client searches for prototypes (FedDCL, eq. 4).

    FedDCL names steps and batches, but no optimizer. The code of DDDR, on which it builds, has AdamW with rate 0.02.
    Its weight decay of 0.01 would also shrink the prototypes of classes that a client does not hold.
    """

    steps: int = option(50, "optimizer steps in a round", low=1)
    batch_size: int = option(128, "images a step; 12 for the latent model", low=1)


def search_prototypes(
    generator: Generator,
    prototypes: Tensor,
    images: Tensor,
    labels: Tensor,
    settings: PrototypeSearch,
    rng: torch.Generator,
) -> tuple[Tensor, list[float]]:
    """Search for the prototypes with which a frozen generator denoises images best.

    The loss is the mean squared error of the noise, E || e - e(x_t, t, p_y) ||^2 / d (FedDCL, eq. 4). Batches mix all
    classes, and only the prototypes are trained.

    ``generator``: Its weights do not change: they need no gradient.
    ``prototypes``: [classes, ...], where the search begins; not modified.
    ``images``: uint8 [n, channels, height, width] of the generator's shape; n may be 0.
    ``labels``: int64 [n], the row of each image's prototype.
    ``settings``: Steps, batch size and optimizer.
    ``rng``: Draws batches, timesteps and noise, on the CPU.
    Returns: The prototypes, those of classes without an image as they were given; and the loss of each step.
    """
    generator.check_images(images)
    generator.check_prototypes(prototypes)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(prototypes):
        raise DataError(f"labels must lie in 0..{len(prototypes) - 1}, one row of the prototypes for each class.")
    trained = prototypes.detach().to(generator.device, torch.float32, copy=True).requires_grad_(True)
    losses: list[float] = []
    if len(images):
        optimizer = torch.optim.AdamW([trained], lr=0.02, weight_decay=0.0)
        for _ in range(settings.steps):
            loss = _denoising_loss(generator, trained, images, labels, settings.batch_size, rng)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return trained.detach().to(prototypes.device), losses


def _denoising_loss(
    generator: Generator, prototypes: Tensor, images: Tensor, labels: Tensor, batch_size: int, rng: torch.Generator
) -> Tensor:
    chosen = torch.randint(len(images), (batch_size,), generator=rng)
    clean = generator.encode(images[chosen.to(images.device)], rng)
    timesteps = torch.randint(generator.noise_schedule.num_timesteps, (batch_size,), generator=rng).to(generator.device)
    noise = torch.randn(clean.shape, generator=rng).to(generator.device)
    rows = labels[chosen.to(labels.device)].to(generator.device)
    conditioning = generator.conditioning(prototypes[rows], rng)
    noisy = generator.noise_schedule.add_noise(clean, noise, timesteps)
    return mse_loss(generator.predict_noise(noisy, timesteps, conditioning), noise)


def average_prototypes(sent: Tensor, replies: Sequence[Tensor], counts: Sequence[Tensor], rule: AverageRule) -> Tensor:
    """Return the mean of the clients' prototypes (FedDCL, eq. 5). A class that nobody holds keeps what was sent.

    ``uniform`` is eq. 5 as printed: all clients count, and those without examples count with what they were sent.
    ``holders`` and ``count`` leave these out.

    ``sent``: [classes, ...], what the server sent to the clients.
    ``replies``: Each client's prototypes, [classes, ...].
    ``counts``: Each client's number of examples of each class, int64 [classes].
    """
    for reply, count in zip(replies, counts, strict=True):
        if reply.shape != sent.shape or count.shape != sent.shape[:1]:
            raise ValueRefused(
                f"prototypes {list(reply.shape)} with counts {list(count.shape)} cannot be averaged with those of "
                f"{list(sent.shape)}: all clients must use one generator, and count every class."
            )
    if not replies:
        return sent
    held = torch.stack(list(counts)).to(sent.device)
    by_rule = {"uniform": torch.ones_like(held), "holders": held > 0, "count": held}[rule]
    shape = (len(replies), len(sent), *(1,) * (sent.dim() - 1))
    weights = by_rule.to(torch.float64).reshape(shape)
    total = weights.sum(0)
    mean = (weights * torch.stack(list(replies)).double()).sum(0) / total.clamp(min=1)
    is_held = (held.sum(0) > 0).reshape(shape[1:])
    return torch.where(is_held, mean.to(sent.dtype), sent)


def check_held(counts: Tensor, label_names: Sequence[str]) -> None:
    """Raise `DataError` if no client holds an example of some class, so that no search can find its prototype.

    ``counts``: int64 [classes], of all clients together.
    """
    missing = [name for name, count in zip(label_names, counts.tolist(), strict=True) if not count]
    if missing:
        raise DataError(
            f"no client holds an example of {', '.join(map(repr, missing))}, so that no prototype can be found. Leave "
            "such classes out, or use another partition."
        )


def sample(
    generator: Generator,
    prototypes: Tensor,
    rows: Sequence[int],
    image_seeds: Sequence[int],
    sampler: Sampler,
    *,
    batch_size: int = 256,
    on_images: Callable[[int], None] = lambda done: None,
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


log = logging.getLogger(__name__)

VERSION = 1
"""Raised when the same settings would give other images."""

MAX_BYTES = 4e9
"""Limit of the kept images; of prototypes, a tenth. Images generated anew in every round would fill a disk."""


def cached_images(
    generator: Generator, prototypes: Tensor, labels: Sequence[int], count: int, sampler: Sampler, *, seed: int = 0
) -> Data:
    """Return images of classes, sorted by class; they are kept in the cache folder (``FEDKEEP_CACHE``), a file a class.

    The key of an entry is the hash of the generator's weights, the hash of the prototype, the sampler's settings, the
    class, the number of images, and the seed. The first images of a class are the same for any number of images.

    ``prototypes``: [classes, ...].
    Returns: ``"input"``, uint8 [classes * count, channels, height, width], and ``"label"``, int64.
    """
    generator.check_prototypes(prototypes)
    parts = [torch.zeros(0, *generator.shape, dtype=torch.uint8)]
    for row, label in enumerate(labels):

        def report(num_images: int, done: int = row * count) -> None:
            progress.report("images generated", done + num_images, len(labels) * count)

        key = {
            "version": VERSION,
            "generator": generator.loaded_hash,
            "device": generator.device.type,  # whose arithmetic rounds differently
            "prototype": tensor_hash(prototypes[row]),
            "sampler": as_table(sampler),
            "class": int(label),
            "count": count,
            "seed": seed,
        }
        path = _entry("generated", key)
        images = _read(path, "image", (count, *generator.shape))
        if images is None:
            image_seeds = [seeds.derive(seed, f"image of class {label}", use=use) for use in range(count)]
            images = sample(generator, prototypes, [row] * count, image_seeds, sampler, on_images=report)
            try:
                write_sealed(path, tensor_bytes({"image": images.contiguous()}, metadata={"key": json.dumps(key)}))
            except OSError as error:
                raise RunError(
                    f"generated images cannot be kept in {path.parent} ({error.strerror or error}). Make room for "
                    f"{images.numel() / 1e6:.1f} MB a class there, or set FEDKEEP_CACHE to another folder; what is "
                    "there already is used again."
                ) from error
            _evict(path.parent, MAX_BYTES)
        parts.append(images)
        report(count)
    return {"input": torch.cat(parts), "label": torch.tensor(labels, dtype=torch.int64).repeat_interleave(count)}


def cached_search(
    generator: Generator,
    prototypes: Tensor,
    images: Tensor,
    labels: Tensor,
    settings: PrototypeSearch,
    rng: torch.Generator,
) -> Tensor:
    """Return the prototypes that `search_prototypes` finds; ``rng`` may stay as it is.

    Results are kept in the cache folder, so that methods that share a search search once. An entry is found by hashes
    of all that decides it; examples are not kept themselves.
    """
    key = {
        "version": VERSION,
        "generator": generator.loaded_hash,
        "device": generator.device.type,
        "sizes": [list(size) for size in generator.prototype_shapes],
        "settings": as_table(settings),
        "random": tensor_hash(rng.get_state()),
        "begin": tensor_hash(prototypes),
        "images": tensor_hash(images),
        "labels": tensor_hash(labels),
    }
    path = _entry("prototypes", key)
    found = _read(path, "prototypes", tuple(prototypes.shape))
    if found is not None:
        return found.to(prototypes.device)
    found, _ = search_prototypes(generator, prototypes, images, labels, settings, rng)
    # Unlike images, of which there are many, prototypes are soon searched again where they cannot be kept.
    with suppress(OSError):
        write_sealed(path, tensor_bytes({"prototypes": found.cpu().contiguous()}))
        _evict(path.parent, MAX_BYTES / 10)
    return found


def _entry(folder: str, key: dict[str, Any]) -> Path:
    name = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()
    return cache_folder() / folder / f"{name}.safetensors"


def _read(path: Path, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """Return the tensor of an entry, or None if there is none that is complete."""
    try:
        if not path.is_file():
            return None
        read = read_tensors(read_sealed(path))[name]
        if tuple(read.shape) != shape:
            raise ValueError(f"{name} of shape {list(read.shape)}")
        with suppress(OSError):  # somebody else's cache may be read-only
            os.utime(path)  # the time of last use, for `_evict`
        return read
    except (OSError, DamagedFile, SafetensorError, KeyError, ValueError) as error:
        log.warning("The %s in %s cannot be read (%s) and is made again.", name, path, error)
        return None


def _evict(folder: Path, max_bytes: float) -> None:
    """Remove the least recently used entries, and files that killed processes left, until the rest is small enough."""
    found = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process may evict too
            if path.suffix in (".safetensors", ".tmp"):
                found.append((path, path.stat()))
    for path, status in sorted(found, key=lambda entry: entry[1].st_mtime_ns, reverse=True):
        max_bytes -= status.st_size
        if max_bytes < 0:
            with suppress(OSError):  # another user's, in a folder of all
                path.unlink(missing_ok=True)
