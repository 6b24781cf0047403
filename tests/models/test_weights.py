"""Models as values: exact copies, arithmetic that changes no argument, and mismatches told by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedkeep.errors import ConfigError, ValueRefused
from fedkeep.models.weights import (
    _CACHED,
    Weights,
    add,
    distance,
    distances,
    find_mismatch,
    joint_norm,
    load_weights,
    mean,
    parameter_count,
    scale,
    state_dict_copy,
    subtract,
)


def model(seed: int, batches: int = 3) -> dict[str, Tensor]:
    """Return the weights of a small network with batch norm, integer buffer included."""
    random = torch.Generator().manual_seed(seed)
    return {
        "conv.weight": torch.randn(2, 1, 3, 3, generator=random),
        "norm.running_mean": torch.randn(2, generator=random),
        "norm.num_batches_tracked": torch.tensor(batches),
        "classifier.bias": torch.randn(4, generator=random),
    }


def module() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def assert_same(given: Weights, expected: Weights) -> None:
    assert list(given) == list(expected)
    assert all(torch.equal(given[name], expected[name]) for name in expected)
    assert all(given[name].dtype == expected[name].dtype for name in expected)


def assert_apart(given: Weights, *others: Weights) -> None:
    """Assert that no tensor lies in the memory of another."""
    locations = {tensor.data_ptr() for other in others for tensor in other.values()}
    assert not locations & {tensor.data_ptr() for tensor in given.values()}


def test_weights_of_copies_parameters_and_buffers() -> None:
    source: Any = module()
    weights = state_dict_copy(source)
    assert set(weights) == set(source.state_dict())
    assert weights["1.num_batches_tracked"].dtype == torch.int64
    assert not any(tensor.requires_grad for tensor in weights.values())
    assert_apart(weights, source.state_dict())
    kept = {name: tensor.clone() for name, tensor in weights.items()}
    source(torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(0)))  # moves the running statistics
    with torch.no_grad():
        source[0].weight.add_(1.0)
    assert_same(weights, kept)
    assert not torch.equal(source[0].weight, weights["0.weight"])
    assert source[1].num_batches_tracked == weights["1.num_batches_tracked"] + 1


def test_weights_of_refuses_what_is_no_tensor() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(ConfigError, match="Odd keeps '_extra_state', a dict, in its state dict"):
        state_dict_copy(Odd(2, 2))


def test_load_into_restores_bit_for_bit_and_keeps_the_modules_tensors() -> None:
    source, target = module(), module()
    source(torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(0)))
    weights = state_dict_copy(source)
    parameters = [id(parameter) for parameter in target.parameters()]
    load_weights(target, weights)
    assert_same(state_dict_copy(target), weights)
    assert [id(parameter) for parameter in target.parameters()] == parameters  # an optimiser still holds them
    assert all(parameter.requires_grad for parameter in target.parameters())
    assert_apart(target.state_dict(), weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("0.bias"), "it lacks '0.bias'"),
        (lambda w: (w.pop("0.bias"), w.pop("3.bias")), "it lacks '0.bias' and 1 more"),
        (lambda w: w.update(extra=torch.zeros(1)), "it has 'extra', which is not expected"),
        (lambda w: w.update({"3.bias": torch.zeros(4)}), r"'3.bias' has shape \[4\] instead of \[3\]"),
        (lambda w: w.update({"3.bias": torch.zeros(3).double()}), "'3.bias' is float64 instead of float32"),
        (lambda w: w.update({"3.bias": torch.zeros(())}), r"'3.bias' has shape \[\] instead of \[3\]"),
    ],
)
def test_load_into_says_what_does_not_fit_and_copies_nothing(
    change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    target = module()
    before = state_dict_copy(target)
    weights = {name: tensor + 1 for name, tensor in before.items()}
    change(weights)
    with pytest.raises(ValueRefused, match=f"these weights do not fit Sequential: {message}"):
        load_weights(target, weights)
    assert_same(state_dict_copy(target), before)


def test_same_form_is_about_the_first_and_ignores_order() -> None:
    a = model(1)
    assert find_mismatch(a, dict(reversed(model(2).items()))) is None
    both = {**model(2), "new": torch.zeros(1)}
    both.pop("conv.weight")
    assert find_mismatch(both, a) == "it lacks 'conv.weight' and it has 'new', which is not expected"
    assert find_mismatch({}, {}) is None


def test_arithmetic_goes_by_name_and_keeps_integers() -> None:
    a, b = model(1, batches=3), dict(reversed(model(2, batches=9).items()))
    total, difference, double = add(a, b, 0.5), subtract(a, b), scale(a, 2.0)
    for name in ("conv.weight", "norm.running_mean", "classifier.bias"):
        assert torch.allclose(total[name], a[name] + 0.5 * b[name])
        assert torch.allclose(difference[name], a[name] - b[name])
        assert torch.equal(double[name], a[name] * 2)
    for result in (total, difference, double):
        assert list(result) == list(a)
        assert result["norm.num_batches_tracked"] == 3
        assert all(result[name].dtype == a[name].dtype for name in a)


@pytest.mark.parametrize(
    "work",
    [
        lambda a, b: add(a, b),
        lambda a, b: add(a, b, -0.5),
        lambda a, b: subtract(a, b),
        lambda a, b: scale(a, 3.0),
        lambda a, b: mean([a, b]),
        lambda a, b: mean([a, b], [1.0, 3.0]),
        lambda a, b: mean([a, b], [0.0, 3.0]),
        lambda a, b: mean([a]),
    ],
)
def test_arguments_stay_as_they_are_and_apart(work: Callable[[Weights, Weights], Weights]) -> None:
    a, b = model(1), model(2)
    result = work(a, b)
    assert_same(a, model(1))
    assert_same(b, model(2))
    assert_apart(result, a, b)


@pytest.mark.parametrize("work", [add, subtract, lambda a, b: mean([a, b])])
def test_arithmetic_refuses_other_forms_instead_of_broadcasting(work: Callable[[Weights, Weights], Weights]) -> None:
    with pytest.raises(ValueRefused, match=r"'classifier.bias' has shape \[1\] instead of \[4\]"):
        work(model(1), {**model(2), "classifier.bias": torch.zeros(1)})


@pytest.mark.parametrize("work", [lambda w: add(w, w), lambda w: subtract(w, w), lambda w: scale(w, 2.0)])
def test_results_carry_no_gradient(work: Callable[[Weights], Weights]) -> None:
    weights = {"w": torch.ones(2, requires_grad=True)}
    assert not work(weights)["w"].requires_grad
    assert not mean([weights, weights])["w"].requires_grad


def test_models_without_weights_to_add() -> None:
    only = {"count": torch.tensor(4)}
    for result in (add(only, only), subtract(only, only), scale(only, 3.0), mean([only, only])):
        assert_same(result, only)


def test_mean_golden() -> None:
    first = {"w": torch.tensor([0.0, 8.0]), "n": torch.tensor(5)}
    second = {"w": torch.tensor([4.0, 0.0]), "n": torch.tensor(7)}
    third = {"w": torch.tensor([8.0, 4.0]), "n": torch.tensor(9)}
    assert_same(mean([first, second, third]), {"w": torch.tensor([4.0, 4.0]), "n": torch.tensor(5)})
    assert_same(mean([first, second], [3.0, 1.0]), {"w": torch.tensor([1.0, 6.0]), "n": torch.tensor(5)})
    assert_same(mean([first, second], [0.0, 2.0]), {"w": torch.tensor([4.0, 0.0]), "n": torch.tensor(5)})


numbers = st.floats(-(2.0**100), 2.0**100, width=32)
shares = st.floats(1e-3, 1e5)


@settings(max_examples=100, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=9), st.lists(shares, min_size=1, max_size=7))
def test_the_mean_of_identical_models_is_that_model(values: list[float], weights: list[float]) -> None:
    one = {"w": torch.tensor(values)}
    assert torch.equal(mean([one] * len(weights), weights)["w"], one["w"])
    assert torch.equal(mean([one] * len(weights))["w"], one["w"])


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 6), st.lists(shares | st.just(0.0), min_size=1, max_size=6))
def test_the_mean_is_the_weighted_mean(data: st.DataObject, size: int, weights: list[float]) -> None:
    rows = data.draw(
        st.lists(
            st.lists(st.floats(-1e3, 1e3, width=32), min_size=size, max_size=size),
            min_size=len(weights),
            max_size=len(weights),
        )
    )
    if not any(weights):
        weights = [1.0] * len(weights)
    models = [{"w": torch.tensor(row)} for row in rows]
    exact: Any = sum(w * torch.tensor(row, dtype=torch.float64) for w, row in zip(weights, rows, strict=True)) / sum(
        weights
    )
    assert torch.allclose(mean(models, weights)["w"].double(), exact, rtol=1e-5, atol=1e-3)


def test_one_model_gives_its_exact_copy() -> None:
    odd = {"w": torch.tensor([-0.0, 1e-40, torch.inf, torch.nan, 1 / 3])}
    for result in (mean([odd]), mean([odd], [0.3])):
        assert torch.equal(result["w"].view(torch.int32), odd["w"].view(torch.int32))


@pytest.mark.parametrize(
    ("models", "weights", "message"),
    [
        (0, None, "no model to average"),
        (2, [1.0], "2 models cannot be averaged with 1 weights"),
        (2, [0.0, 0.0], "not all 0"),
        (2, [2.0, -1.0], "not negative"),
        (2, [1.0, float("nan")], "finite"),
        (2, [1.0, float("inf")], "finite"),
    ],
)
def test_mean_refuses_weights_that_make_no_mean(models: int, weights: list[float] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mean([model(1)] * models, weights)


def test_norms_are_of_all_tensors_together() -> None:
    a = {"x": torch.tensor([3.0, 0.0]), "y": torch.tensor([[5.0]]), "z": torch.tensor([100.0])}
    b = {"x": torch.tensor([0.0, 0.0]), "y": torch.tensor([[1.0]]), "z": torch.tensor([0.0])}
    assert joint_norm([]) == 0.0
    assert joint_norm(tensor for name, tensor in a.items() if name != "z") == pytest.approx(34**0.5, rel=1e-5)
    assert distance(a, b, ["x", "y"]) == pytest.approx(5.0, rel=1e-5)
    assert distance(a, b, []) == 0.0


def test_a_distance_is_the_norm_of_the_difference() -> None:
    a, b = model(1), model(2)
    names = [name for name, tensor in a.items() if tensor.is_floating_point()]
    assert distance(a, b, names) == joint_norm([a[name] - b[name] for name in names])


def test_parameter_count_counts_shared_ones_once_and_no_buffers() -> None:
    assert parameter_count(module()) == 2 * 9 + 2 + 2 + 2 + 8 * 3 + 3
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    tied[0].bias.requires_grad_(False)
    assert parameter_count(tied) == 9 + 3 + 3


@pytest.mark.parametrize("size", [3, _CACHED, _CACHED + 1, 3 * _CACHED + 5])
def test_the_distance_of_a_tensor_of_any_size(size: int) -> None:
    rng = torch.Generator().manual_seed(size)
    a, b = torch.randn(size, generator=rng), torch.randn(size, generator=rng)
    (found,) = distances({"x": a}, {"x": b}, ["x"])
    assert float(found) == pytest.approx(float((a.double() - b.double()).norm()), rel=1e-5)
