"""Finer codes: k-means inside each class, and a generator that learns them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy
from torch import Tensor

from fedkeep.errors import DataError
from fedkeep.generation.pixel import load_generator
from fedkeep.generation.training import (
    GeneratorTraining,
    _Batches,
    cluster_subclasses,
    train_generator,
)


def looks(side: int = 8) -> dict[str, Tensor]:
    """Return images of two classes, each of which looks in two ways: bright above or below, left or right."""
    rng = torch.Generator().manual_seed(2)
    label, way = torch.arange(80) % 2, torch.arange(80) // 2 % 2
    image = torch.randint(0, 40, (80, 1, side, side), generator=rng)
    for row, (c, w) in enumerate(zip(label.tolist(), way.tolist(), strict=True)):
        half = slice(w * side // 2, (w + 1) * side // 2)
        image[row, 0, half if c == 0 else slice(None), half if c == 1 else slice(None)] += 180
    return {"input": image.to(torch.uint8), "label": label, "way": way}


@pytest.mark.parametrize("side", [8, 28])
def test_codes_are_groups_inside_a_class(side: int) -> None:
    data = looks(side)
    codes = cluster_subclasses(data["input"], data["label"], 2, seed=0)
    assert torch.equal(codes // 2, data["label"])
    assert len(set(zip(codes.tolist(), data["way"].tolist(), strict=True))) == 4, "one code for each way to look"
    assert torch.equal(codes, cluster_subclasses(data["input"], data["label"], 2, seed=0))


def test_too_few_images_for_so_many_codes() -> None:
    data = looks()
    with pytest.raises(DataError, match="class 0 has 40 images, too few for 41 clusters"):
        cluster_subclasses(data["input"], data["label"], 41, seed=0)


def test_images_that_look_alike_have_no_codes_without_images() -> None:
    data = looks()
    same = {**data, "input": torch.where(data["label"].view(-1, 1, 1, 1) == 1, data["input"], data["input"][:1])}
    with pytest.raises(DataError, match="class 0 look too much alike for 2 clusters"):
        cluster_subclasses(same["input"], same["label"], 2, seed=0)


def test_classes_are_drawn_evenly_and_told_by_their_codes() -> None:
    data = looks()
    codes = cluster_subclasses(data["input"], data["label"], 2, seed=0)
    card = toy.card(label_names=("a", "b"), clusters_per_class=2)
    images, output, *_ = _Batches(
        {**data, "subclass": codes}, card, replace(toy.TRAINING, batch_size=2000, null=0.25), 0
    )(0)
    counts = torch.bincount(output, minlength=5) / 2000
    assert torch.allclose(counts, torch.tensor([0.1875] * 4 + [0.25]), atol=0.04)
    above = images[:, 0, :4].mean((1, 2)) > images[:, 0, 4:].mean((1, 2))
    assert all(len(above[output == code].unique()) == 1 for code in (0, 1)), "what is told is what is shown"


@pytest.mark.parametrize("codes", [1, 2])
def test_a_card_with_codes_needs_them_and_another_takes_none(codes: int) -> None:
    data = looks()
    if codes == 1:
        data["subclass"] = cluster_subclasses(data["input"], data["label"], 2, seed=0)
    with pytest.raises(DataError, match=f"the card has {codes} clusters a class"):
        _Batches(data, toy.card(label_names=("a", "b"), clusters_per_class=codes), toy.TRAINING, 0)


def test_a_generator_has_a_row_for_each_code(tmp_path: Path) -> None:
    data = looks()
    data["subclass"] = cluster_subclasses(data["input"], data["label"], 2, seed=0)
    card = toy.card(label_names=("a", "b"), clusters_per_class=2)
    result = train_generator(card, data, GeneratorTraining(steps=3, batch_size=8), tmp_path / "g")
    assert len(result.class_embeddings()) == 4
    assert result.card.clusters_per_class == 2
    again = load_generator(tmp_path / "g", space="code")
    assert again.initial_prototypes(3).shape == (3, 4), "so many weights has a mixture"
    assert torch.allclose(result.initial_prototypes(1)[0], result.class_embeddings().mean(0), atol=1e-6)
