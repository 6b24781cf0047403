"""The images that a generator is trained on: FedDCL's two benchmarks under each regime, or any data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedkeep.data import Data, DataSet, load
from fedkeep.data.combine import concatenate, select_classes
from fedkeep.data.holdout import hold_out
from fedkeep.errors import ConfigError
from fedkeep.generation.diffusion.generator import Regime

GREY = "mnist+emnist-letters-a-to-j+fashion-mnist"
HELD_OUT = 0.15
"""Share of each class's training images that only the generator sees, in the regime ``same_classes``."""

DataDir = str | Path | None


@dataclass(frozen=True, eq=False)
class GeneratorData:
    """A data set, and which of its training images a generator is trained on.

    ``name``: The name on the command line and in a generator's card.
    ``regime``: How the generator's images relate to the clients'.
    ``dataset``: The whole data set. A generator is never trained on test images.
    ``is_seen``: bool [n], true for the training images that the generator is trained on.
    """

    name: str
    regime: Regime
    dataset: DataSet
    is_seen: Tensor

    @property
    def held_out(self) -> float:
        """The share of each class that only the generator sees; 0 if it sees all of them, or other classes."""
        return HELD_OUT if self.regime == "same_classes" else 0.0

    @property
    def seen(self) -> Data:
        """The training images that the generator is trained on."""
        return {name: column[self.is_seen] for name, column in self.dataset.train.items()}

    @property
    def unseen(self) -> Data:
        """The training images that the generator does not see."""
        return {name: column[~self.is_seen] for name, column in self.dataset.train.items()}


def load_benchmark(name: str, data_dir: DataDir = None) -> DataSet:
    """Return the clients' data: ``grey`` or ``rgb`` as in FedDCL, or any data set by its name.

    ``name``: ``grey`` is MNIST, EMNIST letters A to J and Fashion-MNIST as one set of 30 classes. ``rgb`` is the first
        30 classes of CIFAR-100. Other names, and errors, are those of `fedkeep.data.load`.
    """
    if name == "grey":
        return load(GREY, data_dir=data_dir)
    if name == "rgb":
        whole = load("cifar100", data_dir=data_dir)
        return select_classes(whole, whole.label_names[:30])
    return load(name, data_dir=data_dir)


def load_training_data(name: str, regime: Regime, data_dir: DataDir = None) -> GeneratorData:
    """Return what a generator is trained on under a regime.

    ``name``: As in `load_benchmark`. For ``disjoint``, ``grey`` stands for FEMNIST's letters from K on, transformed to
        look like EMNIST's, and CIFAR-10 in grey for its texture; ``rgb`` stands for CIFAR-10; other names for
        themselves.
    ``regime``: How the generator's images relate to the clients'.
    """
    if regime == "ldm" or (name, regime) == ("rgb", "paper"):
        raise ConfigError(
            f"{name} under the regime {regime!r} has nothing to train: it is the public text-to-image model, which is "
            "loaded (fedkeep.generation.diffusion.text_to_image). Train with the regime same_classes or disjoint."
        )
    disjoint = regime == "disjoint" and name in _DISJOINT
    dataset = _DISJOINT[name](data_dir) if disjoint else load_benchmark(name, data_dir)
    labels = dataset.train["label"].cpu()
    is_seen = hold_out(labels, HELD_OUT) if regime == "same_classes" else torch.ones_like(labels, dtype=torch.bool)
    return GeneratorData(name, regime, dataset, is_seen)


def _disjoint_grey(data_dir: DataDir) -> DataSet:
    return concatenate([load("femnist-letters", data_dir=data_dir), _to_grey(load("cifar10", data_dir=data_dir))])


def _disjoint_rgb(data_dir: DataDir) -> DataSet:
    return load("cifar10", data_dir=data_dir)


_DISJOINT: dict[str, Callable[[DataDir], DataSet]] = {"grey": _disjoint_grey, "rgb": _disjoint_rgb}


def rgb_to_grey(images: Tensor, side: int = 28) -> Tensor:
    """Return colour images, uint8 [n, 3, height, width], in grey (ITU-R BT.601), uint8 [n, 1, side, side]."""
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    chunks = []
    for chunk in torch.split(images, 1000):
        grey = (chunk * weights).sum(1, keepdim=True)
        small = interpolate(grey, size=(side, side), mode="bilinear", antialias=True)
        chunks.append(small.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(chunks)


def _to_grey(dataset: DataSet) -> DataSet:
    """Return a data set with grey images; its normalisation no longer applies."""
    train, test = ({**half, "input": rgb_to_grey(half["input"])} for half in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test, mean=(0.0,), std=(1.0,))
