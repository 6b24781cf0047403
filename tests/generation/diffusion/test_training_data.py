"""What generators learn from under each regime."""

from __future__ import annotations

import string
from typing import Any

import pytest
import torch

from fedkeep.data import DataSet
from fedkeep.data.combine import emnist_style_letters
from fedkeep.errors import ConfigError
from fedkeep.generation import training as module
from fedkeep.generation.training import HELD_OUT, load_benchmark, load_training_data, rgb_to_grey

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase


def named(name: str, classes: tuple[str, ...], shape: tuple[int, int, int], each: int = 20) -> DataSet:
    count = each * len(classes)
    data = {
        "input": torch.randint(0, 256, (count, *shape), generator=torch.Generator().manual_seed(0)).to(torch.uint8),
        "label": torch.arange(count) % len(classes),
    }
    return DataSet(name, data, data, classes, (0.5,) * shape[0], (0.5,) * shape[0])


@pytest.fixture(autouse=True)
def _small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **_: Any) -> DataSet:
        if name == "femnist":
            return named(name, tuple(CHARACTERS), (1, 28, 28), each=1)
        if name == "femnist-letters":
            return emnist_style_letters(load("femnist"))
        if name == "cifar10":
            return named(name, tuple("0123456789"), (3, 32, 32), each=2)
        if name == "cifar100":
            return named(name, tuple(map(str, range(100))), (3, 4, 4), each=2)
        return named(name, ("x", "y", "z"), (1, 4, 4))

    monkeypatch.setattr(module, "load", load)


def test_paper_learns_from_every_training_image() -> None:
    found = load_training_data("grey", "paper")
    assert found.dataset.name == "mnist+emnist-letters-a-to-j+fashion-mnist"
    assert bool(found.is_seen.all())
    assert len(found.unseen["label"]) == 0
    assert load_benchmark("rgb").label_names == tuple(map(str, range(30)))


def test_same_classes_leaves_the_clients_the_rest_always_the_same() -> None:
    found = load_training_data("own", "same_classes")
    assert torch.bincount(found.seen["label"]).tolist() == [20 * HELD_OUT] * 3
    assert torch.bincount(found.unseen["label"]).tolist() == [20 * (1 - HELD_OUT)] * 3
    assert torch.equal(found.is_seen, load_training_data("own", "same_classes").is_seen)
    assert torch.equal(found.dataset.train["input"][~found.is_seen], found.unseen["input"])


def test_disjoint_has_no_class_of_the_clients() -> None:
    grey = load_training_data("grey", "disjoint").dataset
    letters = [name.removeprefix("femnist-letters: ") for name in grey.label_names if name.startswith("femnist")]
    assert letters == list("KLMNOPQRSTUVWXYZklmnopqrstuvwxyz")
    assert len(grey.label_names) == 42
    assert grey.shape == (1, 28, 28)
    assert load_training_data("rgb", "disjoint").dataset.name == "cifar10"
    assert load_training_data("other", "disjoint").dataset.name == "other"


@pytest.mark.parametrize(("name", "regime"), [("rgb", "paper"), ("grey", "ldm")])
def test_what_is_not_trained(name: str, regime: Any) -> None:
    with pytest.raises(ConfigError, match="nothing to train: it is the public text-to-image model"):
        load_training_data(name, regime)


def test_grey_of_colours() -> None:
    colours = torch.zeros(3, 3, 32, 32, dtype=torch.uint8)
    for channel in range(3):
        colours[channel, channel] = 200
    grey = rgb_to_grey(colours)
    assert grey.shape == (3, 1, 28, 28)
    assert grey[:, 0, 5, 5].tolist() == [60, 117, 23]
