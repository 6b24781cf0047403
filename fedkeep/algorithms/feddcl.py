"""FedDCL: a server learns task after task from clients of other networks, through images that prototypes describe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fedkeep.algorithms.ft_kd import Ensemble, Said, averaged
from fedkeep.algorithms.incremental import CESlice, cross_entropy, joined, old_classes
from fedkeep.errors import RunError
from fedkeep.interface import Algorithm, Client, Cohort, Data, Server, each, on_client
from fedkeep.interface.party import Party
from fedkeep.models import Weights
from fedkeep.objectives import NOTHING, CrossEntropy, Objective, Scaled, Slice
from fedkeep.objectives.answers import taught
from fedkeep.options import option
from fedkeep.synthesis.diffusion.noise import Sampler
from fedkeep.synthesis.diffusion.prototypes import Average, Inversion, average, check_held, invert
from fedkeep.synthesis.diffusion.store import ImageStore


@dataclass
class Made:
    """Images that were made, and what the server's old model says of some.

    Attributes
    ----------
    pool : equally many of each class, in order of classes.
    answers : logits [images, old classes] about those of old classes from which it is learned; empty in the first task.
    """

    pool: Data = field(default_factory=dict)
    answers: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


@dataclass
class Gallery(Made):
    """What the server keeps: also the prototypes of all classes, its model before the task, and how many classes'
    images each client has."""

    prototypes: Tensor = field(default_factory=lambda: torch.zeros(0))
    old: Weights = field(default_factory=dict)
    shown: dict[str, int] = field(default_factory=dict)


@dataclass
class Visitor(Made):
    """What a client keeps: also its own model, and that before the task."""

    model: Weights = field(default_factory=dict)
    old: Weights = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Found:
    """What a client found: prototypes of the task's classes, [new classes, ...], its examples of each, int64, and the
    hash of the generator that they are for."""

    prototypes: Tensor
    counts: Tensor
    generator: str


@dataclass(frozen=True)
class FedDCL(Algorithm[Gallery, Visitor]):
    """Data-free continual learning (Algorithm 1, its slips corrected): weights and examples stay at home.

    *As a task begins* (eqs. 4, 5) clients look for the prototype of each new class under a frozen diffusion model, and
    the server averages them, ``proto_rounds`` times. The server then draws images of the new classes, once for all
    rounds (section V-D; the printed algorithm draws them anew in every update), and shows them to the clients.

    *A round*: a client trains its own model by CE[new] on its examples and made images, and, on made images of old
    classes, w_ce_pre CE[old] + w_kd KD[old] from its own model of the task before (eqs. 6 to 8). It says what it thinks
    of the server's made images of new classes. The server learns their mean there, and what its own old model says of
    old classes (eqs. 9 to 11); then the clients do (eq. 12). With ``server_loss=labels`` it learns the made images'
    labels alone, the control that tells what the images are worth.

    The paper prints no temperature: 2 without tau^2, as in the code of DDDR, which it builds on, whose w_ce_pre is 1/2
    and w_kd 10. Counts of images are read per class, inner "rounds" as passes; local ones are the recipe's epochs. The
    optimiser of prototypes is DDDR's too. One pool of images serves all four sets, each the first of a class.
    """

    title = "FedDCL"
    paper = "FedDCL, 2025 (arXiv 2509.25977): federated data-free continual learning with diffusion prototypes"
    needs = ("generator",)
    networks = "any"

    tau: float = option(2.0, "softmax temperature of all distillation; there is no tau squared", low=1e-3)
    w_ce_pre: float = option(1.0, "weight of the labels of made images of old classes", low=0.0)
    w_kd: float = option(1.0, "weight of what a client's own old model says of them", low=0.0)
    ensemble: Ensemble = option("prob", "the clients' mean is one of probabilities, or of logits")
    ce_slice: CESlice = option("new", "labels of the task among its own classes, or among all that were seen")
    server_loss: Literal["kd", "labels"] = option("kd", "the server learns what clients say, or the labels of images")
    server_passes: int = option(2, "of the server over made images (Q k to s)", low=0)
    feedback_passes: int = option(1, "of the clients over them afterwards (Q s to k)", low=0)
    cur: int = option(200, "made images of each new class in a client's training; 0: none", low=0)
    pre: int = option(100, "made images of each old class there; 0: none", low=0)
    server_cur: int = option(500, "made images of each new class for the server, and for feedback", low=1)
    server_pre: int = option(500, "made images of each old class there", low=1)
    proto_rounds: int = option(5, "rounds of prototype search at a task's beginning", low=0)
    proto_steps: int = option(50, "optimiser steps of a client in each", low=1)
    proto_batch: int = option(128, "images a step", low=1)
    proto_opt: Literal["adamw", "sgd"] = option("adamw", "with learning rate 0.02, or 0.01 for sgd")
    proto_agg: Average = option("uniform", "who counts: all, those with examples of the class, or by how many")
    sampler: Literal["ddim", "dpm-solver++", "ddpm"] = option(
        "ddim", "how images are drawn; the paper's grey ones by ddpm in 500 steps"
    )
    sampler_steps: int = option(50, "steps of it", low=1)
    guidance: float = option(2.0, "weight of the prototype over nothing; 1: no guidance", low=0.0)

    def begin_task(self, server: Server[Gallery], clients: Cohort) -> None:
        super().begin_task(server, clients)
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
        made = self.draw(server, rows)
        kept.pool = joined(kept.pool, made) if kept.pool else made
        if server.old:
            replayed = self.part(kept.pool, 0, server.old, self.server_pre)
            kept.answers = server.predict(kept.old, replayed)[:, : server.old]

    def draw(self, server: Server[Gallery], rows: Tensor) -> Data:
        """Return images of the task's classes, as many of each as any part of the method needs."""
        made = ImageStore().images(
            server.generator,
            rows,
            range(server.old, server.classes),
            self.images,
            Sampler(self.sampler, self.sampler_steps, self.guidance),
            seed=server.rng("images").initial_seed(),
        )
        return {name: column.to(rows.device) for name, column in made.items()}

    def round(self, server: Server[Gallery], cohort: Cohort) -> None:
        kept = server.state
        shown = {client.id: kept.shown.get(client.id, 0) for client in cohort}
        fresh = {
            client: Made(self.part(kept.pool, classes, server.classes, self.images), kept.answers)
            for client, classes in shown.items()
            if classes < server.classes
        }
        got = cohort.ask(self.receive, each(fresh)) if fresh else ()
        kept.shown = kept.shown | dict.fromkeys(got, server.classes)
        replies = [reply.logits for reply in cohort.ask(self.learn).values()]
        said = averaged(replies, self.tau, self.ensemble)
        if self.server_loss == "kd":
            server.model = self.distilled(server, server.model, said, self.server_passes)
        else:
            everything = self.part(kept.pool, 0, server.classes, self.server_cur)
            server.model = server.fit(server.model, CrossEntropy(), everything, passes=self.server_passes).model
        cohort.start(self.feedback, said)

    def end_task(self, server: Server[Gallery], clients: Cohort) -> None:
        server.state.old = server.model
        clients.ask(self.remember)

    def fault(self, server: Server[Gallery], reply: Any, examples: int) -> str | None:
        new = server.classes - server.old
        if isinstance(reply, Found):
            size, found = (new, *server.generator.start(1).shape[1:]), tuple(reply.prototypes.shape)
            if found != size or reply.prototypes.dtype != torch.float32:
                return f"prototypes of shape {list(found)} in {reply.prototypes.dtype}, not {list(size)} in float32"
            counts = reply.counts.tolist()
            whole = reply.counts.shape == (new,) and reply.counts.dtype == torch.int64
            if not whole or min(counts) < 0 or sum(counts) != examples:
                return f"counts of its examples that cannot be: {counts}, and it has {examples}"
            if reply.generator != server.generator.loaded_hash:
                return "prototypes for another generator than the server's; give all parties the same folder"
        if isinstance(reply, Said):
            wanted = (new * self.server_cur, new)
            if reply.logits.shape != wanted or reply.logits.dtype != torch.float32:
                return f"logits of shape {list(reply.logits.shape)} in {reply.logits.dtype}, not {list(wanted)}"
        return None

    def own_model(self, state: Visitor) -> Weights:
        return state.model

    @on_client
    def search(self, client: Client[Visitor], rows: Tensor) -> Found:
        """Look for the prototypes of the task's classes in the own examples (eq. 4)."""
        settings = Inversion(self.proto_steps, self.proto_batch, self.proto_opt)
        labels = client.data["label"] - client.old
        found = invert(client.generator, rows, client.data["image"], labels, settings, client.rng("prototypes"))
        return Found(found.prototypes, found.counts.to(rows.device), client.generator.loaded_hash)

    @on_client
    def receive(self, client: Client[Visitor], made: Made) -> None:
        """Keep images of classes that the client had none of, and what the old server says of old ones."""
        kept = client.state
        kept.pool, kept.answers = joined(kept.pool, made.pool) if kept.pool else made.pool, made.answers

    @on_client
    def learn(self, client: Client[Visitor]) -> Said:
        """Train the own model on examples and made images; tell what it thinks of the server's (eqs. 6 to 8)."""
        kept, old = client.state, client.old
        model = client.grown(kept.model) if kept.model else client.initial
        examples = {name: client.data[name] for name in ("image", "label")}
        made = self.part(kept.pool, old, client.classes, self.cur)
        objective, data = cross_entropy(client, self.ce_slice), [joined(examples, made)]
        if old and self.pre:
            labels = Slice(Scaled(self.w_ce_pre, CrossEntropy(on=1)), 0, old)
            objective = objective + labels + old_classes(kept.old, self.w_kd, self.tau, on=1)
            data.append(self.part(kept.pool, 0, old, self.pre))
        kept.model = client.fit(model, objective, *data).model
        return Said(client.predict(kept.model, self.part(kept.pool, old, client.classes, self.server_cur))[:, old:])

    @on_client
    def feedback(self, client: Client[Visitor], said: Tensor) -> None:
        """Learn what all clients think of new classes' images, and the old server of old ones' (eq. 12)."""
        client.state.model = self.distilled(client, client.state.model, said, self.feedback_passes)

    @on_client
    def remember(self, client: Client[Visitor]) -> None:
        """Keep the task's last model as a teacher of the next."""
        client.state.old = client.state.model

    def distilled(self, party: Party[Any], model: Weights, said: Tensor, passes: int) -> Weights:
        """Return a model that has learned what was said; a pass is over the larger of both sets of images (eq. 11)."""
        pool, answers, old = party.state.pool, party.state.answers, party.old
        parts = [(said, old, self.part(pool, old, party.classes, self.server_cur))]
        if old:
            parts.append((answers, 0, self.part(pool, 0, old, self.server_pre)))
        parts.sort(key=lambda part: len(part[2]["label"]), reverse=True)
        lesson: Objective = NOTHING
        for number, (logits, start, data) in enumerate(parts):
            term = taught(logits, data, self.tau, start=start, on=number)
            lesson = lesson if term is NOTHING else lesson + term
        if lesson is NOTHING:
            return model
        return party.fit(model, lesson, *(data for *_, data in parts), passes=passes).model

    def part(self, pool: Data, start: int, stop: int, count: int) -> Data:
        """Return the first ``count`` made images of each class from ``start`` to ``stop - 1``."""
        within = torch.arange(count, device=pool["label"].device)
        rows = torch.cat([within + c * self.images for c in range(start, stop)])
        return {name: column[rows] for name, column in pool.items()}

    @property
    def images(self) -> int:
        """How many images are made of each class."""
        return max(self.cur, self.pre, self.server_cur, self.server_pre)
