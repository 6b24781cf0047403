"""Random numbers for privacy: who does not know the key of 256 bits cannot tell them from true ones.

PyTorch's generators will not do. On a CPU `torch.Generator.manual_seed` keeps 32 bits of a seed, so that whoever has
seen a noised reply can try all seeds; and from some hundred numbers of its Mersenne Twister the others follow.
"""

import hashlib
import hmac
from collections.abc import Iterable
from fractions import Fraction
from math import floor, frexp, ldexp, prod

import torch
from torch import Tensor

KEY_BYTES = 32
GRID_BITS = 20
"""Of noise on a grid: its step is at most the standard deviation over 2 to this power."""


class NoiseStream:
    """Numbers that a key of `KEY_BYTES` bytes stands for, from SHAKE-256. One key is for one use.

    `laplace` follows its distribution exactly, with whole numbers only (Canonne, Kamath and Steinke, 2020, "The
    discrete Gaussian for differential privacy"). `gaussian` has 52 random bits a number.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._draws = 0

    def _bytes(self, count: int) -> bytes:
        self._draws += 1
        return hashlib.shake_256(self._key + self._draws.to_bytes(8, "big")).digest(count)

    def uniform(self, count: int) -> Tensor:
        """Draw numbers between 0 and 1, neither of which is drawn, float64 [count]."""
        found = self._bytes(8 * count)
        if not count:
            return torch.zeros(0, dtype=torch.float64)
        whole = torch.frombuffer(bytearray(found), dtype=torch.int64) & ((1 << 52) - 1)
        # With 52 bits the largest, 1 - 2**-53, is below 1 in float64.
        return (whole.double() + 0.5) * 2.0**-52

    def normal(self, shape: Iterable[int]) -> Tensor:
        """Draw standard normal numbers, float64, by the inverse of their distribution function; the largest is 8.2."""
        sizes = tuple(shape)
        normal: Tensor = torch.special.ndtri(self.uniform(prod(sizes)))
        return normal.view(sizes)

    def gaussian(self, exact: Tensor, deviation: float) -> Tensor:
        """Put normal noise on a tensor, on a grid that the deviation alone determines.

        The last bits of a sum of floating-point numbers would tell which exact number the noise was put on.
        """
        noise = deviation * self.normal(exact.shape)
        if not deviation:
            return exact
        step = ldexp(1.0, frexp(deviation)[1] - 1 - GRID_BITS)
        return ((exact.detach().cpu().double() + noise) / step).round().mul(step).to(exact)

    def below(self, limit: int) -> int:
        """Draw a whole number from 0 to ``limit`` - 1, each with the same probability."""
        bits = (limit - 1).bit_length()
        while True:
            found = int.from_bytes(self._bytes((bits + 7) // 8), "big") & ((1 << bits) - 1)
            if found < limit:
                return found

    def laplace(self, rate: Fraction) -> int:
        """Draw a whole number x with a probability that is proportional to exp(-rate |x|)."""
        while True:
            remainder = self.below(rate.denominator)
            if not self._exp(Fraction(remainder, rate.denominator)):
                continue
            quotient = 0
            while self._exp(Fraction(1)):
                quotient += 1
            size = (remainder + rate.denominator * quotient) // rate.numerator
            if not self.below(2):
                return size
            if size:
                return -size

    def _exp(self, x: Fraction) -> bool:
        """Draw True with the probability exp(-x), for x from 0 to 1."""
        terms = 1
        while self.below(terms * x.denominator) < x.numerator:
            terms += 1
        return terms % 2 == 1


def laplace_on_grid(exact: float, sensitivity: float, epsilon: float, noise: NoiseStream, bits: int = 16) -> float:
    """Put noise on a number from 0 to 1: what comes out is a multiple of 2**-bits from 0 to 1, whatever goes in.

    It is epsilon-differentially private for numbers that differ by ``sensitivity`` and a tenth of a step, the rounding
    error of means in float32, at most.
    """
    steps = 1 << bits
    # Rounded to the grid, numbers differ by one step more than before.
    rate = Fraction(epsilon) / (floor(steps * sensitivity + 0.1) + 1)
    noised = round(exact * steps) + noise.laplace(rate)
    return min(max(noised, 0), steps) / steps


def derive_key(secret: bytes, *parts: object) -> bytes:
    """Derive the key of one use from a secret and from all that it is for: with other parts it is another key.

    A tensor stands for its values.
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
