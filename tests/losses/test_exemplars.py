"""Herding, against the search written out naively."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import noise
from torch import Tensor
from torch.nn.functional import normalize

from fedkeep.losses.prototypes import herd


def naive(features: Tensor, count: int) -> list[int]:
    """Return the greedy choice, trying every example each time."""
    rows = [[v / math.sqrt(sum(x * x for x in row)) for v in row] for row in features.tolist()]
    width = len(rows[0])
    mean = [sum(row[d] for row in rows) / len(rows) for d in range(width)]
    chosen: list[int] = []
    for number in range(1, min(count, len(rows)) + 1):

        def distance(candidate: int, number: int = number) -> float:
            centre = [sum(rows[i][d] for i in [*chosen, candidate]) / number for d in range(width)]
            return math.sqrt(sum((m - c) ** 2 for m, c in zip(mean, centre, strict=True)))

        chosen.append(min((i for i in range(len(rows)) if i not in chosen), key=distance))
    return chosen


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12).filter(lambda n: n != 2), st.integers(1, 15))  # two always tie
def test_herding_is_the_greedy_choice(seed: int, examples: int, count: int) -> None:
    features = noise(examples, 3, seed=seed)
    found = herd(features, count)
    assert found.dtype == torch.int64
    assert found.tolist() == naive(features, count)


def test_herding_by_hand() -> None:
    """Directions 0, 90 and 40 degrees: the third is nearest to the mean direction, then 90 brings the mean closer."""
    angles = [0.0, math.pi / 2, 2 * math.pi / 9]
    features = torch.tensor([[5 * math.cos(a), 5 * math.sin(a)] for a in angles])
    assert herd(features, 1).tolist() == [2]
    assert herd(features, 2).tolist() == naive(features, 2)
    assert sorted(herd(features, 9).tolist()) == [0, 1, 2]


def test_a_shorter_choice_is_the_beginning_of_a_longer_one() -> None:
    features = noise(30, 6)
    longest = herd(features, 20).tolist()
    assert len(set(longest)) == 20
    for count in (0, 1, 7, 20):
        assert herd(features, count).tolist() == longest[:count]


def test_the_length_of_features_does_not_count() -> None:
    features = noise(12, 4)
    scaled = features * torch.rand(12, 1, dtype=torch.float64).add(0.1)
    assert herd(features, 5).tolist() == herd(scaled, 5).tolist()


def test_of_equal_examples_the_first_is_taken_and_none_twice() -> None:
    assert herd(torch.ones(4, 3), 3).tolist() == [0, 1, 2]
    assert herd(torch.zeros(0, 3), 2).tolist() == []


def test_herded_exemplars_tell_the_mean_better_than_random_ones() -> None:
    features = normalize(noise(200, 8) + 0.3, dim=1)
    mean = features.mean(0)
    ours = float((features[herd(features, 10)].mean(0) - mean).norm())
    orders = (torch.randperm(200, generator=torch.Generator().manual_seed(seed)) for seed in range(20))
    others = [float((features[order[:10]].mean(0) - mean).norm()) for order in orders]
    assert ours < min(others) / 2
