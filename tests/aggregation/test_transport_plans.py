"""Costs, plans and maps against loops in float64, brute force, and POT where it is installed."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from fedkeep.aggregation.transport_plans import Cost, apply_plan, compute_plan, cost_matrix, diagonal_share, mean_plan


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(plan: Tensor) -> Tensor:
    """Return a map as a matrix, entry by entry."""
    if plan.is_floating_point():
        return plan
    matrix = torch.zeros(len(plan), len(plan), dtype=torch.float64)
    for j, i in enumerate(plan.tolist()):
        matrix[i, j] = 1
    return matrix


@pytest.mark.parametrize("cost", get_args(Cost))
def test_costs_are_the_formulas(cost: Cost) -> None:
    a, b = noise(4, 6), noise(4, 6, seed=1)
    found = cost_matrix(a.float(), b.float(), cost)
    assert found.dtype == torch.float64
    for i, j in itertools.product(range(4), repeat=2):
        x, y = a[i].float().double(), b[j].float().double()
        lengths = math.sqrt(sum(v * v for v in x.tolist())), math.sqrt(sum(v * v for v in y.tolist()))
        square = sum((u - v) ** 2 for u, v in zip(x.tolist(), y.tolist(), strict=True))
        cosine = sum(u * v for u, v in zip(x.tolist(), y.tolist(), strict=True)) / (lengths[0] * lengths[1])
        expected = {
            "euclidean": math.sqrt(square),
            "sq": square,
            "cosine": 1 - cosine,
            "unit_norm_rows": math.sqrt(2 - 2 * cosine),
        }[cost]
        assert float(found[i, j]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("cost", get_args(Cost))
def test_rows_of_zeros_and_equal_rows_have_finite_costs(cost: Cost) -> None:
    a = torch.zeros(3, 2)
    a[2] = 1e-4
    assert torch.isfinite(cost_matrix(a, a, cost)).all()
    assert bool((cost_matrix(a, a, cost) >= (-1e-12 if cost == "cosine" else 0)).all())


def test_the_exact_plan_is_the_cheapest_permutation() -> None:
    for seed in range(20):
        costs = noise(5, 5, seed=seed).abs()
        plan = compute_plan(costs, "emd", 0.01)
        best = min(itertools.permutations(range(5)), key=lambda p: sum(float(costs[i, j]) for j, i in enumerate(p)))
        assert plan.tolist() == list(best)


def test_the_exact_plan_by_hand() -> None:
    # Source 0 is like base 2, source 1 like base 0, source 2 like base 1.
    costs = torch.tensor([[9.0, 9.0, 1.0], [1.0, 9.0, 9.0], [9.0, 1.0, 9.0]], dtype=torch.float64)
    assert compute_plan(costs, "emd", 0.01).tolist() == [1, 2, 0]
    assert apply_plan(torch.tensor([10.0, 20.0, 30.0]), compute_plan(costs, "emd", 0.01), 0).tolist() == [
        20.0,
        30.0,
        10.0,
    ]


@pytest.mark.parametrize("n", [3, 30, 80])
def test_plans_are_those_of_pot(n: int) -> None:
    ot = pytest.importorskip("ot")
    costs = cost_matrix(noise(n, 7), noise(n, 7, seed=1), "euclidean")
    uniform = torch.full((n,), 1 / n, dtype=torch.float64).numpy()
    exact = n * torch.from_numpy(ot.emd(uniform, uniform, costs.numpy()))
    torch.testing.assert_close(dense(compute_plan(costs, "emd", 0.01)), exact, rtol=0, atol=1e-12)
    reg = 0.1
    entropic = ot.sinkhorn(
        *(uniform, uniform, costs.numpy(), reg * float(costs.mean())),
        method="sinkhorn_log",
        numItermax=10_000,
        stopThr=1e-12,
    )
    torch.testing.assert_close(compute_plan(costs, "sinkhorn", reg), n * torch.from_numpy(entropic), rtol=0, atol=1e-6)


@pytest.mark.parametrize("reg", [1e-4, 0.01, 0.1, 1.0, 100.0])
def test_entropic_plans_have_columns_that_sum_to_one(reg: float) -> None:
    costs = cost_matrix(noise(20, 7), noise(20, 7, seed=1), "euclidean")
    plan = compute_plan(costs, "sinkhorn", reg)
    assert torch.isfinite(plan).all()
    torch.testing.assert_close(plan.sum(0), torch.ones(20, dtype=torch.float64))
    if reg >= 0.1:
        torch.testing.assert_close(plan.sum(1), torch.ones(20, dtype=torch.float64), rtol=0, atol=1e-6)
    if reg == 100.0:
        torch.testing.assert_close(plan, torch.full_like(plan, 1 / 20), rtol=0.05, atol=0)


def test_a_blurred_plan_between_close_layers_is_near_the_identity() -> None:
    costs = cost_matrix(noise(20, 7), noise(20, 7) + 1e-3, "euclidean")
    shares = [diagonal_share(compute_plan(costs, "sinkhorn", reg)) for reg in (0.01, 0.3, 1.0)]
    assert shares[0] > 0.999
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("kind", ["permutation", "soft"])
@pytest.mark.parametrize("positions", [1, 3])
def test_maps_are_applied_as_the_sums_say(kind: str, positions: int) -> None:
    n = 4
    plan = torch.tensor([2, 0, 3, 1]) if kind == "permutation" else noise(n, n).softmax(0)
    matrix = dense(plan)
    weight = noise(n, n * positions, seed=1)
    out, into = apply_plan(weight, plan, 0), apply_plan(weight, plan, 1)
    for o, j in itertools.product(range(n), repeat=2):
        for k in range(positions):
            incoming = sum(weight[o, i * positions + k] * matrix[i, j] for i in range(n))
            assert float(into[o, j * positions + k]) == pytest.approx(float(incoming), rel=1e-12)
            outgoing = sum(matrix[i, o] * weight[i, j * positions + k] for i in range(n))
            assert float(out[o, j * positions + k]) == pytest.approx(float(outgoing), rel=1e-12)
    kernels = noise(n, n, 3, 2).float()
    expected = torch.einsum("oihw,ij->ojhw", kernels.double(), matrix)
    torch.testing.assert_close(apply_plan(kernels, plan, 1), expected.float())
    vector = noise(n).float()
    torch.testing.assert_close(apply_plan(vector, plan, 0), (matrix.T @ vector.double()).float())
    assert apply_plan(weight, None, 1) is weight


def test_means_of_maps() -> None:
    a, b = torch.tensor([1, 0, 2]), torch.tensor([1, 2, 0])
    assert mean_plan([a]) is a
    assert mean_plan([a, a.clone()]) is a
    assert torch.equal(mean_plan([a, b]), (dense(a) + dense(b)) / 2)
    soft = noise(3, 3).softmax(0)
    assert torch.equal(mean_plan([a, soft]), (dense(a) + soft) / 2)


def test_the_diagonal_share() -> None:
    assert diagonal_share(torch.arange(5)) == 1
    assert diagonal_share(torch.tensor([0, 2, 1, 3])) == 0.5
    assert diagonal_share(torch.full((4, 4), 0.25, dtype=torch.float64)) == 0.25


@pytest.mark.parametrize("plan", [torch.tensor([2, 0, 1]), noise(3, 3).softmax(0)], ids=["permutation", "dense"])
def test_both_axes_may_hold_several_entries_for_each_channel(plan: Tensor) -> None:
    maps = noise(3, 4)  # three channels of a flattened 2x2 map
    moved = torch.stack([sum(dense(plan)[i, j] * maps[i] for i in range(3)) for j in range(3)])
    torch.testing.assert_close(apply_plan(maps.flatten(), plan, 0), moved.flatten())
    torch.testing.assert_close(apply_plan(maps.flatten()[None], plan, 1), moved.flatten()[None])
