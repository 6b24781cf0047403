"""The workloads' networks in plain PyTorch, as one would write them by hand."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from work import Work


def build(work: Work) -> nn.Sequential:
    """Return a workload's network with its initial weights."""
    _, channels, height, width = work.images.shape
    network = {"mlp": mlp, "lenet5": lenet5, "cnn4": cnn4, "resnet18": resnet18}[work.network](
        channels, height, width, work.classes
    )
    load(network, work.initial)
    return network


@lru_cache(maxsize=1)
def once(folder: str) -> tuple[Work, nn.Sequential]:
    """Return the work in a folder and its network, made once in a process."""
    work = Work(folder)
    return work, build(work)


def mlp(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """Return a perceptron with one hidden layer of 64 units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 64), nn.ReLU(), nn.Linear(64, classes))


def lenet5(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """Return LeNet-5 with ReLU and max-pooling."""
    flat = 16 * ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


def cnn4(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """Return the four-layer network of FedNTD."""
    flat = 64 * (height // 4) * (width // 4)
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(flat, 512), nn.ReLU(), nn.Linear(512, classes)),
    )


def resnet18(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """Return ResNet-18 for small images, with group norm."""
    blocks = [
        Block(before, maps, stride)
        for last, maps in ((64, 64), (64, 128), (128, 256), (256, 512))
        for before, stride in ((last, 1 if maps == last else 2), (maps, 1))
    ]
    return nn.Sequential(
        *(*normed(channels, 64, 3, 1), nn.ReLU(), *blocks),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)),
    )


class Block(nn.Module):
    """Two convolutions, and a shortcut around them."""

    def __init__(self, before: int, maps: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*normed(before, maps, 3, stride), nn.ReLU(), *normed(maps, maps, 3, 1))
        self.shortcut = nn.Identity() if before == maps else nn.Sequential(*normed(before, maps, 1, stride))

    def forward(self, images: Tensor) -> Tensor:
        """Apply the block."""
        return nn.functional.relu(self.branch(images) + self.shortcut(images))


def normed(before: int, maps: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    """Return a convolution and its group norm."""
    return nn.Conv2d(before, maps, kernel, stride, kernel // 2, bias=False), nn.GroupNorm(32, maps)


def load(network: nn.Module, weights: dict[str, np.ndarray]) -> None:
    """Copy weights, in the order of the parameters, into a network."""
    with torch.no_grad():
        for own, given in zip(network.parameters(), weights.values(), strict=True):
            own.copy_(torch.from_numpy(given))


def by_name(network: nn.Module, work: Work) -> dict[str, np.ndarray]:
    """Return a network's weights under FedKeep's names."""
    weights = [parameter.detach().numpy().copy() for parameter in network.parameters()]
    return dict(zip(work.initial, weights, strict=True))
