"""FedWeIT: layers are shared weights under a mask, plus sparse weights of the task's own and those of other clients."""

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from fedkeep.aggregation.mean import masked_mean
from fedkeep.algorithms.incremental.class_incremental import label_loss
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Client, Cohort, Server, on_client
from fedkeep.interface.party import Party
from fedkeep.losses import L1Penalty, Loss, QuadraticPenalty
from fedkeep.models import Weights
from fedkeep.models.fedweit_layers import (
    ADAPTIVE,
    ATTENTION,
    MASK,
    FedWeITParametrization,
    SparseTensors,
    active_weights,
    add_prefix,
    broadcast_units,
    remove_prefix,
    stack_dense,
    to_dense,
    to_sparse,
)
from fedkeep.models.heads import BIAS, WEIGHT
from fedkeep.models.weights import find_mismatch, joint_norm, mean
from fedkeep.options import option

REST = "rest."

INITIAL_ADAPTIVE = 1 / 3
"""The adaptive weights A at first, as a share of the initial weights."""

MAX_CHANGE = 100.0
"""How many norms of the model what a client sends may differ from the server's, or its own parts may have.

It is what ``defense.model_norm`` is by default, which is about whole models.
"""
BUFFER_FACTOR = 1000.0
"""How many times more buffers may: no learning rate bounds batch norm's variances."""


@dataclass(frozen=True, eq=False)
class WeITUpdate:
    """A client's reply in each round.

    ``body``: The rows of B of units that are sent.
    ``parts``: The client's masks, and its other tensors of the task.
    """

    body: Tensor
    parts: Weights


@dataclass(frozen=True, eq=False)
class WeITTaskReport:
    """A client's reply at a task's end.

    ``adaptive``: Its larger adaptive weights.
    ``parts``: Its masks and attention, by layer.
    """

    adaptive: SparseTensors
    parts: Weights


@dataclass
class WeITTask:
    """What the server knows of a task.

    ``num_classes``: How many classes were seen by its end.
    ``mask``: The mean of the clients' sigmoid(mask), by layer.
    ``added``: The mean of what the clients add to B, by layer.
    ``rest``: Once the task is over, the mean of what is not decomposed.
    """

    num_classes: int
    mask: Weights
    added: Weights
    rest: Weights = field(default_factory=dict)

    def weights(self, model: Weights) -> Weights:
        """Return the network's weights for the task, with B of a model."""
        layers = {n: model[n] * broadcast_units(mask, model[n]) + self.added[n] for n, mask in self.mask.items()}
        return {**model, **self.rest, **layers}


@dataclass
class WeITServerState:
    """What the server keeps.

    ``tasks``: What it knows of all tasks so far.
    ``adaptive``: The adaptive weights that clients reported at the end of the last task.
    """

    tasks: list[WeITTask] = field(default_factory=list)
    adaptive: list[SparseTensors] = field(default_factory=list)


@dataclass
class WeITClientState:
    """What a client keeps.

    ``task``: The task for which it last initialised its parts.
    ``trained_task``: The last task in which it took a training step.
    ``model``: Its model of that task, with all parts.
    ``anchor``: B as the client first received it in that task.
    ``drift_weights``: The sum of sigmoid(mask)^2 over its earlier tasks.
    ``others``: Adaptive weights of other clients.
    ``received``: The task in which these arrived.
    """

    task: int = 0
    trained_task: int = 0
    model: Weights = field(default_factory=dict)
    anchor: Weights = field(default_factory=dict)
    drift_weights: Weights = field(default_factory=dict)
    others: list[SparseTensors] = field(default_factory=list)
    received: int = 0

    def composition(self) -> FedWeITParametrization:
        """Return how the model's parts compose a network's weights."""
        return FedWeITParametrization(stack_dense(self.others, self.anchor))


