"""Prototypes: the search, and the mean of what clients found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy
from torch import Tensor

from fedkeep.errors import DataError, ValueRefused
from fedkeep.generation.pixel import PixelGenerator
from fedkeep.generation.prototypes import (
    AverageRule,
    PrototypeSearch,
    average_prototypes,
    check_held,
    search_prototypes,
)

SETTINGS = PrototypeSearch(steps=5, batch_size=8)


@pytest.fixture(scope="module")
def trained(trained_toy: Any) -> PixelGenerator:
    result: PixelGenerator = trained_toy.load()
    return result


def search(
    generator: PixelGenerator, data: dict[str, Tensor], settings: PrototypeSearch = SETTINGS, classes: int = 3
) -> tuple[Tensor, list[float]]:
    rng = torch.Generator().manual_seed(3)
    return search_prototypes(
        generator, generator.initial_prototypes(classes), data["input"], data["label"], settings, rng
    )


def test_the_search_lowers_the_loss_and_changes_no_weight(trained: PixelGenerator) -> None:
    before = trained.hash()
    data = toy.data(60, seed=1)
    found, losses = search(trained, data, PrototypeSearch(steps=60, batch_size=32))
    assert trained.hash() == before
    assert all(weight.grad is None for weight in trained.network.parameters())
    assert len(losses) == 60

    def loss(prototypes: Tensor) -> float:
        still = PrototypeSearch(steps=1, batch_size=600)
        rng = torch.Generator().manual_seed(9)
        return search_prototypes(trained, prototypes, data["input"], data["label"], still, rng)[1][0]

    # Told its class by a prototype, the network sees more than told the mean of all, and nearly as much as by its own.
    assert loss(trained.class_embeddings()) < 0.97 * loss(trained.initial_prototypes(3))
    assert loss(found) < 0.97 * loss(trained.initial_prototypes(3))
    rows, start = trained.class_embeddings(), trained.initial_prototypes(3)
    assert torch.equal(start[0], start[1])
    assert not torch.equal(found[0], found[1])
    assert found.shape == rows.shape


@pytest.mark.parametrize("space", ["embedding", "subclass"])
def test_rows_of_absent_classes_stay(space: str) -> None:
    result = toy.generator(space=space)
    data = toy.data(20)
    held = {name: column[data["label"] != 1] for name, column in data.items()}
    found, _ = search(result, held, PrototypeSearch(steps=5, batch_size=8))
    start = result.initial_prototypes(3)
    assert torch.equal(found[1], start[1])
    assert not torch.equal(found[0], start[0])


def test_the_loss_is_the_formula() -> None:
    result, data = toy.generator(), toy.data(9)
    _, losses = search(result, data, PrototypeSearch(steps=1, batch_size=4))
    rng = torch.Generator().manual_seed(3)
    chosen = torch.randint(9, (4,), generator=rng)
    clean = data["input"][chosen].double() / 127.5 - 1
    times = torch.randint(20, (4,), generator=rng)
    noise = torch.randn(clean.shape, generator=rng)
    kept = (1 - torch.linspace(1e-4, 0.4, 20).double()).cumprod(0)[times].view(4, 1, 1, 1)
    noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
    output = result.predict_noise(noisy.float(), times, result.initial_prototypes(3)[data["label"][chosen]])
    assert losses[0] == pytest.approx(float((output - noise).square().mean()), rel=1e-5)


def test_a_client_without_images_returns_what_it_was_sent() -> None:
    result = toy.generator()
    found, losses = search(result, {name: column[:0] for name, column in toy.data().items()})
    assert torch.equal(found, result.initial_prototypes(3))
    assert losses == []


def test_what_does_not_fit_is_refused() -> None:
    result, data = toy.generator(), toy.data()
    rng = torch.Generator()
    with pytest.raises(ValueRefused, match="Use those that were found with this generator"):
        search_prototypes(result, torch.zeros(3, 2, 32), data["input"], data["label"], SETTINGS, rng)
    with pytest.raises(DataError, match="draws uint8 images of 1 x 8 x 8"):
        search(result, toy.data(side=12))
    with pytest.raises(DataError, match=r"labels must lie in 0..1"):
        search(result, data, classes=2)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # class 0 is held by both (1 and 3 examples), class 1 by the second, class 2 by nobody
        ("uniform", [[3.0], [3.5], [9.0]]),
        ("holders", [[3.0], [6.0], [9.0]]),
        ("count", [[3.5], [6.0], [9.0]]),
    ],
)
def test_means_by_hand(rule: AverageRule, expected: list[list[float]]) -> None:
    received = torch.tensor([[0.0], [1.0], [9.0]])
    replies = [torch.tensor([[2.0], [1.0], [9.0]]), torch.tensor([[4.0], [6.0], [8.0]])]
    counts = [torch.tensor([1, 0, 0]), torch.tensor([3, 2, 0])]
    assert average_prototypes(received, replies, counts, rule).tolist() == expected


def test_equal_replies_give_exactly_themselves() -> None:
    row = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0))
    counts = [torch.tensor([count, 1]) for count in (1, 2, 4)]
    for rule in ("uniform", "holders", "count"):
        assert torch.equal(average_prototypes(torch.zeros_like(row), [row] * 3, counts, rule), row)
    assert average_prototypes(row, [], [], "count") is row


def test_replies_of_another_size_are_refused() -> None:
    with pytest.raises(ValueRefused, match="all clients must use one generator"):
        average_prototypes(torch.zeros(2, 3), [torch.zeros(2, 4)], [torch.ones(2)], "count")


def test_a_class_that_nobody_holds() -> None:
    check_held(torch.tensor([1, 2]), "ab")
    with pytest.raises(DataError, match="no client holds an example of 'b'"):
        check_held(torch.tensor([1, 0]), "ab")
