"""FedWeIT: layers are shared weights under a mask, plus sparse weights of the task's own and those of other clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from fedkeep.aggregation.masked import masked_mean
from fedkeep.algorithms.incremental import cross_entropy
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Client, Cohort, Server, on_client
from fedkeep.interface.party import Party
from fedkeep.losses import Absolute, Objective, Quadratic
from fedkeep.models import Weights
from fedkeep.models.decomposed import (
    ADAPTIVE,
    ATTENTION,
    MASK,
    Decomposition,
    Sparse,
    by_unit,
    dense,
    prefixed,
    row_count,
    rows,
    sparse,
    stacked,
    under,
)
from fedkeep.models.heads import BIAS, WEIGHT
from fedkeep.models.weights import mean, same_form
from fedkeep.options import option

REST = "rest."


@dataclass(frozen=True, eq=False)
class Share:
    """What a client tells each round: B's rows of units that count, its masks, and its other tensors of the task."""

    body: Tensor
    parts: Weights


@dataclass(frozen=True, eq=False)
class Own:
    """What a client tells at a task's end: its larger adaptive weights, and by layer its masks and attention."""

    adaptive: Sparse
    parts: Weights


@dataclass
class Part:
    """What the server knows of a task: how many classes there were, and the clients' means of sigmoid(mask), of what is
    added to B, and, once the task is over, of what is not decomposed."""

    classes: int
    mask: Weights
    added: Weights
    rest: Weights = field(default_factory=dict)

    def weights(self, model: Weights) -> Weights:
        """Return the network's weights for the task, with B as in a model."""
        layers = {n: model[n] * by_unit(mask, model[n]) + self.added[n] for n, mask in self.mask.items()}
        return {**model, **self.rest, **layers}


@dataclass
class Parts:
    """What the server keeps: its parts of all tasks so far, and what clients told at the end of the last."""

    tasks: list[Part] = field(default_factory=list)
    told: list[Sparse] = field(default_factory=list)


@dataclass
class Decomposed:
    """What a client keeps: its model of the task, B as it came first in it, sum of sigmoid(mask)^2 over its tasks
    before, and what others told, in which task."""

    task: int = 0
    model: Weights = field(default_factory=dict)
    anchor: Weights = field(default_factory=dict)
    held: Weights = field(default_factory=dict)
    others: list[Sparse] = field(default_factory=list)
    heard: int = 0

    def composition(self) -> Decomposition:
        """Return how the model's parts become a network's weights."""
        return Decomposition(stacked(self.others, self.anchor))


