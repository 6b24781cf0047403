"""Random generators that are derived from the run's seed and a name.

Every random number comes from a generator that is derived from the run's seed and the purpose of the number. So the
order of work, a restart, the number of workers and the executor do not change any result, and two methods with the
same seed have the same partition, initial weights, cohorts and batch orders. The package never seeds a global
generator.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, purpose: str, *, task: int = 0, round: int = 0, client: str = "", use: int = 0) -> int:
    """Derive a seed for one use of randomness.

    ``purpose``: What the random numbers are for, such as ``"partition"``, ``"cohort"`` or ``"batches"``.
    ``task``, ``round``: Where in the run they are used, both counted from 1; 0 where it does not apply.
    ``client``: The client's id; empty for the server.
    ``use``: Number of earlier uses for the same purpose within the round.
    """
    # With length prefixes, different arguments never give the same text.
    fields = [str(seed), purpose, str(task), str(round), client, str(use)]
    text = "".join(f"{len(field)}:{field}" for field in fields)
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"fedkeep").digest()
    return int.from_bytes(digest, "big") >> 1


def rng(seed: int, purpose: str, *, task: int = 0, round: int = 0, client: str = "", use: int = 0) -> torch.Generator:
    """Return a new PyTorch generator on the CPU for one use of randomness."""
    return torch.Generator().manual_seed(derive(seed, purpose, task=task, round=round, client=client, use=use))


def numpy_rng(seed: int, purpose: str, *, use: int = 0) -> np.random.Generator:
    """Return a new NumPy generator for one use of randomness, for distributions that PyTorch lacks."""
    return np.random.Generator(np.random.PCG64(derive(seed, purpose, use=use)))


@contextmanager
def temporary_seed(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed PyTorch's default generators within the block, and restore their states afterwards.

    This is for layer constructors and dropout, which can only use the default generators.

    ``device``: A GPU whose default generator is seeded too.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for cuda in devices:
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(seed)
        yield
