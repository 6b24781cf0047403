"""Caches on disk: generated images, and prototypes that a search found, so that neither is computed twice."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from fedkeep._utils import progress, seeds
from fedkeep._utils.digests import DamagedFile, read_sealed, write_sealed
from fedkeep.data import Data
from fedkeep.data.cache import cache_folder
from fedkeep.errors import RunError
from fedkeep.generation.diffusion.generator import Generator
from fedkeep.generation.diffusion.prototypes import PrototypeSearch, PrototypeSearchResult, search_prototypes
from fedkeep.generation.diffusion.sampling import sample
from fedkeep.generation.diffusion.schedules import Sampler
from fedkeep.models.weights import tensor_hash
from fedkeep.options import as_table

log = logging.getLogger(__name__)

VERSION = 1
"""Raised when the same settings would give other images."""

MAX_BYTES = 4e9
"""Default limit of the cache: images generated anew in every round of a long run would fill a disk."""

OnProgress = Callable[[int, int], None]
"""Called with the number of images so far, and of all."""


@dataclass(frozen=True)
class ImageCache:
    """Generates images of classes and keeps them, one file a class.

    The key of an entry is the hash of the generator's weights, the hash of the prototype, the sampler's settings, the
    class, the number of images, and the seed. The first images of a class are the same for any number of images.

    ``folder``: Where the files are; by default ``generated`` in the cache folder (``FEDKEEP_CACHE``).
    ``max_bytes``: Limit of all files together. Beyond it, the least recently used are removed.
    """

    folder: Path | None = None
    max_bytes: float = MAX_BYTES

    @property
    def path(self) -> Path:
        """The folder in use."""
        return cache_folder() / "generated" if self.folder is None else self.folder

    def images(
        self,
        generator: Generator,
        prototypes: Tensor,
        labels: Sequence[int],
        count: int,
        sampler: Sampler,
        *,
        seed: int = 0,
        batch_size: int = 256,
        on_images: OnProgress | None = None,
    ) -> Data:
        """Return images of classes, sorted by class; those in the cache are read.

        ``prototypes``: [classes, ...].
        ``sampler``: How noise is removed.
        ``on_images``: Called with the number of images so far, and of all.
        Returns: ``"input"``, uint8 [classes * count, channels, height, width], and ``"label"``, int64.
        """
        generator.check_prototypes(prototypes)
        weights_hash, parts = generator.loaded_hash, []
        for row, label in enumerate(labels):
            done = row * count

            def report(num_images: int, done: int = done) -> None:
                progress.report("images generated", done + num_images, len(labels) * count)
                if on_images is not None:
                    on_images(done + num_images, len(labels) * count)

            key = {
                "version": VERSION,
                "generator": weights_hash,
                "device": generator.device.type,  # whose arithmetic rounds differently
                "prototype": tensor_hash(prototypes[row]),
                "sampler": as_table(sampler),
                "class": int(label),
                "count": count,
                "seed": seed,
            }
            path = self.path / f"{_hash_key(key)}.safetensors"
            images = _read(path, (count, *generator.shape))
            if images is None:
                image_seeds = [seeds.derive(seed, f"image of class {label}", use=use) for use in range(count)]
                images = sample(
                    generator, prototypes, [row] * count, image_seeds, sampler, batch_size=batch_size, on_images=report
                )
                _write(path, images, key)
                _evict(path.parent, self.max_bytes)
            report(count)
            parts.append(images)
        images = torch.cat(parts) if parts else torch.zeros(0, *generator.shape, dtype=torch.uint8)
        return {"input": images, "label": torch.tensor(labels, dtype=torch.int64).repeat_interleave(count)}


@dataclass(frozen=True)
class PrototypeCache:
    """Searches for prototypes, and keeps the results on disk: methods that share a search then search once.

    An entry is found by the hash of the generator's weights and its device, the settings, the state of the random
    numbers, and the hashes of the start and of the examples, which are not kept themselves.

    ``folder``: Where results are kept; by default ``prototypes`` in the cache folder (``FEDKEEP_CACHE``).
    ``max_bytes``: Bytes that may stay there; beyond them the least recently used entries go.
    """

    folder: Path | None = None
    max_bytes: float = MAX_BYTES / 10

    @property
    def path(self) -> Path:
        """The folder in use."""
        return cache_folder() / "prototypes" if self.folder is None else self.folder

    def search(
        self,
        generator: Generator,
        prototypes: Tensor,
        images: Tensor,
        labels: Tensor,
        settings: PrototypeSearch,
        rng: torch.Generator,
    ) -> PrototypeSearchResult:
        """Return what `search_prototypes` returns for these arguments; ``rng`` may stay as it is."""
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
        path = self.path / f"{_hash_key(key)}.safetensors"
        result = _read_prototypes(path, prototypes)
        if result is None:
            result = search_prototypes(generator, prototypes, images, labels, settings, rng)
            columns = {"prototypes": result.prototypes, "counts": result.counts, "losses": torch.tensor(result.losses)}
            # Unlike images, of which there are many, prototypes are soon searched again where they cannot be kept.
            with suppress(OSError):
                write_sealed(path, tensor_bytes({name: t.cpu().contiguous() for name, t in columns.items()}))
                _evict(path.parent, self.max_bytes)
        return result


def _read_prototypes(path: Path, prototypes: Tensor) -> PrototypeSearchResult | None:
    """Return an entry, or None if there is none that is complete."""
    try:
        if not path.is_file():
            return None
        read = read_tensors(read_sealed(path))
        if read["prototypes"].shape != prototypes.shape or read["counts"].shape != prototypes.shape[:1]:
            raise ValueError(f"it holds prototypes {list(read['prototypes'].shape)}")
        with suppress(OSError):
            os.utime(path)
        losses = tuple(read["losses"].tolist())
        return PrototypeSearchResult(read["prototypes"].to(prototypes.device), read["counts"], losses)
    except (OSError, DamagedFile, SafetensorError, KeyError, ValueError) as error:
        log.warning("The prototypes in %s cannot be read (%s); they are searched again.", path, error)
        return None


def _read(path: Path, shape: tuple[int, ...]) -> Tensor | None:
    """Return an entry, or None if there is none that is complete."""
    try:
        if not path.is_file():
            return None
        images = read_tensors(read_sealed(path))["image"]
        if images.dtype != torch.uint8 or tuple(images.shape) != shape:
            raise ValueError(f"it holds {images.dtype} {list(images.shape)}")
        with suppress(OSError):  # somebody else's cache may be read-only
            os.utime(path)  # the time of last use, for `_evict`
        return images
    except (OSError, DamagedFile, SafetensorError, KeyError, ValueError) as error:
        log.warning("The generated images in %s cannot be read (%s); they are made again.", path, error)
        return None


def _write(path: Path, images: Tensor, key: dict[str, Any]) -> None:
    try:
        write_sealed(path, tensor_bytes({"image": images.contiguous()}, metadata={"key": json.dumps(key)}))
    except OSError as error:
        raise RunError(
            f"generated images cannot be kept in {path.parent} ({error.strerror or error}). Make room for "
            f"{images.numel() / 1e6:.1f} MB a class there, or set FEDKEEP_CACHE to another folder; what is there "
            "already is used again."
        ) from error


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
            path.unlink(missing_ok=True)


def _hash_key(key: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()