@dataclass(frozen=True)
class FedWeIT(Algorithm[Parts, Decomposed]):
    """Federated weighted inter-client transfer: every layer but the last is B * sigmoid(mask) + A + sum_j a_j A_j.

    B is shared. A mask by unit, adaptive weights A and attention a are a client's own, for the task; A_j are the
    adaptive weights with which each client ended the task before. What is minimised: CE[new] + w_sparse |A| + w_l2 / 2
    (|A|^2 + |mask|^2, in the first task also |B|^2) + w_drift / 2 sum_s |B * sigmoid(mask_s) + A_s - theta_s|^2 over
    the client's tasks before; theta_s is what that sum was when this task began. As in the code, and unlike the paper,
    mask_s and A_s are not trained any more, so the last term is that of |(B - B_0) * sigmoid(mask_s)|^2.

    Each round a client sends B without the share ``sparsity`` of units whose masks are the smallest in size; each unit
    becomes the mean over those who sent it. At a task's end clients send the numbers of A above ``threshold`` in size
    with their places; as the next task begins all clients hear them.

    The authors tell a client the task of an image, and evaluate it with its own layers. Here one server must answer
    without being told: the rows of each task's classes are asked with the mean of the clients' layers for that task,
    B being the server's, and compete. For this, beside what the paper sends, masks, biases (with them norms) and the
    classifier's new rows are sent each round, and attention at a task's end. Within a task the server does not know A:
    it answers with A's start, and without what others told. An exported model is B, biases and all rows, without the
    parts of the tasks.

    The code trains with Adam, its rate divided by 3 where validation stalls; here it is the recipe's SGD, whose weight
    decay comes on top. SGD breaks down where lr * w_drift * sum_s sigmoid(mask_s)^2 is above 2 + 2 momentum. Who
    missed what others told goes on without.
    """

    title = "FedWeIT"
    paper = "Yoon et al., 2021: Federated continual learning with weighted inter-client transfer"

    w_sparse: float = option(1e-3, "weight of the sum of |A|", low=0.0)
    w_l2: float = option(1e-4, "weight of half the squares of A and masks, and of B in the first task", low=0.0)
    w_drift: float = option(100.0, "weight of half the squares by which weights of old tasks move", low=0.0)
    sparsity: float = option(0.3, "share of units that are not sent", low=0.0, high=0.99)
    threshold: float = option(1e-3, "size above which an adaptive weight is sent", low=0.0)
    start: float = option(1 / 3, "A begins as this share of the initial weights")

    def begin_task(self, server: Server[Parts], clients: Cohort) -> None:
        super().begin_task(server, clients)
        body = {name: server.initial[name] for name in layers(server)}
        half = {name: layer.new_full((len(layer),), 0.5) for name, layer in body.items()}
        started = {name: self.start * layer for name, layer in body.items()}
        server.state.tasks = [*server.state.tasks, Part(server.classes, half, started)]
        clients.ask(self.hear, server.state.told)

    def round(self, server: Server[Parts], cohort: Cohort) -> None:
        replies = list(cohort.ask(self.train, server.model).values())
        masks = [under(MASK, reply.parts) for reply in replies]
        body = {name: server.model[name] for name in layers(server)}
        body = masked_mean(body, [reply.body for reply in replies], masks, self.sparsity)
        rest = mean([under(REST, reply.parts) for reply in replies])
        head = {n: torch.cat((server.model[n][: server.old], rest[n])) for n in new_rows(server, server.model)}
        server.model = {**server.model, **body, **rest, **head}
        server.state.tasks[-1].mask = gates(masks)

    def end_task(self, server: Server[Parts], clients: Cohort) -> None:
        kept, part = server.state, server.state.tasks[-1]
        part.rest = rest_of(server, server.model)
        others = stacked(kept.told, part.added)
        told = [own for own in clients.ask(self.tell).values() if own is not None]
        if told:
            part.mask = gates([under(MASK, own.parts) for own in told])
            part.added = mean([added(own, others, part.added) for own in told])
        kept.told = [own.adaptive for own in told]

    def predict(self, server: Server[Parts], model: Weights, images: Tensor) -> Tensor:
        said, known = [], 0
        for part in server.state.tasks:
            logits = server.predict(part.weights(model), {"image": images})
            said.append(logits[:, known : part.classes])
            known = part.classes
        return torch.cat(said, 1)

    def own_model(self, state: Decomposed) -> Weights:
        return state.composition()(state.model) if state.model else {}

    def fault(self, server: Server[Parts], reply: Any, examples: int) -> str | None:
        if not isinstance(reply, Share | Own):
            return None
        body = {name: server.model[name] for name in layers(server)}
        masks = {MASK + name: layer.new_empty(len(layer)) for name, layer in body.items()}
        if isinstance(reply, Share):
            rest = prefixed(REST, rest_of(server, server.model) | new_rows(server, server.model))
            wrong = same_form(reply.parts, masks | rest)
            if not wrong:
                count = row_count(body, under(MASK, reply.parts), self.sparsity)
                wrong = same_form({"body": reply.body}, {"body": torch.empty(count)})
        else:
            heard = len(server.state.told) if any(map(len, under(ATTENTION, reply.parts).values())) else 0
            wrong = same_form(reply.parts, masks | {ATTENTION + name: torch.empty(heard) for name in body})
            wrong = wrong or reply.adaptive.fault(sum(layer.numel() for layer in body.values()))
        return wrong and f"other parts than its own: {wrong}"

    @on_client
    def hear(self, client: Client[Decomposed], told: list[Sparse]) -> None:
        """Keep what clients told at the end of the task before."""
        client.state.others, client.state.heard = told, client.task

    @on_client
    def train(self, client: Client[Decomposed], model: Weights) -> Share:
        """Train B, the own parts of the task, and what is not decomposed."""
        kept = client.state
        if kept.task != client.task:
            self.begin(client, model)
        parts = {name: tensor for name, tensor in kept.model.items() if name not in model}
        kept.model = client.fit({**model, **parts}, self.objective(client), composition=kept.composition()).model
        body, masks = {name: kept.model[name] for name in kept.anchor}, under(MASK, kept.model)
        rest = rest_of(client, kept.model) | new_rows(client, kept.model)
        return Share(rows(body, masks, self.sparsity), prefixed(MASK, masks) | prefixed(REST, rest))

    @on_client
    def tell(self, client: Client[Decomposed]) -> Own | None:
        """Tell the larger adaptive weights of the task; nothing without having trained in it."""
        kept = client.state
        if kept.task != client.task:
            return None
        parts = {name: tensor for name, tensor in kept.model.items() if name.startswith((MASK, ATTENTION))}
        return Own(sparse(under(ADAPTIVE, kept.model), self.threshold), parts)

    def begin(self, client: Client[Decomposed], model: Weights) -> None:
        """Begin a task with parts of its own, and hold what those of the task before need."""
        kept = client.state
        squares = {name: mask.sigmoid().square() for name, mask in under(MASK, kept.model).items()}
        held = {n: by_unit(square, model[n]) for n, square in squares.items()}
        kept.held = {n: kept.held[n] + square for n, square in held.items()} if kept.held else held
        kept.anchor, kept.task = {name: model[name] for name in layers(client)}, client.task
        if kept.heard != client.task:
            kept.others = []
        units, clients = client.rng("mask"), client.rng("attention")
        kept.model = {}
        for name, layer in kept.anchor.items():
            kept.model[MASK + name] = drawn(len(layer), units).to(layer)
            kept.model[ADAPTIVE + name] = self.start * client.initial[name]
            kept.model[ATTENTION + name] = drawn(len(kept.others), clients).to(layer)

    def objective(self, client: Client[Decomposed]) -> Objective:
        """Return what is minimised."""
        kept = client.state
        adaptive = tuple(name for name in kept.model if name.startswith(ADAPTIVE))
        small = [name for name in kept.model if name.startswith((ADAPTIVE, MASK))]
        small += [] if client.old else kept.anchor
        zero = dict.fromkeys(small, kept.model[adaptive[0]].new_zeros(()))
        loss = cross_entropy(client, "new") + Absolute(adaptive, self.w_sparse) + Quadratic(zero, self.w_l2 / 2)
        return loss + Quadratic(kept.anchor, self.w_drift / 2, kept.held) if kept.held else loss


