"""Images known by their content: those that somebody has seen can be left out wherever they turn up."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from fedkeep.data.dataset import DataSet


def fingerprints(images: Tensor) -> Tensor:
    """Return a hash of each image's pixels, int64 [n]: equal for equal pixels, and else by no chance that counts.

    Parameters
    ----------
    images : uint8 [n, channels, height, width].
    """
    rows = images.cpu().numpy()
    hashes = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
    return torch.tensor([int.from_bytes(one, "little", signed=True) for one in hashes], dtype=torch.int64)


def without(dataset: DataSet, seen: Tensor) -> DataSet:
    """Return a data set without the training images that have one of these fingerprints, int64 [m]."""
    left = ~torch.isin(fingerprints(dataset.train["image"]), seen)
    return replace(dataset, train={name: column[left] for name, column in dataset.train.items()})
