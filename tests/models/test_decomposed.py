"""Decomposed layers: what of them travels, and back."""

from __future__ import annotations

import pytest
import torch

from fedkeep.aggregation.mean import masked_mean
from fedkeep.models.fedweit_layers import (
    FedWeITParametrization,
    SparseTensors,
    active_units,
    active_weights,
    stack_dense,
    to_dense,
    to_sparse,
)

LAYERS = {"a": torch.tensor([[1.0, -2.0], [0.1, 3.0], [4.0, 0.0]]), "b": torch.tensor([[-5.0, 0.2]])}


def test_large_numbers_travel_with_their_places_and_come_back() -> None:
    few = to_sparse(LAYERS, 0.5)
    assert few.places.tolist() == [0, 1, 3, 4, 6]
    assert few.values.tolist() == [1, -2, 3, 4, -5]
    assert few.fault(8) is None
    back = to_dense(few, LAYERS)
    assert [layer.tolist() for layer in back.values()] == [[[1, -2], [0, 3], [4, 0]], [[-5, 0]]]
    assert [layer.tolist() for layer in to_dense(to_sparse(LAYERS, 9.0), LAYERS).values()] == [[[0, 0]] * 3, [[0, 0]]]


def test_those_of_several_parties_are_stacked() -> None:
    several = stack_dense([to_sparse(LAYERS, 0.5), to_sparse(LAYERS, 9.0)], LAYERS)
    assert {name: tuple(layer.shape) for name, layer in several.items()} == {"a": (2, 3, 2), "b": (2, 1, 2)}
    assert torch.equal(several["a"][0], to_dense(to_sparse(LAYERS, 0.5), LAYERS)["a"])
    assert stack_dense([], LAYERS) == {}


@pytest.mark.parametrize("location", [-1, 8])
def test_places_that_do_not_exist_are_a_fault(location: int) -> None:
    few = SparseTensors(torch.ones(1), torch.tensor([location], dtype=torch.int32))
    assert "8 that there are" in str(few.fault(8))


@pytest.mark.parametrize("locations", [[3, 3], [3, 1]])
def test_a_place_is_told_once(locations: list[int]) -> None:
    few = SparseTensors(torch.ones(2), torch.tensor(locations, dtype=torch.int32))
    assert "not in rising order, each once" in str(few.fault(8))


@pytest.mark.parametrize(("sparsity", "count"), [(0.0, 10), (0.3, 7), (0.5, 5), (0.99, 1)])
def test_the_units_with_the_smallest_masks_do_not_count(sparsity: float, count: int) -> None:
    mask = torch.tensor([-0.9, 0.1, 0.8, -0.2, 0.7, 0.3, -0.6, 0.4, 0.5, 1.0])
    kept = active_units(mask, sparsity)
    assert int(kept.sum()) == count
    assert mask[kept].abs().min() > (mask[~kept].abs().max() if count < 10 else 0)


def test_a_unit_is_the_mean_over_those_whose_masks_count_it() -> None:
    masks = [
        {"a": torch.tensor([0.1, -2.0, 1.0]), "b": torch.ones(1)},
        {"a": torch.tensor([3.0, 2.0, 0.1]), "b": torch.ones(1)},
    ]
    models = [{name: factor * layer for name, layer in LAYERS.items()} for factor in (2.0, 4.0)]
    sent = [active_weights(model, mask, 0.4) for model, mask in zip(models, masks, strict=True)]
    assert [len(numbers) for numbers in sent] == [6, 6]
    merged = masked_mean(LAYERS, sent, masks, 0.4)
    factors = torch.tensor([4.0, 3.0, 2.0])
    torch.testing.assert_close(merged["a"], factors[:, None] * LAYERS["a"])
    torch.testing.assert_close(merged["b"], 3 * LAYERS["b"])
    alone = masked_mean(LAYERS, sent[:1], masks[:1], 0.4)
    assert torch.equal(alone["a"][0], LAYERS["a"][0]), "nobody sent it"


def test_weights_are_computed_from_their_parts() -> None:
    model = {**LAYERS, "bias": torch.ones(3), "mask.a": torch.tensor([0.0, 100.0, -100.0])}
    model |= {"adaptive.a": torch.full((3, 2), 0.5), "attention.a": torch.tensor([2.0, -1.0])}
    others = {"a": torch.stack((torch.ones(3, 2), torch.full((3, 2), 3.0)))}
    result = FedWeITParametrization(others)(model)
    assert list(result) == ["a", "b", "bias"]
    torch.testing.assert_close(result["a"], torch.tensor([[0.5, -1.0], [0.1, 3.0], [0.0, 0.0]]) + 0.5 + 2 - 3)
    assert result["b"] is LAYERS["b"]
    torch.testing.assert_close(FedWeITParametrization()(model)["a"], result["a"] + 1)