def layers(party: Party[Any]) -> list[str]:
    """Return the names of the layers that are decomposed: all weights but biases, norms and the classifier."""
    names = [name for name in party.parameters if party.initial[name].ndim > 1 and name != WEIGHT]
    if not names:
        raise ConfigError("FedWeIT decomposes the layers before the classifier, and this network has none. Add one.")
    return names


def rest_of(party: Party[Any], model: Weights) -> dict[str, Tensor]:
    """Return a model's tensors that are neither decomposed nor the classifier's: biases, norms, buffers."""
    apart = {*layers(party), WEIGHT, BIAS}
    return {name: model[name] for name in party.initial if name not in apart}


def new_rows(party: Party[Any], model: Weights) -> dict[str, Tensor]:
    """Return the classifier's rows for the task's classes."""
    return {name: model[name][party.old :] for name in (WEIGHT, BIAS) if name in model}


def added(own: Own, others: Weights, like: Weights) -> dict[str, Tensor]:
    """Return by layer what a client adds to B: A + sum_j a_j A_j."""
    attention = under(ATTENTION, own.parts)
    heard = {name: len(attention[name]) > 0 and name in others for name in like}
    return {
        name: layer + torch.tensordot(attention[name], others[name], 1) if heard[name] else layer
        for name, layer in dense(own.adaptive, like).items()
    }


def gates(masks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of sigmoid(mask) over clients, by layer."""
    return mean([{name: mask.sigmoid() for name, mask in one.items()} for one in masks])


def drawn(count: int, generator: torch.Generator) -> Tensor:
    """Return random numbers of mean 0 and variance 1 / count, as masks and attention begin."""
    return torch.randn(count, generator=generator) / sqrt(max(count, 1))
