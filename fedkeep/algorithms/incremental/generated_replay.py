"""What DDDR and FedDCL share: a pool of generated images, which each client receives once and trains on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedkeep.algorithms.incremental.class_incremental import concat, mark_generated
from fedkeep.algorithms.incremental.prototype_generation import PrototypeOptions, find_prototypes, generate_images
from fedkeep.interface import Client, Cohort, Data, Server


@dataclass
class ImagePool:
    """What the server keeps.

    ``pool``: Generated images, in order of classes, equally many of each.
    ``prototypes``: Those of each task's classes, [its classes, ...].
    ``num_received``: Of how many classes each client has the images.
    """

    pool: Data = field(default_factory=dict)
    prototypes: list[Tensor] = field(default_factory=list)
    num_received: dict[str, int] = field(default_factory=dict)


def extend_pool(method: PrototypeOptions, server: Server[Any], clients: Cohort, count: int) -> None:
    """Find the prototypes of the task's classes, and generate ``count`` images of each into the server's pool."""
    state, prototypes = server.state, find_prototypes(method, server, clients)
    state.prototypes = [*state.prototypes, prototypes]
    images = generate_images(server, [prototypes], count)
    state.pool = concat(state.pool, images) if state.pool else images


def missing_images(server: Server[Any], cohort: Cohort) -> Mapping[str, Data]:
    """Return, for each client that does not have all images of the pool, those that it lacks."""
    pool = server.state.pool
    num_received = {client.id: server.state.num_received.get(client.id, 0) for client in cohort}
    return {
        client: {name: column[pool["label"] >= count] for name, column in pool.items()}
        for client, count in num_received.items()
        if count < server.num_classes
    }


def select_images(pool: Data, start: int, stop: int, count: int) -> Data:
    """Return the first ``count`` generated images of each class from ``start`` to ``stop - 1``."""
    rows = torch.cat([(pool["label"] == c).nonzero().flatten()[:count] for c in range(start, stop)])
    return {name: column[rows] for name, column in pool.items()}


def replay_data(client: Client[Any], pool: Data, per_new_class: int, per_old_class: int) -> list[Data]:
    """Return what a client trains on: data set 0, and data set 1 if old classes are replayed.

    ``pool``: The generated images that it has.
    ``per_new_class``: Generated images of each new class, which are added to the client's examples in data set 0.
    ``per_old_class``: Generated images of each old class, data set 1; 0, or no old class: there is none.
    """
    generated = mark_generated(select_images(pool, client.num_old_classes, client.num_classes, per_new_class))
    data = [concat(mark_generated(client.data, False), generated)]
    if client.num_old_classes and per_old_class:
        data.append(mark_generated(select_images(pool, 0, client.num_old_classes, per_old_class)))
    return data