@dataclass(frozen=True)
class FedWeIT(Algorithm[WeITServerState, WeITClientState]):
    """Federated weighted inter-client transfer: every layer but the last is B * sigmoid(mask) + A + sum_j a_j A_j.

    B is shared. A mask by unit, adaptive weights A and attention a are a client's own, for the task; A_j are the
    adaptive weights with which each client ended the task before. The loss is CE[new] + w_sparse |A| + w_l2 / 2
    (|A|^2 + |mask|^2, in the first task also |B|^2) + w_drift / 2 sum_s |B * sigmoid(mask_s) + A_s - theta_s|^2 over
    the client's earlier tasks s; theta_s is the value of that sum when this task began. As in the code, and unlike the
    paper, mask_s and A_s are not trained any more, so the last term is |(B - B_0) * sigmoid(mask_s)|^2. In
    the code B_0 is the client's own B of the task before; here it is what the client first receives.

    Each round a client sends B without the share ``sparsity`` of units whose masks are the smallest in size; each unit
    becomes the mean over those who sent it. At a task's end clients send the numbers of A above ``threshold`` in size
    with their positions; all clients receive them when the next task begins.

    The authors evaluate a client with its own layers, and give it the task of each image. Here one server must predict
    without knowing the task: the classifier's rows of each task are evaluated with the mean of the clients' layers for
    that task, B being the server's, and their logits compete. For this, besides what the paper sends, masks, biases
    (with them norms) and the classifier's new rows are sent each round, and attention at a task's end. Within a task
    the server does not know A: it predicts with A's initial value, and without other clients' adaptive weights. An
    exported model is B, biases and all rows, without the parts of the tasks.

    The code trains with Adam, whose rate it divides by 3 when validation stalls; here it is the recipe's SGD, whose
    weight decay is added. SGD diverges if lr * w_drift * sum_s sigmoid(mask_s)^2 is above 2 + 2 momentum. A client that
    missed the others' adaptive weights trains without them.
    """

    title = "FedWeIT"
    paper = "Yoon et al., 2021: Federated continual learning with weighted inter-client transfer"
    clients_read_initial_model = True

    w_sparse: float = option(1e-3, "weight of the sum of |A|", low=0.0)
    w_l2: float = option(1e-4, "weight of half the squares of A and masks, and of B in the first task", low=0.0)
    w_drift: float = option(100.0, "weight of half the squared change of old tasks' weights", low=0.0)
    sparsity: float = option(0.3, "share of units that are not sent", low=0.0, high=0.99)
    threshold: float = option(1e-3, "size above which an adaptive weight is sent", low=0.0)

    def begin_task(self, server: Server[WeITServerState], clients: Cohort) -> None:
        super().begin_task(server, clients)
        body = {name: server.initial_model[name] for name in layers(server)}
        mask = {name: layer.new_full((len(layer),), 0.5) for name, layer in body.items()}
        added = {name: INITIAL_ADAPTIVE * layer for name, layer in body.items()}
        server.state.tasks = [*server.state.tasks, WeITTask(server.num_classes, mask, added)]
        clients.ask(self.receive, server.state.adaptive)

    def round(self, server: Server[WeITServerState], cohort: Cohort) -> None:
        replies = [reply for reply in cohort.ask(self.train, server.model).values() if reply is not None]
        if not replies:
            return
        masks = [remove_prefix(MASK, reply.parts) for reply in replies]
        body = {name: server.model[name] for name in layers(server)}
        body = masked_mean(body, [reply.body for reply in replies], masks, self.sparsity)
        rest = mean([remove_prefix(REST, reply.parts) for reply in replies])
        head = {
            n: torch.cat((server.model[n][: server.num_old_classes], rest[n])) for n in new_rows(server, server.model)
        }
        server.model = {**server.model, **body, **rest, **head}
        server.state.tasks[-1].mask = mean_gates(masks)

    def end_task(self, server: Server[WeITServerState], clients: Cohort) -> None:
        state, task = server.state, server.state.tasks[-1]
        task.rest = undecomposed(server, server.model)
        others = stack_dense(state.adaptive, task.added)
        reports = [report for report in clients.ask(self.report).values() if report is not None]
        if reports:
            task.mask = mean_gates([remove_prefix(MASK, report.parts) for report in reports])
            task.added = mean([added_to_base(report, others, task.added) for report in reports])
        state.adaptive = [report.adaptive for report in reports]

    def predict(self, server: Server[WeITServerState], model: Weights, images: Tensor) -> Tensor:
        columns, num_known = [], 0
        for task in server.state.tasks:
            logits = server.predict(task.weights(model), {"input": images})
            columns.append(logits[:, num_known : task.num_classes])
            num_known = task.num_classes
        return torch.cat(columns, 1)

    def own_model(self, state: WeITClientState) -> Weights:
        return state.composition()(state.model) if state.model else {}

    def validate_reply(self, server: Server[WeITServerState], reply: Any, examples: int) -> str | None:
        if not isinstance(reply, WeITUpdate | WeITTaskReport):
            return None
        body = {name: server.model[name] for name in layers(server)}
        masks = {MASK + name: layer.new_empty(len(layer)) for name, layer in body.items()}
        if isinstance(reply, WeITUpdate):
            rest = add_prefix(REST, undecomposed(server, server.model) | new_rows(server, server.model))
            wrong = find_mismatch(reply.parts, masks | rest)
            if not wrong:
                count = len(active_weights(body, remove_prefix(MASK, reply.parts), self.sparsity))
                wrong = find_mismatch({"body": reply.body}, {"body": torch.empty(count)})
        else:
            attends = any(map(len, remove_prefix(ATTENTION, reply.parts).values()))
            num_others = len(server.state.adaptive) if attends else 0
            wrong = find_mismatch(reply.parts, masks | {ATTENTION + name: torch.empty(num_others) for name in body})
            wrong = wrong or reply.adaptive.fault(sum(layer.numel() for layer in body.values()))
        return f"other parts than its own: {wrong}" if wrong else self.find_too_large(server, reply, body)

    def find_too_large(
        self, server: Server[WeITServerState], reply: WeITUpdate | WeITTaskReport, body: Weights
    ) -> str | None:
        """Tell whether a client's numbers are too large for the model that it was sent; None if they are not.

        ``reply``: The reply, whose parts are of the right form.
        """
        limit = MAX_CHANGE * max(1.0, joint_norm([server.model[name] for name in server.parameter_names]))
        if isinstance(reply, WeITTaskReport):
            norms = {"adaptive weights": joint_norm([reply.adaptive.values])}
            norms["attention"] = joint_norm(list(remove_prefix(ATTENTION, reply.parts).values()))
        else:
            sent = undecomposed(server, server.model) | new_rows(server, server.model)
            rest = remove_prefix(REST, reply.parts)
            moved = {name: part - sent[name] for name, part in rest.items() if part.is_floating_point()}
            trained = [moved[name] for name in moved if name in server.parameter_names]
            buffers = [moved[name] / BUFFER_FACTOR for name in moved if name not in server.parameter_names]
            trained.append(reply.body - active_weights(body, remove_prefix(MASK, reply.parts), self.sparsity))
            norms = {"an update": joint_norm(trained), "buffers": joint_norm(buffers)}
        what = next((what for what, norm in norms.items() if not norm <= limit), None)
        return what and f"{what} of norm {norms[what]:.3g}, where at most {limit:.3g} fits the model"

    @on_client
    def receive(self, client: Client[WeITClientState], adaptive: list[SparseTensors]) -> None:
        """Keep the adaptive weights that clients reported at the end of the task before."""
        client.state.others, client.state.received = adaptive, client.task

    @on_client
    def train(self, client: Client[WeITClientState], model: Weights) -> WeITUpdate | None:
        """Train B, the client's own parts of the task, and what is not decomposed; None if it cannot take a step."""
        state = client.state
        if state.task != client.task:
            self.begin_client_task(client, model)
        parts = {name: tensor for name, tensor in state.model.items() if name not in model}
        fit = client.fit({**model, **parts}, self.loss(client), parametrization=state.composition())
        state.model = fit.model
        if not fit.num_steps:
            return None
        state.trained_task = client.task
        body, masks = {name: state.model[name] for name in state.anchor}, remove_prefix(MASK, state.model)
        rest = undecomposed(client, state.model) | new_rows(client, state.model)
        return WeITUpdate(active_weights(body, masks, self.sparsity), add_prefix(MASK, masks) | add_prefix(REST, rest))

    @on_client
    def report(self, client: Client[WeITClientState]) -> WeITTaskReport | None:
        """Report the larger adaptive weights of the task; None if the client has not trained in it."""
        state = client.state
        if state.trained_task != client.task:
            return None
        parts = {name: tensor for name, tensor in state.model.items() if name.startswith((MASK, ATTENTION))}
        return WeITTaskReport(to_sparse(remove_prefix(ADAPTIVE, state.model), self.threshold), parts)

    def begin_client_task(self, client: Client[WeITClientState], model: Weights) -> None:
        """Initialise the client's own parts of a task, and add the mask of the last one to the drift penalty."""
        state = client.state
        masks = remove_prefix(MASK, state.model) if state.trained_task == state.task else {}
        squares = {name: mask.sigmoid().square() for name, mask in masks.items()}
        new = {n: broadcast_units(square, model[n]) for n, square in squares.items()}
        before = state.drift_weights
        if new:
            state.drift_weights = {n: before[n] + square for n, square in new.items()} if before else new
        state.anchor, state.task = {name: model[name] for name in layers(client)}, client.task
        if state.received != client.task:
            state.others = []
        mask_rng, attention_rng = client.rng("mask"), client.rng("attention")
        state.model = {}
        for name, layer in state.anchor.items():
            state.model[MASK + name] = random_vector(len(layer), mask_rng).to(layer)
            state.model[ADAPTIVE + name] = INITIAL_ADAPTIVE * client.initial_model[name]
            state.model[ATTENTION + name] = random_vector(len(state.others), attention_rng).to(layer)

    def loss(self, client: Client[WeITClientState]) -> Loss:
        """Return the loss of a client's training."""
        state = client.state
        adaptive = tuple(name for name in state.model if name.startswith(ADAPTIVE))
        decayed = [name for name in state.model if name.startswith((ADAPTIVE, MASK))]
        decayed += [] if client.num_old_classes else state.anchor
        zero = dict.fromkeys(decayed, state.model[adaptive[0]].new_zeros(()))
        loss = label_loss(client, "new") + L1Penalty(adaptive, self.w_sparse) + QuadraticPenalty(zero, self.w_l2 / 2)
        return (
            loss + QuadraticPenalty(state.anchor, self.w_drift / 2, state.drift_weights)
            if state.drift_weights
            else loss
        )


