"""Random numbers for privacy: their distribution, and what determines them."""

from __future__ import annotations

import pytest
import torch

from fedkeep._utils.noise_stream import NoiseStream, derive_key

KEY = bytes(range(32))


def test_normal_numbers_are_normal() -> None:
    found = NoiseStream(KEY).normal((1000, 500))
    assert found.shape == (1000, 500)
    assert float(found.mean()) == pytest.approx(0, abs=0.006), "four standard errors"
    assert float(found.std()) == pytest.approx(1, abs=0.004)
    assert float(found.pow(4).mean()) == pytest.approx(3, abs=0.06)
    assert float((found.abs() > 1.959964).double().mean()) == pytest.approx(0.05, abs=0.0013)


def test_uniform_numbers_lie_between_the_ends() -> None:
    found = NoiseStream(KEY).uniform(200_000)
    assert 0 < float(found.min()) < 1e-4 < 1 - 1e-4 < float(found.max()) < 1
    assert float(found.mean()) == pytest.approx(0.5, abs=0.003)


def test_a_stream_goes_on_and_a_key_begins_it_anew() -> None:
    stream = NoiseStream(KEY)
    first, second = stream.normal((5,)), stream.normal((5,))
    assert not first.equal(second)
    assert NoiseStream(KEY).normal((5,)).equal(first)
    assert NoiseStream(KEY).uniform(0).shape == (0,)
    assert NoiseStream(KEY).normal(()).shape == ()


@pytest.mark.parametrize("bit", [0, 31, 32, 63, 64, 255])
def test_each_bit_of_the_key_counts(bit: int) -> None:
    """PyTorch's generator on a CPU takes 32 bits of a seed, so that 4 billion guesses find any noise."""
    other = (int.from_bytes(KEY, "big") ^ 1 << bit).to_bytes(32, "big")
    assert not NoiseStream(KEY).normal((4,)).equal(NoiseStream(other).normal((4,)))


def test_a_key_is_of_all_that_it_is_for() -> None:
    told = [
        (b"s", "means", torch.tensor([0.5])),
        (b"t", "means", torch.tensor([0.5])),
        (b"s", "change", torch.tensor([0.5])),
        (b"s", "means", torch.tensor([0.25])),
        (b"s", "means", torch.tensor([[0.5]])),
        (b"s", "means", torch.tensor([0.5]).double()),
        (b"s", "means"),
        (b"s", "mea", "ns"),
        (b"s", "m", "eans"),
    ]
    keys = [derive_key(*parts) for parts in told]
    assert len(set(keys)) == len(keys)
    assert derive_key(*told[0]) == keys[0]
    assert derive_key(b"s", torch.tensor(3.0)) != derive_key(b"s", torch.tensor(4.0))


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 4"):
        NoiseStream(b"four")
