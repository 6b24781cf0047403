"""Randomness has names.

Every random draw comes from a generator derived from the run's seed and the name of what it is for. So the order of
work, a restart, the number of workers and the engine change no result, and two methods with one seed share their
partition, initial weights, cohorts and batch orders. Nothing here, or anywhere in the package, seeds a global
generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, purpose: str, *, task: int = 0, round: int = 0, client: str = "", use: int = 0) -> int:
    """Return the 63-bit seed of one named use of randomness.

    Parameters
    ----------
    seed : the run's seed.
    purpose : what the randomness is for, such as ``"partition"``, ``"cohort"`` or ``"batches"``.
    task, round : where in the run, both counted from 1; 0 where it does not apply.
    client : the client's name in the recipe; empty for the server.
    use : which use of this purpose within the round, counted from 0.
    """
    # Length prefixes make the encoding injective: no purpose or client name can imitate another's fields.
    fields = [str(seed), purpose, str(task), str(round), client, str(use)]
    text = "".join(f"{len(field)}:{field}" for field in fields)
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"fedkeep").digest()
    return int.from_bytes(digest, "big") >> 1


def generator(
    seed: int, purpose: str, *, task: int = 0, round: int = 0, client: str = "", use: int = 0
) -> torch.Generator:
    """Return a fresh CPU generator for one named use of randomness (see `derive`)."""
    named = torch.Generator()
    named.manual_seed(derive(seed, purpose, task=task, round=round, client=client, use=use))
    return named


def numpy_generator(
    seed: int, purpose: str, *, task: int = 0, round: int = 0, client: str = "", use: int = 0
) -> np.random.Generator:
    """Return the same for NumPy, where PyTorch lacks the distribution (see `derive`)."""
    return np.random.Generator(np.random.PCG64(derive(seed, purpose, task=task, round=round, client=client, use=use)))


@contextmanager
def temporary_seed(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed PyTorch's default generators for the block only, and leave them as they were.

    Layer constructors and dropout draw from the default generator and take no other, so it is lent to them.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for cuda in devices:
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(seed)
        yield
