"""Sums of updates in fixed point: exact, in any order, and nothing is cut."""

from __future__ import annotations

import pytest
import torch

from fedkeep.errors import ValueRefused
from fedkeep.privacy.secure_sum import (
    FRACTION_BITS,
    largest_weight,
    mean_of_sum,
    quantise,
    vector_length,
)


def model(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "weight": scale * torch.randn(3, 4, generator=rng),
        "running_var": 500 + torch.rand(4, generator=rng),
        "num_batches_tracked": torch.tensor(seed),
    }


def test_the_mean_of_a_sum_is_that_of_the_formula() -> None:
    start, models, weights = model(0), [model(seed) for seed in (1, 2, 3)], [5, 0, 7]
    vectors = [quantise(one, start, weight, 1024.0) for one, weight in zip(models, weights, strict=True)]
    mean = mean_of_sum(vectors[0] + vectors[1] + vectors[2], [start] * 3, weights, start, 1024.0)
    assert list(mean) == list(start)
    for name in ("weight", "running_var"):
        expected = (5 * models[0][name].double() + 7 * models[2][name].double()) / 12
        torch.testing.assert_close(mean[name], expected.float(), atol=2.0**-FRACTION_BITS, rtol=2**-23)
    assert mean["num_batches_tracked"] is start["num_batches_tracked"], "counters stay as they were sent"
    other = mean_of_sum(vectors[2] + vectors[0] + vectors[1], [start] * 3, weights, start, 1024.0)
    assert all(other[name].equal(mean[name]) for name in mean)


def test_a_masked_sum_has_the_same_bits() -> None:
    start, mask = model(0), torch.randint(-(2**63), 2**63 - 1, (16,), generator=torch.Generator().manual_seed(0))
    one, other = quantise(model(1), start, 3, 1024.0), quantise(model(2), start, 4, 1024.0)
    assert vector_length(start) == len(one) == 16
    assert ((one + mask) + (other - mask)).equal(one + other)


def test_values_without_a_sent_model_are_summed_themselves() -> None:
    vector = quantise(model(1), None, 2, 1024.0) + quantise(model(2), None, 2, 1024.0)
    mean = mean_of_sum(vector, [None, None], [2, 2], model(0), 1024.0)
    torch.testing.assert_close(mean["weight"], (model(1)["weight"] + model(2)["weight"]) / 2)


def test_clients_that_were_sent_different_models_have_the_mean_of_their_results() -> None:
    vector = quantise(model(1), model(3), 1, 1024.0) + quantise(model(2), model(4), 1, 1024.0)
    mean = mean_of_sum(vector, [model(3), model(4)], [1, 1], model(0), 1024.0)
    torch.testing.assert_close(mean["running_var"], (model(1)["running_var"] + model(2)["running_var"]) / 2)


@pytest.mark.parametrize("value", [8.1, -9.0, float("nan"), float("inf")])
def test_what_is_too_large_is_refused_and_not_cut(value: float) -> None:
    start = model(0)
    changed = {**start, "weight": start["weight"].clone()}
    changed["weight"][1, 2] += value
    with pytest.raises(ValueRefused, match="weight that is not finite or larger than privacy"):
        quantise(changed, start, 1, 8.0)
    with pytest.raises(ValueRefused, match="sums have room for"):
        quantise(start, start, largest_weight(8.0) + 1, 8.0)


def test_the_largest_sum_has_room_and_others_are_no_sums() -> None:
    form, most = {"w": torch.zeros(1)}, largest_weight(1024.0)
    assert most > 33e6
    mean = mean_of_sum(quantise({"w": torch.tensor([1024.0])}, form, most, 1024.0), [form], [most], form, 1024.0)
    assert mean["w"].tolist() == [1024.0]
    for wrong in (torch.tensor([2**50]), torch.tensor([-(2**63)]), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueRefused, match="cannot have"):
            mean_of_sum(wrong, [form], [1], form, 1024.0)
