"""Distances between label distributions, weights and choice of teachers (SFedKD, eqs. 5-6 and algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedkeep.data.partition import ExDir
from fedkeep.losses.discrepancy import (
    discrepancies,
    divergence,
    proportions,
    select_complementary,
    smooth,
    teacher_weights,
)

METRICS = ["kl", "l1", "l2", "js"]
# Sums of at most 10 terms; float64 rounding is 1e-16 of each, and of logarithms up to 10.
EXACT = 1e-12
# The same examples on every machine: a boundary of rounding must not fail one run in a thousand.
quick = settings(max_examples=80, deadline=None, derandomize=True, database=None)

TOY = {
    "A": [1.0, 0.0, 0.0, 0.0],
    "B": [0.9, 0.1, 0.0, 0.0],
    "C": [0.0, 1.0, 0.0, 0.0],
    "D": [0.0, 0.0, 0.5, 0.5],
    "E": [0.25, 0.25, 0.3, 0.2],
}


def vector(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def naive_kl(first: Sequence[float], second: Sequence[float]) -> float:
    if any(a > 0 and b == 0 for a, b in zip(first, second, strict=True)):
        return math.inf
    return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True) if a > 0)


def naive(first: Sequence[float], second: Sequence[float], metric: str) -> float:
    if metric == "kl":
        return naive_kl(first, second)
    if metric == "l1":
        return sum(abs(a - b) for a, b in zip(first, second, strict=True))
    if metric == "l2":
        return math.sqrt(sum((a - b) ** 2 for a, b in zip(first, second, strict=True)))
    middle = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    return (naive_kl(first, middle) + naive_kl(second, middle)) / 2


def shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def naive_choice(names: Sequence[str], held: dict[str, list[float]], count: int, metric: str) -> Any:
    """Choose greedily; return also the smallest gap between best and second best, to know where rounding decides."""
    chosen: list[str] = []
    closest = math.inf
    while len(chosen) < min(count, len(names)):
        scores = []
        for name in names:
            if name in chosen:
                continue
            together = [sum(column) for column in zip(*(held[other] for other in [*chosen, name]), strict=True)]
            mass = len(chosen) + 1
            uniform = [1 / len(together)] * len(together)
            scores.append((round(naive([share / mass for share in together], uniform, metric), 12), len(scores), name))
        scores.sort()
        chosen.append(scores[0][2])
        closest = min([closest, *(score - scores[0][0] for score, _, _ in scores[1:] if score != scores[0][0])])
    return chosen, closest


@st.composite
def count_tables(draw: Any, minimum: int = 0, rows: int = 6) -> list[list[int]]:
    """Label counts of some clients: any, all zero in places, or all alike."""
    classes = draw(st.integers(2, 6))
    number = st.one_of(st.integers(0, 3), st.integers(0, 100_000))
    row = st.lists(number, min_size=classes, max_size=classes).filter(lambda counts: sum(counts) >= minimum)
    table = draw(st.lists(row, min_size=2, max_size=rows))
    return [table[0]] * len(table) if draw(st.integers(0, 4)) == 0 else table


def held_by(table: list[list[int]]) -> dict[str, Tensor]:
    return {f"client {index}": proportions(torch.tensor(row)) for index, row in enumerate(table)}


# --- distances -------------------------------------------------------------------------------------------------------


def test_golden_distances_and_weights() -> None:
    student = torch.tensor([5, 5, 0, 0])
    teachers = torch.tensor([[5, 5, 0, 0], [5, 0, 5, 0], [0, 0, 5, 5]])
    distances = discrepancies(teachers, student, "kl")
    g, h = teacher_weights(distances)
    # Printed to six decimals.
    assert distances.tolist() == pytest.approx([0.0, 4.256994, 8.513988], abs=1e-6)
    assert g.tolist() == pytest.approx([0.0, 1 / 3, 2 / 3], abs=1e-6)
    assert h.tolist() == pytest.approx([0.999965, 0.000023, 0.000012], abs=1e-6)

    def smooth(row: Tensor) -> list[float]:
        return [(count / 10 + 1e-4) / (1 + 4e-4) for count in row.tolist()]

    formula = [naive_kl(smooth(row), smooth(student)) for row in teachers]
    inverse = [1 / (distance + 1e-4) for distance in formula]
    # Proportions may be float32 (1e-7 of logarithms up to 9) before the sum.
    assert distances.tolist() == pytest.approx(formula, abs=2e-6)
    assert g.tolist() == pytest.approx(shares(formula), abs=2e-6)
    assert h.tolist() == pytest.approx(shares(inverse), abs=2e-6)


def test_disjoint_distributions_are_about_as_far_as_the_paper_needs() -> None:
    # 9.21 is -ln 1e-4, less the teacher's entropy: here 0 and ln 2 (plus terms of size 1e-4 ln 1e-4).
    distances = discrepancies(torch.tensor([[7, 0, 0, 0], [5, 5, 0, 0]]), torch.tensor([0, 0, 3, 3]), "kl")
    assert distances.tolist() == pytest.approx([-math.log(1e-4), -math.log(1e-4) - math.log(2)], abs=1e-2)


@pytest.mark.parametrize("metric", METRICS)
def test_divergence_is_the_formula(metric: Any) -> None:
    first = torch.rand(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first[1, 2:] = 0
    first = first / first.sum(-1, keepdim=True)
    second = torch.rand(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    second = second / second.sum()
    expected = [naive(row, second.tolist(), metric) for row in first.tolist()]
    assert divergence(first, second, metric).tolist() == pytest.approx(expected, abs=EXACT)


def test_divergence_of_distributions_that_share_no_class() -> None:
    first, second = vector([0.5, 0.5, 0, 0]), vector([0, 0, 0.5, 0.5])
    assert divergence(first, second, "kl").item() == math.inf
    assert divergence(first, second, "l1").item() == pytest.approx(2, abs=EXACT)
    assert divergence(first, second, "l2").item() == pytest.approx(1, abs=EXACT)
    assert divergence(first, second, "js").item() == pytest.approx(math.log(2), abs=EXACT)  # no square root


def test_divergence_ignores_zeros_of_the_first() -> None:
    uniform = vector([0.25] * 4)
    assert divergence(vector([1, 0, 0, 0]), uniform, "kl").item() == pytest.approx(math.log(4), abs=EXACT)


@pytest.mark.parametrize("metric", METRICS)
def test_discrepancies_are_the_formula(metric: Any) -> None:
    teachers, student = [[30, 1, 9], [5, 5, 2], [1, 80, 4]], [3, 4, 13]

    def smoothed(counts: list[int]) -> list[float]:
        return [(share + 1e-4) / (1 + 3e-4) for share in shares(counts)] if metric == "kl" else shares(counts)

    expected = [naive(smoothed(row), smoothed(student), metric) for row in teachers]
    found = discrepancies(torch.tensor(teachers), torch.tensor(student), metric)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)  # float32 proportions would still pass


def test_smoothing_is_the_formula() -> None:
    found = smooth(vector([0.7, 0.3, 0, 0]), 1e-4)
    assert found.tolist() == pytest.approx([0.7001 / 1.0004, 0.3001 / 1.0004, 1e-4 / 1.0004, 1e-4 / 1.0004], abs=EXACT)
    assert found.sum().item() == pytest.approx(1, abs=EXACT)


def test_more_smoothing_brings_distributions_nearer() -> None:
    # Smoothing mixes both with the uniform distribution: a divergence can only shrink under a common channel.
    teachers, student = proportions(torch.tensor([[9, 1, 0, 0], [0, 0, 4, 6], [5, 0, 5, 0]])), vector([0.5, 0.5, 0, 0])
    amounts = (1e-8, 1e-6, 1e-4, 1e-2, 1.0)
    rows = [divergence(smooth(teachers, amount), smooth(student, amount), "kl") for amount in amounts]
    assert all(torch.all(after < before) for before, after in pairwise(rows))


def test_proportions_are_shares() -> None:
    found = proportions(torch.tensor([[1, 3, 0, 4], [0, 0, 0, 0]]))
    assert found.tolist() == [[0.125, 0.375, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]]


@quick
@given(count_tables(minimum=1))
def test_divergences_keep_their_bounds(table: list[list[int]]) -> None:
    first, second = proportions(torch.tensor(table[0])).double(), proportions(torch.tensor(table[1])).double()
    for metric in METRICS:
        distance = divergence(first, second, metric).item()
        assert distance >= -EXACT  # a sum of logarithms of both signs may miss zero by its rounding
        assert divergence(first, first, metric).item() == pytest.approx(0, abs=EXACT)
    assert divergence(first, second, "l1").item() <= 2 + EXACT
    assert divergence(first, second, "l2").item() <= math.sqrt(2) + EXACT
    assert divergence(first, second, "js").item() <= math.log(2) + EXACT


@quick
@given(count_tables(minimum=1), st.sampled_from([1, 2, 3, 7]))
def test_smoothing_keeps_equal_distributions_at_distance_zero(table: list[list[int]], times: int) -> None:
    # However many examples they come from: counts of another size give the same proportions up to their rounding.
    student = torch.tensor(table[0])
    assert discrepancies(times * student[None], student, "kl").tolist() == pytest.approx([0], abs=1e-6)


# --- weights of the teachers -----------------------------------------------------------------------------------------


def test_weights_are_the_formula() -> None:
    distances = [0.2, 1.0, 4.0]
    g, h = teacher_weights(vector(distances))
    assert g.tolist() == pytest.approx([0.2 / 5.2, 1 / 5.2, 4 / 5.2], abs=EXACT)
    assert h.tolist() == pytest.approx(shares([1 / (distance + 1e-4) for distance in distances]), abs=EXACT)


@pytest.mark.parametrize("distances", [[0.0, 0.0, 0.0], [1e-14, 3e-14, 0.0]])
def test_weights_of_teachers_without_any_distance(distances: list[float]) -> None:
    # Below a total of 1e-12 the distances are rounding, not knowledge.
    g, h = teacher_weights(vector(distances))
    assert g.tolist() == pytest.approx([1 / 3] * 3, abs=EXACT)
    assert h.tolist() == pytest.approx([1 / 3] * 3, abs=1e-9)  # 3e-14 of 1e-4 is left of the distances


def test_a_teacher_without_distance_leads_on_the_target_part_alone() -> None:
    g, h = teacher_weights(vector([8.0, 0.0, 4.0, 8.0]))
    assert g.tolist() == pytest.approx([0.4, 0.0, 0.2, 0.4], abs=EXACT)
    # 1e4 against 1/8 + 1/4 + 1/8.
    assert h[1].item() == pytest.approx(1e4 / (1e4 + 0.5), abs=1e-7)


def test_one_teacher_has_all_the_weight() -> None:
    for distance in (3.0, 0.0):
        g, h = teacher_weights(vector([distance]))
        assert (g.item(), h.item()) == (1.0, 1.0)


@pytest.mark.parametrize("metric", METRICS)
@settings(quick, max_examples=40)
@given(table=count_tables(), zeros=st.sampled_from(["none", "student", "teacher", "all"]))
def test_weights_are_shares_whatever_the_counts(metric: Any, table: list[list[int]], zeros: str) -> None:
    counts = torch.tensor(table)
    if zeros in ("student", "all"):
        counts[0] = 0
    if zeros in ("teacher", "all"):
        counts[-1 if zeros == "teacher" else slice(None)] = 0
    distances = discrepancies(counts[1:], counts[0], metric)
    for weights in teacher_weights(distances):
        assert torch.isfinite(weights).all()
        assert torch.all(weights >= 0)
        assert torch.all(weights <= 1 + 1e-6)
        assert weights.sum().item() == pytest.approx(1, abs=1e-6)  # float32 shares of at most six teachers


# --- choice of the teachers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["kl", "l1"])
@pytest.mark.parametrize("source", ["shares", "counts"])
def test_golden_choice(metric: Any, source: str) -> None:
    if source == "shares":
        held = {name: vector(row) for name, row in TOY.items()}
    else:
        held = {name: proportions(torch.tensor([round(20 * share) for share in row])) for name, row in TOY.items()}
    assert select_complementary(list("ABCDE"), held, 3, metric) == list("EDB")
    assert naive_choice("ABCDE", TOY, 3, metric)[0] == list("EDB")


def test_default_choice_is_by_kl() -> None:
    held = {name: vector(row) for name, row in TOY.items()}
    assert select_complementary(list("ABCDE"), held, 3) == list("EDB")


def test_the_earliest_of_equals_is_chosen() -> None:
    alike = {name: vector([0.5, 0.5, 0.0, 0.0]) for name in "xyz"}
    for order in ("xyz", "zyx", "yxz"):
        assert select_complementary(list(order), alike, 2) == list(order[:2])
    # Permuted shares are equally far; adding up in another order must not decide.
    turned = {name: vector([0.1, 0.2, 0.3, 0.4]).roll(shift) for shift, name in enumerate("wxyz")}
    for order in ("wxyz", "zyxw", "yzwx"):
        assert select_complementary(list(order), turned, 1) == [order[0]]


def test_choice_is_cut_to_the_candidates() -> None:
    held = {name: vector(row) for name, row in TOY.items()}
    assert select_complementary(list("ABC"), held, 0) == []
    assert sorted(select_complementary(list("ABC"), held, 10)) == list("ABC")
    assert select_complementary([], held, 3) == []
    # Only candidates are chosen, though others are known.
    assert set(select_complementary(list("AC"), held, 2)) == {"A", "C"}


@quick
@given(count_tables(rows=7), st.integers(0, 8), st.sampled_from(METRICS))
def test_choice_is_of_distinct_candidates(table: list[list[int]], count: int, metric: Any) -> None:
    held = held_by(table)
    names = list(held)
    chosen = select_complementary(names, held, count, metric)
    assert len(chosen) == len(set(chosen)) == min(count, len(names))
    assert set(chosen) <= set(names)


@quick
@given(count_tables(minimum=1, rows=7), st.integers(1, 7), st.sampled_from(METRICS))
def test_choice_is_greedy(table: list[list[int]], count: int, metric: Any) -> None:
    held = held_by(table)
    lists = {name: row.tolist() for name, row in held.items()}
    expected, closest = naive_choice(list(held), lists, count, metric)
    if closest > 1e-9:  # else rounding, not distance, makes the choice
        assert select_complementary(list(held), held, count, metric) == expected


# --- what it comes to where the paper uses it ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rounds() -> list[tuple[Tensor, list[int]]]:
    """Return (label counts of 100 clients, a cohort of ten) for rounds of CIFAR-10 in ExDir(2, 0.5)."""
    train, sampled = {"label": torch.arange(50_000) % 10}, []
    for seed in range(8):
        counts = (
            ExDir(num_clients=100, classes_per_client=2, alpha=0.5).split(train, 10, seed).counts(train["label"], 10)
        )
        generator = torch.Generator().manual_seed(seed)
        sampled += [(counts, torch.randperm(100, generator=generator)[:10].tolist()) for _ in range(20)]
    return sampled


@pytest.mark.parametrize("amount", [1e-2, 1e-4, 1e-6, 1e-8])
def test_how_much_is_smoothed_hardly_matters(amount: float, rounds: list[tuple[Tensor, list[int]]]) -> None:
    """With five teachers: on average max g - min g is 0.16 to 0.17, and max h 0.46 to 0.52."""
    gaps, highest = [], []
    for counts, cohort in rounds:
        for student in range(0, 100, 12):
            distances = divergence(
                smooth(proportions(counts[cohort[:5]]), amount), smooth(proportions(counts[student]), amount), "kl"
            )
            g, h = teacher_weights(distances)
            gaps.append((g.max() - g.min()).item())
            highest.append(h.max().item())
    assert sum(gaps) / len(gaps) == pytest.approx(0.165, abs=0.015)
    assert sum(highest) / len(highest) == pytest.approx(0.49, abs=0.04)
