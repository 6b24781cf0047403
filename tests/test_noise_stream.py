"""Random numbers for privacy: their distribution, and what determines them."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import exp, floor, sqrt

import pytest
import torch

from fedkeep._utils.noise_stream import NoiseStream, derive_key, laplace_on_grid

KEY = bytes(range(32))


def keys(count: int) -> list[NoiseStream]:
    return [NoiseStream(derive_key(b"test", number)) for number in range(count)]


@pytest.mark.parametrize("rate", [Fraction(1, 2), Fraction(0.3), Fraction(2), Fraction(7, 3)])
def test_laplace_noise_has_its_exact_distribution(rate: Fraction) -> None:
    """(1 - q) / (1 + q) q^|x| with q = exp(-rate): 0.2449 at 0 and 0.1486 at 1 for a rate of 1/2."""
    count, stream = 8_000, NoiseStream(KEY)
    found = Counter(stream.laplace(rate) for _ in range(count))
    q = exp(-rate)
    for value in range(-3, 4):
        expected = (1 - q) / (1 + q) * q ** abs(value)
        assert found[value] / count == pytest.approx(expected, abs=5 * sqrt(expected / count) + 1e-4), value


def on_grid(exact: float, value: float, rate: float, steps: int) -> float:
    """Return the probability of an output in float64: those beyond an end are cut to it."""
    q, k, place = exp(-rate), round(exact * steps), round(value * steps)
    tail = [q**n / (1 + q) for n in (k, steps - k)]  # of noise of n and more
    if place in (0, steps):
        return tail[place == steps]
    return (1 - q) / (1 + q) * q ** abs(place - k)


@pytest.mark.parametrize(("exact", "neighbour", "sensitivity"), [(0.3, 0.8, 0.5), (0.0, 1.0, 1.0), (0.61, 0.36, 0.25)])
def test_neighbours_have_the_same_outputs_within_epsilon(exact: float, neighbour: float, sensitivity: float) -> None:
    """Every output of the one is one of the other: an enumeration of all that can be told, on a grid of five values."""
    epsilon, count, grid = 1.0, 3_000, {place / 4 for place in range(5)}
    rate = epsilon / (floor(4 * sensitivity + 0.1) + 1)
    told = {
        value: Counter(laplace_on_grid(value, sensitivity, epsilon, noise, bits=2) for noise in keys(count))
        for value in (exact, neighbour)
    }
    assert set(told[exact]) == set(told[neighbour]) == grid
    for output in grid:
        expected = {value: on_grid(value, output, rate, 4) for value in told}
        assert expected[exact] <= exp(epsilon) * expected[neighbour] * (1 + 1e-12)
        assert expected[neighbour] <= exp(epsilon) * expected[exact] * (1 + 1e-12)
        for value, seen in told.items():
            assert seen[output] / count == pytest.approx(expected[value], abs=5 * sqrt(expected[value] / count))


def test_means_leave_on_one_grid_whatever_they_were() -> None:
    """Sums of floats are not: of 12.8 % one could tell at epsilon 1 that they are not of the neighbour."""
    for exact in (0.1, 1 / 3, 0.7000001, 2**-40):
        for noise in keys(20):
            assert (laplace_on_grid(exact, 0.5, 1.0, noise) * 2**16).is_integer()


@pytest.mark.parametrize("sensitivity", [1.0, 0.5, 1 / 3, 0.07])
def test_rounded_neighbours_differ_by_what_noise_is_for(sensitivity: float) -> None:
    steps, most = 8, floor(8 * sensitivity + 0.1) + 1
    values = torch.linspace(0, 1 - sensitivity, 4001, dtype=torch.float64).tolist()
    assert max(abs(round((v + sensitivity) * steps) - round(v * steps)) for v in values) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_noise_lies_on_a_grid_of_the_deviation_alone(dtype: torch.dtype) -> None:
    """0.3 lies between 1/4 and 1/2, so the step is 2^-22."""
    exact = torch.linspace(-0.9, 0.9, 4_000, dtype=dtype)
    noised = NoiseStream(KEY).gaussian(exact, 0.3)
    assert noised.dtype == dtype
    steps = noised.double() * 2**22
    assert steps.equal(steps.round())
    assert float((noised - exact).std()) == pytest.approx(0.3, rel=0.05)
    assert NoiseStream(KEY).gaussian(exact, 0.0).equal(exact)


def test_whole_numbers_are_drawn_alike() -> None:
    stream = NoiseStream(KEY)
    found = Counter(stream.below(5) for _ in range(5_000))
    assert set(found) == set(range(5))
    assert all(count == pytest.approx(1_000, abs=150) for count in found.values())
    assert {stream.below(1) for _ in range(3)} == {0}
    assert max(stream.below(2**70) for _ in range(50)) > 2**67


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
