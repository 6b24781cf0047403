"""What a generator learns from: FedDCL's two benchmarks under each regime, or any data set."""

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
from fedkeep.synthesis.diffusion.generator import Regime

GREY = "mnist+emnist-letters-a-to-j+fashion-mnist"
HELD_OUT = 0.15
"""Share of each class's training images that only the generator has, in the regime ``same_classes``."""

DataDir = str | Path | None


@dataclass(frozen=True, eq=False)
class Material:
    """A data set, and which of its training images a generator learns from.

    Attributes
    ----------
    name : what it is called on the command line and in a generator's card.
    regime : what the generator's images have to do with the clients'.
    dataset : whole. Test images are never learned from.
    seen : bool [n], true for the training images that the generator learns from.
    """

    name: str
    regime: Regime
    dataset: DataSet
    seen: Tensor

    @property
    def held_out(self) -> float:
        """The share of each class that only the generator has; 0 where it learns from all, or from other classes."""
        return HELD_OUT if self.regime == "same_classes" else 0.0

    @property
    def learned(self) -> Data:
        """The training images that the generator learns from."""
        return {name: column[self.seen] for name, column in self.dataset.train.items()}

    @property
    def left(self) -> Data:
        """The training images that it does not see."""
        return {name: column[~self.seen] for name, column in self.dataset.train.items()}


def benchmark(name: str, data_dir: DataDir = None) -> DataSet:
    """Return the clients' data: ``grey`` and ``rgb`` as in FedDCL, or any data set by its name.

    ``grey`` is MNIST, EMNIST letters A to J and Fashion-MNIST as one set of 30 classes, ``rgb`` the first 30 classes of
    CIFAR-100. Parameters and errors are those of `fedkeep.data.load`.
    """
    if name == "grey":
        return load(GREY, data_dir=data_dir)
    if name == "rgb":
        whole = load("cifar100", data_dir=data_dir)
        return select_classes(whole, whole.label_names[:30])
    return load(name, data_dir=data_dir)


def material(name: str, regime: Regime, data_dir: DataDir = None) -> Material:
    """Return what a generator learns from under a regime.

    For ``disjoint``, ``grey`` stands for FEMNIST's letters from K on, made to look like EMNIST's, and CIFAR-10 in grey
    for its texture; ``rgb`` stands for CIFAR-10; any other name for itself.

    Parameters
    ----------
    name : as in `benchmark`.

    Raises
    ------
    ConfigError
        Where there is nothing to train.
    DataError
        As in `fedkeep.data.load`.
    """
    if regime == "ldm" or (name, regime) == ("rgb", "paper"):
        raise ConfigError(
            f"{name} under the regime {regime!r} has nothing to train: it is the public text-to-image model, which is "
            "loaded (fedkeep.synthesis.diffusion.text_to_image). Train with the regime same_classes or disjoint."
        )
    dataset = _OTHERS[name](data_dir) if regime == "disjoint" and name in _OTHERS else benchmark(name, data_dir)
    labels = dataset.train["label"].cpu()
    seen = hold_out(labels, HELD_OUT) if regime == "same_classes" else torch.ones_like(labels, dtype=torch.bool)
    return Material(name, regime, dataset, seen)


def _grey_others(data_dir: DataDir) -> DataSet:
    return concatenate([load("femnist-letters", data_dir=data_dir), _in_grey(load("cifar10", data_dir=data_dir))])


def _rgb_others(data_dir: DataDir) -> DataSet:
    return load("cifar10", data_dir=data_dir)


_OTHERS: dict[str, Callable[[DataDir], DataSet]] = {"grey": _grey_others, "rgb": _rgb_others}


def as_grey(images: Tensor, side: int = 28) -> Tensor:
    """Return colour images, uint8 [n, 3, height, width], in grey (ITU-R BT.601), uint8 [n, 1, side, side]."""
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    parts = []
    for part in torch.split(images, 1000):
        grey = (part * weights).sum(1, keepdim=True)
        small = interpolate(grey, size=(side, side), mode="bilinear", antialias=True)
        parts.append(small.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(parts)


def _in_grey(dataset: DataSet) -> DataSet:
    """Return a data set with grey images; its normalisation is no longer of use."""
    train, test = ({**half, "image": as_grey(half["image"])} for half in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test, mean=(0.0,), std=(1.0,))
