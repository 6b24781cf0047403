"""Random numbers for privacy: who does not know the key of 256 bits cannot tell them from true ones.

PyTorch's generators will not do. On a CPU `torch.Generator.manual_seed` keeps 32 bits of a seed, so that whoever has
seen a noised reply can try all seeds; and from some hundred numbers of its Mersenne Twister the others follow.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

KEY_BYTES = 32


class NoiseStream:
    """Numbers that a key stands for, from SHAKE-256. One key is for one use: the same key gives the same numbers.

    ``key``: Of `KEY_BYTES` bytes.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._draws = 0

    def uniform(self, count: int) -> Tensor:
        """Draw numbers between 0 and 1, neither of which is drawn.

        Returns: Float64 [count].
        """
        self._draws += 1
        found = hashlib.shake_256(self._key + self._draws.to_bytes(8, "big")).digest(8 * count)
        if not count:
            return torch.zeros(0, dtype=torch.float64)
        whole = torch.frombuffer(bytearray(found), dtype=torch.int64) & ((1 << 52) - 1)
        # With 52 bits the largest, 1 - 2**-53, is below 1 in float64.
        return (whole.double() + 0.5) * 2.0**-52

    def normal(self, shape: Iterable[int]) -> Tensor:
        """Draw standard normal numbers, by the inverse of their distribution function."""
        sizes = tuple(shape)
        normal: Tensor = torch.special.ndtri(self.uniform(prod(sizes)))
        return normal.view(sizes)


def derive_key(secret: bytes, *parts: object) -> bytes:
    """Derive the key of one use from a secret.

    ``secret``: What nobody else knows.
    ``*parts``: What the key is for. With other parts, the key is another one, which tells nothing about this one. A
        tensor stands for its values.
    Returns: `KEY_BYTES` bytes.
    """
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        if isinstance(part, Tensor):
            found = part.detach().cpu().contiguous()
            data = f"{found.dtype}{tuple(found.shape)}".encode() + found.numpy().tobytes()
        else:
            data = str(part).encode()
        digest.update(len(data).to_bytes(8, "big") + data)  # with lengths, other parts are never the same text
    return digest.digest()
