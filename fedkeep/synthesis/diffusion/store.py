"""Generated images and found prototypes on disk, so that none is generated or looked for twice."""

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

from fedkeep import doing, seeds
from fedkeep.data import Data
from fedkeep.data.cache import cache_folder
from fedkeep.errors import RunError
from fedkeep.files import write_whole
from fedkeep.models.weights import digest
from fedkeep.options import as_table
from fedkeep.synthesis.diffusion.generator import Generator
from fedkeep.synthesis.diffusion.noise import Sampler
from fedkeep.synthesis.diffusion.prototypes import Inversion, Inverted, invert
from fedkeep.synthesis.diffusion.sampling import sample

log = logging.getLogger(__name__)

VERSION = 1
"""Raised when the same settings would give other images."""

MOST = 4e9
"""Bytes that are kept: images drawn anew in every round of a long run would fill a disk."""

OnClass = Callable[[int, int], None]
"""Told how many images of how many there are."""


@dataclass(frozen=True)
class ImageStore:
    """Draws images of classes and keeps them, one file a class.

    An entry is found by the hash of the generator's weights, the hash of the prototype, the sampler's settings, the
    class, how many images, and the seed. The first images of a class are the same however many are asked for.

    Parameters
    ----------
    folder : where; by default ``generated`` in the cache folder (``FEDKEEP_CACHE``).
    most : bytes that may stay there; beyond them goes what was used longest ago.
    """

    folder: Path | None = None
    most: float = MOST

    @property
    def place(self) -> Path:
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
        on_images: OnClass | None = None,
    ) -> Data:
        """Return images of classes, from disk where they are, sorted by class.

        Parameters
        ----------
        prototypes : [classes, ...].
        labels : the number of each prototype's class, which is what its images are labelled with.
        count : images of each class.
        seed : the run's seed.

        Returns
        -------
        ``"image"``, uint8 [classes * count, channels, height, width], and ``"label"``, int64.

        Raises
        ------
        ValueRefused
            For prototypes of another size than the generator takes.
        RunError
            If the images cannot be kept, such as on a full disk; nothing half written stays.
        """
        generator.check_prototypes(prototypes)
        weights, parts = generator.loaded_hash, []
        for row, label in enumerate(labels):
            done = row * count

            def told(images: int, done: int = done) -> None:
                doing.say("images drawn", done + images, len(labels) * count)
                if on_images is not None:
                    on_images(done + images, len(labels) * count)

            key = {
                "version": VERSION,
                "generator": weights,
                "prototype": digest(prototypes[row]),
                "sampler": as_table(sampler),
                "class": int(label),
                "count": count,
                "seed": seed,
            }
            path = self.place / f"{_digest(key)}.safetensors"
            images = _read(path, (count, *generator.shape))
            if images is None:
                image_seeds = [seeds.derive(seed, f"image of class {label}", use=use) for use in range(count)]
                images = sample(
                    generator, prototypes, [row] * count, image_seeds, sampler, batch_size=batch_size, on_images=told
                )
                _write(path, images, key)
                _make_room(path.parent, self.most)
            told(count)
            parts.append(images)
        images = torch.cat(parts) if parts else torch.zeros(0, *generator.shape, dtype=torch.uint8)
        return {"image": images, "label": torch.tensor(labels, dtype=torch.int64).repeat_interleave(count)}


@dataclass(frozen=True)
class PrototypeStore:
    """Looks for prototypes as `invert` does, and keeps what was found: methods that share a search then search once.

    An entry is found by the hash of the generator's weights and its device, the settings, the state of the random
    numbers, and the hashes of where the search begins and of the examples, which are not kept themselves.

    Parameters
    ----------
    folder : where; by default ``prototypes`` in the cache folder (``FEDKEEP_CACHE``).
    most : bytes that may stay there; beyond them goes what was used longest ago.
    """

    folder: Path | None = None
    most: float = MOST / 10

    @property
    def place(self) -> Path:
        """The folder in use."""
        return cache_folder() / "prototypes" if self.folder is None else self.folder

    def inverted(
        self,
        generator: Generator,
        prototypes: Tensor,
        images: Tensor,
        labels: Tensor,
        settings: Inversion,
        rng: torch.Generator,
    ) -> Inverted:
        """Return what `invert` does, whose arguments these are; ``rng`` may stay as it is."""
        key = {
            "version": VERSION,
            "generator": generator.loaded_hash,
            "device": generator.device.type,
            "sizes": [list(size) for size in generator.prototype_sizes],
            "settings": as_table(settings),
            "random": digest(rng.get_state()),
            "begin": digest(prototypes),
            "images": digest(images),
            "labels": digest(labels),
        }
        path = self.place / f"{_digest(key)}.safetensors"
        found = _found(path, prototypes)
        if found is None:
            found = invert(generator, prototypes, images, labels, settings, rng)
            columns = {"prototypes": found.prototypes, "counts": found.counts, "losses": torch.tensor(found.losses)}
            # Unlike images, of which there are many, they are soon found again where they cannot be kept.
            with suppress(OSError):
                write_whole(path, tensor_bytes({name: t.cpu().contiguous() for name, t in columns.items()}))
                _make_room(path.parent, self.most)
        return found


def _found(path: Path, prototypes: Tensor) -> Inverted | None:
    """Return an entry, or None where there is none, or none that is whole."""
    try:
        if not path.is_file():
            return None
        read = read_tensors(path.read_bytes())
        if read["prototypes"].shape != prototypes.shape or read["counts"].shape != prototypes.shape[:1]:
            raise ValueError(f"it holds prototypes {list(read['prototypes'].shape)}")
        with suppress(OSError):
            os.utime(path)
        return Inverted(read["prototypes"].to(prototypes.device), read["counts"], tuple(read["losses"].tolist()))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        log.warning("The prototypes in %s cannot be read (%s); they are looked for again.", path, error)
        return None


def _read(path: Path, shape: tuple[int, ...]) -> Tensor | None:
    """Return an entry, or None where there is none, or none that is whole."""
    try:
        if not path.is_file():
            return None
        images = read_tensors(path.read_bytes())["image"]
        if images.dtype != torch.uint8 or tuple(images.shape) != shape:
            raise ValueError(f"it holds {images.dtype} {list(images.shape)}")
        with suppress(OSError):  # a cache that others filled may be read-only
            os.utime(path)  # used now
        return images
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        log.warning("The generated images in %s cannot be read (%s); they are made again.", path, error)
        return None


def _write(path: Path, images: Tensor, key: dict[str, Any]) -> None:
    try:
        write_whole(path, tensor_bytes({"image": images.contiguous()}, metadata={"key": json.dumps(key)}))
    except OSError as error:
        raise RunError(
            f"generated images cannot be kept in {path.parent} ({error.strerror or error}). Make room for "
            f"{images.numel() / 1e6:.1f} MB a class there, or set FEDKEEP_CACHE to another folder; what is there "
            "already is used again."
        ) from error


def _make_room(folder: Path, most: float) -> None:
    """Remove the entries that were used longest ago, and what kills left of any, until the rest is small enough."""
    found = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process may do the same
            if path.suffix in (".safetensors", ".tmp"):
                found.append((path, path.stat()))
    for path, status in sorted(found, key=lambda entry: entry[1].st_mtime_ns, reverse=True):
        most -= status.st_size
        if most < 0:
            path.unlink(missing_ok=True)


def _digest(key: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()
