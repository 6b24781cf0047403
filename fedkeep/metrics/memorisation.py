"""Whether generated images repeat real ones: the distance to the nearest real image, against that of unseen images."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MOST = 100
"""Most generated images, and most test images, of each class that are measured: the first ones."""
NEAR = 0.05
"""Share of the test images whose distances count as near."""


def nearest_distances(images: Tensor, real: Tensor) -> Tensor:
    """Return the distance of each image to the nearest real one.

    ``images``: uint8 [n, channels, height, width].
    ``real``: uint8 [m, channels, height, width], m at least 1.
    Returns: Root mean squared difference of the pixels, as a share of their range, float32 [n].
    """
    points = real.flatten(1).float() / 255
    distances = [torch.cdist(one.flatten(1).float() / 255, points).amin(1) for one in torch.split(images, MOST)]
    return torch.cat(distances) / points.shape[1] ** 0.5 if distances else torch.zeros(0)


def near_copies(
    generated: Mapping[str, Tensor], train: Mapping[str, Tensor], test: Mapping[str, Tensor]
) -> dict[str, float] | None:
    """Compare generated images with training images, and test images with them.

    A generator that has not memorised gives images about as far from the training images as unseen ones are.

    ``generated``, ``train``, ``test``: ``"input"``, uint8 [n, channels, height, width], and ``"label"``, int64 [n].
    Returns: ``generated`` and ``test``: the median distance to the nearest training image of the class.
        ``near_copies``: the share of generated images that are nearer than all but `NEAR` of their class's test images.
        None if the images have different shapes, or no class has images of all three kinds.
    """
    if len({data["input"].shape[1:] for data in (generated, train, test)}) > 1:
        return None
    made, unseen, near = [], [], []
    for label in torch.unique(generated["label"]).tolist():
        ours, real, others = (data["input"][data["label"] == label] for data in (generated, train, test))
        if not min(len(ours), len(real), len(others)):
            continue
        made.append(nearest_distances(ours[:MOST], real))
        unseen.append(nearest_distances(others[:MOST], real))
        near.append(made[-1] < unseen[-1].quantile(NEAR))
    if not made:
        return None
    return {
        "generated": round(float(torch.cat(made).median()), 5),
        "test": round(float(torch.cat(unseen).median()), 5),
        "near_copies": round(float(torch.cat(near).float().mean()), 5),
    }
