"""The handwritten digits that come inside scikit-learn: a data set without a download."""

from __future__ import annotations

import torch

from fedkeep.data.dataset import DataSet, channel_statistics
from fedkeep.data.holdout import hold_out

TEST_SHARE = 0.2


def digits() -> DataSet:
    """Return the 1,797 handwritten digits of 8 x 8 pixels, a stratified fifth of them as the test split.

    The pixel values 0..16 are scaled to 0..255. Source: Alpaydin & Kaynak, "Optical Recognition of Handwritten
    Digits", UCI (1998), the test part, as scikit-learn ships it.
    """
    from sklearn.datasets import load_digits

    loaded = load_digits()
    image = (torch.from_numpy(loaded.images) * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    label = torch.from_numpy(loaded.target).long()
    chosen = hold_out(label, TEST_SHARE)
    train = {"image": image[~chosen], "label": label[~chosen]}
    test = {"image": image[chosen], "label": label[chosen]}
    mean, std = channel_statistics(train["image"])
    return DataSet("digits", train, test, tuple(map(str, range(10))), mean, std)
