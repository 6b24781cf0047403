"""Finer codes: a class's images in groups that look alike, so that a generator with few labels knows many things."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from fedkeep._utils import seeds
from fedkeep.errors import DataError

SIDE = 8  # images are compared at so many pixels: what is where and of which colour, no detail
SWEEPS = 100  # of Lloyd's algorithm, at most


def finer_codes(images: Tensor, labels: Tensor, each: int, seed: int) -> Tensor:
    """Return a code of every image: label * each + its group among the ``each`` groups of its class.

    Groups are found by k-means on the images at 8 x 8 pixels. So the pseudo-labels need no network, and the same
    arguments give the same ones.

    Parameters
    ----------
    images : uint8 [n, channels, height, width]. labels : int64 [n].

    Raises
    ------
    DataError
        For a class with fewer images than groups, or with images too much alike for so many.
    """
    codes = torch.zeros_like(labels)
    for c in torch.unique(labels).tolist():
        rows = (labels == c).nonzero().flatten()
        if len(rows) < each:
            raise DataError(f"class {c} has {len(rows)} images, too few for {each} codes. Ask for fewer codes.")
        looks = adaptive_avg_pool2d(images[rows].cpu().float(), SIDE).flatten(1)
        groups = k_means(looks, each, seeds.generator(seed, f"codes of class {c}"))
        if len(torch.unique(groups)) < each:  # nobody would learn what the others mean
            raise DataError(f"the images of class {c} look too much alike for {each} codes. Ask for fewer codes.")
        codes[rows] = c * each + groups.to(codes.device)
    return codes


def k_means(points: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Return the group of each point, int64 [n] in 0..count - 1: k-means++ (Arthur & Vassilvitskii, 2007), then Lloyd's
    algorithm until no point changes its group.

    Parameters
    ----------
    points : float [n, width], at least ``count`` of them.
    rng : of the first centres.
    """
    centres = points[torch.randint(len(points), (1,), generator=rng)]
    while len(centres) < count:
        apart = torch.cdist(points, centres).min(1).values.square().clamp(min=1e-12)  # equal points can be drawn too
        centres = torch.cat((centres, points[torch.multinomial(apart, 1, generator=rng)]))
    groups = torch.full((len(points),), -1)
    for _ in range(SWEEPS):
        apart, nearest = torch.cdist(points, centres).min(1)
        if torch.equal(nearest, groups):
            break
        groups = nearest
        for group in range(count):
            members = points[groups == group]
            centres[group] = members.mean(0) if len(members) else points[apart.argmax()]
    return groups
