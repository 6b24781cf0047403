"""Clusters of similar images within each class, as pseudo-labels for a generator of few classes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from fedkeep._utils import seeds
from fedkeep.errors import DataError

SIDE = 8  # images are compared at 8 x 8 pixels: where something is and its colour, no detail
MAX_ITERATIONS = 100  # of Lloyd's algorithm


def cluster_subclasses(images: Tensor, labels: Tensor, clusters_per_class: int, seed: int) -> Tensor:
    """Return the subclass of every image: label * clusters_per_class + its cluster within the class.

    Clusters are found by k-means on the images at 8 x 8 pixels. The pseudo-labels need no network, and the same
    arguments give the same clusters.

    ``images``: uint8 [n, channels, height, width].
    ``labels``: int64 [n].
    Returns: int64 [n].
    """
    subclasses = torch.zeros_like(labels)
    for c in torch.unique(labels).tolist():
        rows = (labels == c).nonzero().flatten()
        if len(rows) < clusters_per_class:
            raise DataError(
                f"class {c} has {len(rows)} images, too few for {clusters_per_class} clusters. Ask for fewer clusters."
            )
        small = adaptive_avg_pool2d(images[rows].cpu().float(), SIDE).flatten(1)
        # The purpose is part of the seed, and keeps the word that it had when generators were first trained.
        clusters = k_means(small, clusters_per_class, seeds.rng(seed, f"codes of class {c}"))
        if len(torch.unique(clusters)) < clusters_per_class:  # no image would teach what the other subclasses mean
            raise DataError(
                f"the images of class {c} look too much alike for {clusters_per_class} clusters. Ask for fewer "
                "clusters."
            )
        subclasses[rows] = c * clusters_per_class + clusters.to(subclasses.device)
    return subclasses


def k_means(points: Tensor, num_clusters: int, rng: torch.Generator) -> Tensor:
    """Return the cluster of each point: k-means++ (Arthur & Vassilvitskii, 2007), then Lloyd's algorithm.

    ``points``: float [n, width], at least ``num_clusters`` of them.
    ``rng``: Draws the first centres.
    Returns: int64 [n], in 0..num_clusters - 1.
    """
    centres = points[torch.randint(len(points), (1,), generator=rng)]
    while len(centres) < num_clusters:
        # Clamped, so that equal points can be drawn too.
        distances = torch.cdist(points, centres).min(1).values.square().clamp(min=1e-12)
        centres = torch.cat((centres, points[torch.multinomial(distances, 1, generator=rng)]))
    clusters = torch.full((len(points),), -1)
    for _ in range(MAX_ITERATIONS):
        distances, nearest = torch.cdist(points, centres).min(1)
        if torch.equal(nearest, clusters):
            break
        clusters = nearest
        for cluster in range(num_clusters):
            members = points[clusters == cluster]
            centres[cluster] = members.mean(0) if len(members) else points[distances.argmax()]
    return clusters
