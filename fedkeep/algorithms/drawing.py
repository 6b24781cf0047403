"""What methods share whose server draws images from prototypes, for which clients look (FedDCL, eqs. 4 and 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedkeep.algorithms.said import LARGEST
from fedkeep.errors import RunError
from fedkeep.interface import Algorithm, Client, Cohort, Data, Server, on_client
from fedkeep.interface.algorithm import C
from fedkeep.interface.party import S
from fedkeep.options import option
from fedkeep.synthesis.diffusion.noise import Sampler
from fedkeep.synthesis.diffusion.prototypes import Average, Inversion, average, check_held
from fedkeep.synthesis.diffusion.store import ImageStore, PrototypeStore


@dataclass(frozen=True, eq=False)
class Found:
    """What a client found: prototypes of the task's classes, [new classes, ...], its examples of each, int64, and the
    hash of the generator that they are for."""

    prototypes: Tensor
    counts: Tensor
    generator: str


@dataclass(frozen=True)
class Drawing(Algorithm[S, C]):
    """Base of methods that describe each new class by a prototype under a frozen diffusion model.

    Clients look for prototypes and the server averages them, ``proto_rounds`` times; then it draws images.
    """

    needs = ("generator",)

    proto_rounds: int = option(5, "rounds of prototype search at a task's beginning", low=0)
    proto_steps: int = option(50, "optimiser steps of a client in each", low=1)
    proto_batch: int = option(128, "images a step", low=1)
    proto_opt: Literal["adamw", "sgd"] = option("adamw", "with learning rate 0.02, or 0.01 for sgd")
    proto_agg: Average = option("uniform", "who counts: all, those with examples of the class, or by how many")
    sampler: Literal["ddim", "dpm-solver++", "ddpm"] = option("ddim", "how images are drawn")
    sampler_steps: int = option(50, "steps of it", low=1)
    guidance: float = option(2.0, "weight of the prototype over nothing; 1: no guidance", low=0.0)

    def prototypes(self, server: Server[S], clients: Cohort) -> Tensor:
        """Return the prototypes of the task's classes, [new classes, ...], which the clients look for together."""
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
        return rows

    def draw(self, server: Server[S], rows: Sequence[Tensor], count: int) -> Data:
        """Return ``count`` images of each class of the last tasks, by each one's generator; asked again, other images.

        Parameters
        ----------
        rows : the prototypes of each of these tasks, up to the task at hand.
        """
        sampler = Sampler(self.sampler, self.sampler_steps, self.guidance)
        seed, store, drawn = server.rng("images").initial_seed(), ImageStore(), []
        first = server.classes - sum(map(len, rows))
        for task, some in enumerate(rows, start=server.task - len(rows) + 1):
            classes = range(first, first + len(some))
            drawn.append(store.images(server.generator_of(task), some, classes, count, sampler, seed=seed))
            first = classes.stop
        return {name: torch.cat([one[name] for one in drawn]).to(rows[0].device) for name in drawn[0]}

    def fault(self, server: Server[S], reply: Any, examples: int) -> str | None:
        if not isinstance(reply, Found):
            return super().fault(server, reply, examples)
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
        images, rng = client.data["image"], client.rng("prototypes")
        found = PrototypeStore().inverted(client.generator, rows, images, labels, settings, rng)
        return Found(found.prototypes, found.counts.to(rows.device), client.generator.loaded_hash)