def layers(party: Party[Any]) -> list[str]:
    """Return the names of the layers that are decomposed: all weights but biases, norms and the classifier."""
    names = [name for name in party.parameter_names if party.initial_model[name].ndim > 1 and name != WEIGHT]
    if not names:
        raise ConfigError("FedWeIT decomposes the layers before the classifier, and this network has none. Add one.")
    return names


def undecomposed(party: Party[Any], model: Weights) -> dict[str, Tensor]:
    """Return a model's tensors that are neither decomposed nor the classifier's: biases, norms, buffers."""
    excluded = {*layers(party), WEIGHT, BIAS}
    return {name: model[name] for name in party.initial_model if name not in excluded}


def new_rows(party: Party[Any], model: Weights) -> dict[str, Tensor]:
    """Return the classifier's rows for the task's classes."""
    return {name: model[name][party.num_old_classes :] for name in (WEIGHT, BIAS) if name in model}


def added_to_base(report: WeITTaskReport, others: Weights, like: Weights) -> dict[str, Tensor]:
    """Return by layer what a client adds to B: A + sum_j a_j A_j."""
    attention = remove_prefix(ATTENTION, report.parts)
    attends = {name: len(attention[name]) > 0 and name in others for name in like}
    return {
        name: layer + torch.tensordot(attention[name], others[name], 1) if attends[name] else layer
        for name, layer in to_dense(report.adaptive, like).items()
    }


def mean_gates(masks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of sigmoid(mask) over clients, by layer."""
    return mean([{name: mask.sigmoid() for name, mask in one.items()} for one in masks])


def random_vector(count: int, rng: torch.Generator) -> Tensor:
    """Return random numbers of mean 0 and variance 1 / count, the initial masks and attention."""
    return torch.randn(count, generator=rng) / sqrt(max(count, 1))
