"""Replay of generated images, as several methods have it.

DDDR and FedDCL: images made of prototypes that clients find (FedDCL, eqs. 4 and 5), which each client receives once.
TARGET and LANDER: images of old classes, which the server generates from its last model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from fedkeep.algorithms.incremental.class_incremental import concat, mark_generated
from fedkeep.errors import RunError
from fedkeep.generation.inversion import InversionConfig, InversionProblem
from fedkeep.generation.prototypes import (
    AverageRule,
    PrototypeSearch,
    average_prototypes,
    cached_images,
    cached_search,
    check_held,
)
from fedkeep.interface import Client, Cohort, Data, Server, each, on_client
from fedkeep.interface.privacy import EXACT_COUNTS
from fedkeep.losses import ZERO_LOSS, Loss
from fedkeep.models.heads import truncate
from fedkeep.options import Options, option

MAX_ABS = 1e4
"""Prototypes with larger numbers are refused: one client's must not dominate the mean. They stay near 1."""


@dataclass(frozen=True, eq=False)
class PrototypeReply:
    """What a client found.

    ``prototypes``: Of the task's classes, [new classes, ...].
    ``counts``: The client's examples of each of these classes, int64.
    ``generator``: The hash of the generator that they are for.
    """

    prototypes: Tensor
    counts: Annotated[Tensor, EXACT_COUNTS]
    generator: str


@dataclass(frozen=True)
class PrototypeOptions(Options):
    """Options of the prototype search, and the client step that searches."""

    prototype_rounds: int = option(5, "rounds of prototype search at a task's beginning", low=0)
    prototype_steps: int = option(50, "optimizer steps of a client in each", low=1)
    prototype_batch_size: int = option(128, "images a step", low=1)
    prototype_aggregation: AverageRule = option(
        "uniform", "who counts in the mean: all, those with examples of the class, or by how many"
    )

    @on_client
    def search(self, client: Client[Any], prototypes: Tensor) -> PrototypeReply:
        """Search for the prototypes of the task's classes with the client's own examples (eq. 4)."""
        settings = PrototypeSearch(self.prototype_steps, self.prototype_batch_size)
        labels, rng = client.data["label"] - client.num_old_classes, client.rng("prototypes")
        images = client.data["input"]
        own = cached_search(client.generator, prototypes, images, labels, settings, rng)
        counts = torch.bincount(labels.cpu(), minlength=len(prototypes)).to(prototypes.device)
        found = client.noised_change(prototypes, own)
        return PrototypeReply(found, counts, client.generator.loaded_hash)


def find_prototypes(method: PrototypeOptions, server: Server[Any], clients: Cohort) -> Tensor:
    """Return the prototypes of the task's classes, [new classes, ...], which the clients find together (eqs. 4, 5).

    ``method``: The method, whose step `search` is asked ``prototype_rounds`` times.
    """
    prototypes = server.generator.initial_prototypes(server.num_classes - server.num_old_classes)
    for _ in range(method.prototype_rounds):
        replies = list(clients.ask(method.search, prototypes).values())
        if not replies:
            raise RunError("no client found a prototype, so nothing can be drawn. The record says why each was lost.")
        if len(replies) == len(clients):  # a class whose holders are absent keeps the prototype that it had
            check_held(
                torch.stack([reply.counts for reply in replies]).sum(0), server.label_names[server.num_old_classes :]
            )
        found, counts = [reply.prototypes for reply in replies], [reply.counts for reply in replies]
        prototypes = average_prototypes(prototypes, found, counts, method.prototype_aggregation)
    return prototypes


def generate_images(server: Server[Any], prototypes: Sequence[Tensor], count: int) -> Data:
    """Return generated images of the last tasks' classes; another call gives other images.

    ``prototypes``: Those of each of these tasks, up to the present one.
    """
    seed, generator, parts = server.rng("images").initial_seed(), server.generator, []
    first_class = server.num_classes - sum(map(len, prototypes))
    for rows in prototypes:
        labels = range(first_class, first_class + len(rows))
        parts.append(cached_images(generator, rows, labels, count, generator.sampler, seed=seed))
        first_class = labels.stop
    return {name: torch.cat([part[name] for part in parts]).to(prototypes[0].device) for name in parts[0]}


def validate_prototypes(server: Server[Any], reply: PrototypeReply, examples: int) -> str | None:
    """Return what is wrong with a client's prototypes, or None.

    ``examples``: How many examples the client has in this task.
    """
    num_new = server.num_classes - server.num_old_classes
    expected = (num_new, *server.generator.initial_prototypes(1).shape[1:])
    shape = tuple(reply.prototypes.shape)
    if shape != expected or reply.prototypes.dtype != torch.float32:
        return f"prototypes of shape {list(shape)} in {reply.prototypes.dtype}, not {list(expected)} in float32"
    if reply.prototypes.abs().max() > MAX_ABS:
        return f"prototypes with numbers beyond {MAX_ABS:g}, which would swallow all others' in the mean"
    counts = reply.counts.tolist()
    valid = reply.counts.shape == (num_new,) and reply.counts.dtype == torch.int64
    if not valid or min(counts) < 0 or sum(counts) != examples:
        return f"counts of its examples that cannot be: {counts}, and it has {examples}"
    if reply.generator != server.generator.loaded_hash:
        return "prototypes for another generator than the server's; give all parties the same folder"
    return None


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


def send_images(
    server: Server[Any], cohort: Cohort, receive: Callable[..., None], message: type[Any], *more: Any
) -> None:
    """Send each client the images of the pool that it lacks.

    ``receive``: The client step that keeps them.
    ``message``: What it is given, made of these images and what else is sent.
    """
    state, messages = server.state, dict[str, Any]()
    for client in cohort:
        if (count := state.num_received.get(client.id, 0)) < server.num_classes:
            lacking = {name: column[state.pool["label"] >= count] for name, column in state.pool.items()}
            messages[client.id] = message(lacking, *more)
    received = cohort.ask(receive, each(messages)) if messages else ()
    state.num_received = state.num_received | dict.fromkeys(received, server.num_classes)


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


@dataclass
class GeneratedReplay:
    """What a client trains on besides its own examples, in one task.

    ``images``: Generated images of all old classes.
    ``loss``: The loss on them, as data set 1. Old models were evaluated on them already, unless images are augmented at
        random.
    ``batch_size``: Generated images a step.
    """

    images: Data = field(default_factory=dict)
    loss: Loss = ZERO_LOSS
    batch_size: int = 0


@dataclass
class InversionServerState:
    """What the server keeps.

    ``replay``: What it generated for the task.
    ``receivers``: The clients that have received it.
    ``examples_per_client``: The average number of a client's examples in the last round; TARGET alone needs it.
    """

    replay: GeneratedReplay = field(default_factory=GeneratedReplay)
    receivers: list[str] = field(default_factory=list)
    examples_per_client: float = 0.0


def inversion_problem(server: Server[Any]) -> InversionProblem:
    """Return what is inverted: the last model, with a student that has the run's initial weights."""
    student = truncate(server.initial_model, server.num_old_classes)
    return InversionProblem(
        server.network(server.model),
        server.network(student),
        server.num_old_classes,
        server.image_format,
        server.rng("synthesis"),
    )


def inversion_config(method: Options, **fixed: Any) -> InversionConfig:
    """Return how a method inverts: its options of the config's names, and what it fixes."""
    named = {f.name: getattr(method, f.name) for f in fields(InversionConfig) if hasattr(method, f.name)}
    return InversionConfig(**named, **fixed)
