"""What methods share that replay drawn images: a pool of them, shown to clients, who train on it beside their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from math import ceil
from typing import Any
from typing import Literal
import torch
from torch import Tensor
from typing_extensions import TypeVar
from fedkeep.algorithms.drawing import Drawing
from fedkeep.algorithms.incremental import CESlice
from fedkeep.algorithms.incremental import cross_entropy
from fedkeep.algorithms.incremental import joined
from fedkeep.algorithms.incremental import made
from fedkeep.interface import Client
from fedkeep.interface import Cohort
from fedkeep.interface import Data
from fedkeep.interface import Fit
from fedkeep.interface import Server
from fedkeep.interface.algorithm import C
from fedkeep.interface.party import Party
from fedkeep.models import Weights
from fedkeep.options import option
from fedkeep.losses import CrossEntropy
from fedkeep.losses import Joint
from fedkeep.losses import Objective
from fedkeep.losses import Scaled
from fedkeep.losses import Slice
from fedkeep.losses import SupCon
from fedkeep.algorithms.incremental import by_head
from fedkeep.algorithms.incremental import old_classes
from fedkeep.objectives import Head
from fedkeep.objectives import Scale


@dataclass
class Gallery:
    """What the server keeps.

    Attributes
    ----------
    pool : drawn images, in order of classes.
    prototypes : of each task's classes, [its classes, ...].
    shown : how many classes' images each client has.
    """

    pool: Data = field(default_factory=dict)
    prototypes: list[Tensor] = field(default_factory=list)
    shown: dict[str, int] = field(default_factory=dict)


G = TypeVar("G", bound=Gallery, default=Gallery)


@dataclass(frozen=True)
class WithDrawn(Drawing[G, C]):
    """Base of methods whose clients train on drawn images of new and old classes.

    As a task begins the server draws images of its classes. A client is shown once what it has not seen yet.
    """

    head: Head = option(
        "sliced", "a student's softmax runs over all outputs, or over old and new ones apart, in all its terms"
    )
    tau: float = option(2.0, "softmax temperature of all distillation", low=1e-3)
    kd_scale: Scale = option("none", "whether all distillation is multiplied by tau squared")
    w_ce_pre: float = option(1.0, "weight of the labels of made images of old classes", low=0.0)
    w_kd: float = option(1.0, "weight of what an old model says of them", low=0.0)
    w_scl: float = option(0.0, "weight of supervised contrast, on examples and made images of new classes", low=0.0)
    ce_slice: CESlice | Literal["by_head"] = option(
        "by_head", "labels of the task among its own classes, or among all that were seen"
    )
    cur: int = option(200, "made images of each new class in a client's training; 0: none", low=0)
    pre: int = option(100, "made images of each old class there; 0: none", low=0)
    syn_count: Literal["per_class", "total"] = option(
        "per_class", "such numbers are of each class, or of a set's classes together"
    )
    bn_joint: bool = option(
        False, "own examples and old classes' images go through a client's network at once: batch norm sees both"
    )

    def per_class(self, count: int, classes: int) -> int:
        """Return how many images of each class a set has."""
        return count if self.syn_count == "per_class" else ceil(count / classes)

    def images(self, party: Party[Any]) -> int:
        """Return how many images are drawn of each of the task's classes, which will be old ones in the next."""
        new, seen = party.classes - party.old, party.classes
        return max(self.per_class(self.cur, new), self.per_class(self.pre, seen))

    def draw_new(self, server: Server[G], clients: Cohort) -> None:
        """Look for the prototypes of the task's classes, and draw their images into the pool."""
        kept, rows = server.state, self.prototypes(server, clients)
        kept.prototypes = [*kept.prototypes, rows]
        drawn = self.draw(server, [rows], self.images(server))
        kept.pool = joined(kept.pool, drawn) if kept.pool else drawn

    def unseen(self, server: Server[G], cohort: Cohort) -> Mapping[str, Data]:
        """Return, for each client that has not seen all images, those that it has not."""
        pool, shown = server.state.pool, {client.id: server.state.shown.get(client.id, 0) for client in cohort}
        return {
            client: {name: column[pool["label"] >= classes] for name, column in pool.items()}
            for client, classes in shown.items()
            if classes < server.classes
        }

    def part(self, pool: Data, start: int, stop: int, count: int, skip: int = 0) -> Data:
        """Return a set with drawn images of the classes from ``start`` to ``stop - 1``, after ``skip`` of each."""
        last = skip + self.per_class(count, stop - start)
        rows = torch.cat([(pool["label"] == c).nonzero().flatten()[skip:last] for c in range(start, stop)])
        return {name: column[rows] for name, column in pool.items()}

    def replayed(self, teacher: Weights) -> Objective:
        """Return what an old model teaches of drawn images of old classes, which are data set 1."""
        return old_classes(teacher, self.w_kd, self.tau, on=1, scale=self.kd_scale, head=self.head)

    def practised(self, client: Client[C], model: Weights, pool: Data, taught: Objective, steps: int = 0) -> Fit:
        """Train a model on examples and drawn images of new classes, and beside them, as data set 1, on old classes'.

        Parameters
        ----------
        taught : what an old model says of old classes' images.
        steps : of the optimiser; 0 for the recipe's epochs.
        """
        old = client.old
        drawn = made(self.part(pool, old, client.classes, self.cur))
        objective = cross_entropy(client, by_head(self.ce_slice, self.head))
        data = [joined(made(client.data, False), drawn)]
        if self.w_scl:
            objective = objective + Scaled(self.w_scl, SupCon())
        if old and self.pre:
            past: Objective = Scaled(self.w_ce_pre, CrossEntropy(on=1))
            objective = objective + (past if self.head == "joint" else Slice(past, 0, old)) + taught
            objective = Joint(objective) if self.bn_joint else objective
            data.append(made(self.part(pool, 0, old, self.pre)))
        if steps:
            data = [for_steps(client, columns, steps) for columns in data]
        return client.fit(model, objective, *data, passes=1 if steps else None)


def for_steps(party: Party[Any], data: Data, steps: int) -> Data:
    """Return rows drawn at random for so many optimiser steps, of which one pass over them then is; none of none."""
    rows = torch.randint(max(len(data["label"]), 1), (steps * party.training.batch_size,), generator=party.rng("steps"))
    rows = rows.to(data["label"].device)
    return {name: column[rows] if len(column) else column for name, column in data.items()}
