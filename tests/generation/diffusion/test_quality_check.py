"""The quality gate, with classifiers of which all is known and with one that is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy
from generator_quality import class_accuracies, quality_check, train_classifier
from torch import Tensor

from fedkeep.data import Data
from fedkeep.generation.generator import Sampler
from fedkeep.generation.prototypes import PrototypeSearch, sample, search_prototypes
from fedkeep.interface import Training
from fedkeep.models.networks import MLP


def brightest(images: Tensor) -> Tensor:
    """Return the brightness of each third of an image: all about the toys."""
    return torch.stack([part.float().mean((1, 2, 3)) for part in images.tensor_split((2, 5), dim=2)], 1)


def test_both_directions_by_class() -> None:
    train, test = toy.data(30), toy.data(12, seed=1)
    generated = toy.data(9, seed=2)
    generated["input"][0::3] = generated["input"][1::3]  # class a was drawn as b
    learned_from: list[Data] = []

    def learn(data: Data) -> object:
        learned_from.append(data)
        return brightest if data is train else lambda images: torch.eye(3)[[0]].expand(len(images), 3)

    quality = quality_check(learn, train, test, generated, 3)  # type: ignore[arg-type]
    assert quality.real.tolist() == [1, 1, 1]
    assert quality.shown.tolist() == [0, 1, 1]
    assert quality.learned.tolist() == [1, 0, 0]
    assert learned_from[1] is generated


@pytest.mark.slow
def test_the_quality_check_tells_apart_classes_that_were_found_by_prototypes(trained_toy: Any) -> None:
    generator = trained_toy.load()
    private = toy.data(60, seed=1)  # images that it has not seen
    before, rng = generator.hash(), torch.Generator().manual_seed(3)
    start, look = generator.initial_prototypes(3), PrototypeSearch(steps=60, batch_size=32)
    found, _ = search_prototypes(generator, start, private["input"], private["label"], look, rng)
    assert generator.hash() == before

    def sampled(prototypes: Tensor) -> dict[str, Tensor]:
        images = sample(generator, prototypes, [0, 1, 2] * 10, list(range(30)), Sampler(steps=10))
        return {"input": images, "label": torch.arange(30) % 3}

    accuracy = class_accuracies(brightest, sampled(found), 3)
    assert float(accuracy.mean()) > 0.8, accuracy
    assert float(accuracy.min()) > 0.6, accuracy
    blind = class_accuracies(brightest, sampled(start), 3)
    assert float(blind.mean()) < 0.6, "told nothing of classes it shows none"


def test_a_class_without_images_has_no_accuracy() -> None:
    data = toy.data(6)
    some = {name: column[data["label"] != 1] for name, column in data.items()}
    assert class_accuracies(brightest, some, 3).tolist() == pytest.approx([1, float("nan"), 1], nan_ok=True)


def test_a_classifier_is_trained_alone_and_always_the_same() -> None:
    train, test = toy.data(60), toy.data(30, seed=1)

    def normalise(images: Tensor) -> Tensor:
        return images.float() / 255 if images.dtype == torch.uint8 else images

    state = torch.get_rng_state()
    result = [
        train_classifier(MLP(hidden=(8,)), train, 3, normalise, Training(batch_size=16, lr=0.3), steps=30, seed=seed)
        for seed in (0, 0, 1)
    ]
    first, again, other = (classify(test["input"]) for classify in result)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert class_accuracies(result[0], test, 3).mean() > 0.9
    assert torch.equal(torch.get_rng_state(), state)
