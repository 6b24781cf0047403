"""What methods share whose server draws images of classes: clients look for prototypes, and are shown what is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import TypeVar

from fedkeep.algorithms.ft_kd import LARGEST
from fedkeep.algorithms.incremental import CESlice, cross_entropy, joined, made
from fedkeep.errors import RunError
from fedkeep.interface import Algorithm, Client, Cohort, Data, Fit, Server, on_client
from fedkeep.interface.algorithm import C
from fedkeep.models import Weights
from fedkeep.objectives import CrossEntropy, Objective, Scaled, Slice, SupCon
from fedkeep.options import option
from fedkeep.synthesis.diffusion.noise import Sampler
from fedkeep.synthesis.diffusion.prototypes import Average, Inversion, average, check_held, invert
from fedkeep.synthesis.diffusion.store import ImageStore


@dataclass
class Gallery:
    """What the server keeps.

    Attributes
    ----------
    pool : drawn images, equally many of each class, in order of classes.
    prototypes : of all classes, [classes, ...].
    shown : how many classes' images each client has.
    """

    pool: Data = field(default_factory=dict)
    prototypes: Tensor = field(default_factory=lambda: torch.zeros(0))
    shown: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Found:
    """What a client found: prototypes of the task's classes, [new classes, ...], its examples of each, int64, and the
    hash of the generator that they are for."""

    prototypes: Tensor
    counts: Tensor
    generator: str


G = TypeVar("G", bound=Gallery, default=Gallery)


@dataclass(frozen=True)
class WithDrawn(Algorithm[G, C]):
    """Base of methods that describe each new class by a prototype under a frozen diffusion model (FedDCL, eqs. 4, 5).

    As a task begins clients look for prototypes and the server averages them, ``proto_rounds`` times; then it draws
    images of the new classes. A client is shown once what it has not seen yet, and trains on it beside its examples.
    """

    needs = ("generator",)

    tau: float = option(2.0, "softmax temperature of all distillation; there is no tau squared", low=1e-3)
    w_ce_pre: float = option(1.0, "weight of the labels of made images of old classes", low=0.0)
    w_kd: float = option(1.0, "weight of what an old model says of them", low=0.0)
    w_scl: float = option(0.0, "weight of supervised contrast, on examples and made images of new classes", low=0.0)
    ce_slice: CESlice = option("new", "labels of the task among its own classes, or among all that were seen")
    cur: int = option(200, "made images of each new class in a client's training; 0: none", low=0)
    pre: int = option(100, "made images of each old class there; 0: none", low=0)
    proto_rounds: int = option(5, "rounds of prototype search at a task's beginning", low=0)
    proto_steps: int = option(50, "optimiser steps of a client in each", low=1)
    proto_batch: int = option(128, "images a step", low=1)
    proto_opt: Literal["adamw", "sgd"] = option("adamw", "with learning rate 0.02, or 0.01 for sgd")
    proto_agg: Average = option("uniform", "who counts: all, those with examples of the class, or by how many")
    sampler: Literal["ddim", "dpm-solver++", "ddpm"] = option("ddim", "how images are drawn")
    sampler_steps: int = option(50, "steps of it", low=1)
    guidance: float = option(2.0, "weight of the prototype over nothing; 1: no guidance", low=0.0)

    @property
    def images(self) -> int:
        """How many images are drawn of each class."""
        return max(self.cur, self.pre)

    def draw_new(self, server: Server[G], clients: Cohort) -> None:
        """Look for the prototypes of the task's classes, and draw their images into the pool."""
        kept = server.state
        rows = server.generator.start(server.classes - server.old)
        for _ in range(self.proto_rounds):
            found = list(clients.ask(self.search, rows).values())
            if not found:
                raise RunError(
                    "no client found a prototype, so that nothing can be drawn. The record says why each was lost."
                )
            if len(found) == len(clients):  # a class whose holders are away keeps the row that it had
                check_held(torch.stack([one.counts for one in found]).sum(0), server.label_names[server.old :])
            rows = average(rows, [one.prototypes for one in found], [one.counts for one in found], self.proto_agg)
        kept.prototypes = torch.cat((kept.prototypes, rows)) if server.old else rows
        drawn = self.draw(server, server.old)
        kept.pool = joined(kept.pool, drawn) if kept.pool else drawn

    def draw(self, server: Server[G], first: int) -> Data:
        """Return images of the classes from ``first`` on, other ones in every round."""
        rows = server.state.prototypes[first:]
        drawn = ImageStore().images(
            server.generator,
            rows,
            range(first, server.classes),
            self.images,
            Sampler(self.sampler, self.sampler_steps, self.guidance),
            seed=server.rng("images").initial_seed(),
        )
        return {name: column.to(rows.device) for name, column in drawn.items()}

    def unseen(self, server: Server[G], cohort: Cohort) -> Mapping[str, Data]:
        """Return, for each client that has not seen all images, those that it has not."""
        shown = {client.id: server.state.shown.get(client.id, 0) for client in cohort}
        return {
            client: self.part(server.state.pool, classes, server.classes, self.images)
            for client, classes in shown.items()
            if classes < server.classes
        }

    def part(self, pool: Data, start: int, stop: int, count: int, skip: int = 0) -> Data:
        """Return ``count`` drawn images of each class from ``start`` to ``stop - 1``, after the first ``skip``."""
        within = torch.arange(skip, skip + count, device=pool["label"].device)
        rows = torch.cat([within + c * self.images for c in range(start, stop)])
        return {name: column[rows] for name, column in pool.items()}

    def practised(self, client: Client[C], model: Weights, pool: Data, taught: Objective) -> Fit:
        """Train a model on examples and drawn images of new classes, and beside them, as data set 1, on old classes'.

        Parameters
        ----------
        taught : what an old model says of old classes' images.
        """
        old = client.old
        drawn = made(self.part(pool, old, client.classes, self.cur))
        objective, data = cross_entropy(client, self.ce_slice), [joined(made(client.data, False), drawn)]
        if self.w_scl:
            objective = objective + Scaled(self.w_scl, SupCon())
        if old and self.pre:
            objective = objective + Slice(Scaled(self.w_ce_pre, CrossEntropy(on=1)), 0, old) + taught
            data.append(made(self.part(pool, 0, old, self.pre)))
        return client.fit(model, objective, *data)

    def fault(self, server: Server[G], reply: Any, examples: int) -> str | None:
        if not isinstance(reply, Found):
            return None
        new = server.classes - server.old
        size, found = (new, *server.generator.start(1).shape[1:]), tuple(reply.prototypes.shape)
        if found != size or reply.prototypes.dtype != torch.float32:
            return f"prototypes of shape {list(found)} in {reply.prototypes.dtype}, not {list(size)} in float32"
        if reply.prototypes.abs().max() > LARGEST:
            return f"prototypes with numbers beyond {LARGEST:g}, which would swallow all others' in the mean"
        counts = reply.counts.tolist()
        whole = reply.counts.shape == (new,) and reply.counts.dtype == torch.int64
        if not whole or min(counts) < 0 or sum(counts) != examples:
            return f"counts of its examples that cannot be: {counts}, and it has {examples}"
        if reply.generator != server.generator.loaded_hash:
            return "prototypes for another generator than the server's; give all parties the same folder"
        return None

    @on_client
    def search(self, client: Client[C], rows: Tensor) -> Found:
        """Look for the prototypes of the task's classes in the own examples (eq. 4)."""
        settings = Inversion(self.proto_steps, self.proto_batch, self.proto_opt)
        labels = client.data["label"] - client.old
        found = invert(client.generator, rows, client.data["image"], labels, settings, client.rng("prototypes"))
        return Found(found.prototypes, found.counts.to(rows.device), client.generator.loaded_hash)
