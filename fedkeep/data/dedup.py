"""Remove images that someone has seen already: images are compared by a hash of their pixels."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from fedkeep.data.dataset import Data, DataSet


def image_hashes(images: Tensor) -> Tensor:
    """Return a hash of each image's pixels, or of other inputs' numbers.

    ``images``: uint8 ``[n, channels, height, width]``, or other inputs.
    Returns: int64 ``[n]``: equal for equal images; equal for different ones with a probability of 2^-64.
    """
    rows = images.cpu().numpy()
    hashes = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
    return torch.tensor([int.from_bytes(one, "little", signed=True) for one in hashes], dtype=torch.int64)


def note_on_copies(train: Tensor, test: Tensor) -> str:
    """Return a note on held-out examples that are exact copies of training examples; empty if there are none.

    ``train``, ``test``: The inputs of both splits.
    """
    count = int(torch.isin(image_hashes(test), image_hashes(train)).sum())
    if not count:
        return ""
    return (
        f"{count} of {len(test)} held-out examples are exact copies of training examples, on which a network does "
        "better than on new ones: remove copies, or name the column of what belongs together in data.group."
    )


def without_images(dataset: DataSet, hashes: Tensor, *, from_test: bool = False) -> DataSet:
    """Return a data set without the training images that have one of these hashes.

    ``hashes``: int64 ``[m]``; see `image_hashes`.
    ``from_test``: Whether such images leave the test split too, as where it was held out from the training split.
    """
    test = _without(dataset.test, hashes) if from_test else dataset.test
    return replace(dataset, train=_without(dataset.train, hashes), test=test)


def _without(split: Data, hashes: Tensor) -> Data:
    kept = ~torch.isin(image_hashes(split["input"]), hashes)
    return {name: column[kept] for name, column in split.items()}
