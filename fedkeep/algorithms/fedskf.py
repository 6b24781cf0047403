"""FedSKF: the mean is laid onto one client's neurons; clients keep a classifier of their own, and have two teachers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedkeep.algorithms.fedpass import Radius, old_prototypes, own_prototypes, rotated_images
from fedkeep.algorithms.incremental import (
    CESlice,
    Scope,
    Selection,
    Taught,
    cross_entropy,
    joined,
    old_classes,
    once_a_task,
    remembered,
    share,
)
from fedkeep.errors import ConfigError
from fedkeep.fusion import Fusion, Transport, fused
from fedkeep.fusion.plans import Cost, Solver, diagonal
from fedkeep.fusion.transport import Skip, laid_classifier
from fedkeep.interface import Algorithm, Client, Cohort, Data, Fit, Server, each, on_client
from fedkeep.models import Weights
from fedkeep.models.channels import channels
from fedkeep.models.heads import WEIGHT, continued, head_of
from fedkeep.objectives import NOTHING, TSD, Objective, Prototypes, Quadratic, Rotated, Scaled
from fedkeep.objectives.prototypes import added
from fedkeep.objectives.rotations import ROTATIONS
from fedkeep.objectives.tsd import Reduction, TSDReading
from fedkeep.options import option


@dataclass
class Turn:
    """What the server keeps.

    Attributes
    ----------
    base : whose neurons were the base last; empty before anybody's.
    moves : of each client, how projections since its last training moved the channels that its classifier reads.
    """

    base: str = ""
    moves: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass
class Personal(Taught):
    """What a client keeps besides what its old models say.

    Attributes
    ----------
    own : its model as the last training left it.
    old_own, old_global : the last models of the task before: its own, and the server's.
    memory, prototypes : examples of old classes, or their mean features, if any are kept.
    synced : the task in which its classifier last met the global one.
    """

    own: Weights = field(default_factory=dict)
    old_own: Weights = field(default_factory=dict)
    old_global: Weights = field(default_factory=dict)
    memory: Data = field(default_factory=dict)
    prototypes: Prototypes | None = None
    synced: int = 0


@dataclass(frozen=True)
class FedSKF(Algorithm[Turn, Personal]):
    """Federated class-incremental learning by fusion of structure and knowledge (eq. 10):

    CE + w_pull ||c - c_global||^2 + w_local (KD[old; own old model] + TSD) + w_global KD[old; old global model].

    *Selective synchronisation* (``sync``): a client trains the global extractor under its own classifier c, which is
    set to the global one once a task and otherwise pulled towards it. *Projection* (``pit``): the mean of the models
    is laid onto the neurons of one client's by optimal transport (`fedkeep.fusion.Transport`), each round another's.

    What the paper leaves open: which classes the labels compete with (``ce_slice``: the task's for LwF, all for
    iCaRL); whether the projected mean is mixed with the base (``pit=fused``, eta 1/2) or taken alone (``aligned``,
    which with an exact plan computes what the mean does); when classifiers meet ("once a task, after the first
    communication": ``sync_round=2``); whether they are pulled before (``first_pull``), when the global rows of new
    classes are untrained; and what TSD means (``tsd``; as printed it teaches nothing about old classes). KD is at
    temperature 2 without tau^2. What a client keeps of old tasks is its ``level``: ``lwf`` models only; ``pass`` also
    prototypes, under its own model, with PASS's losses in all four rotations (see `FedPASS`) and the terms above over
    the rows of all rotations; ``icarl`` also exemplars, herded by its own model ("20 for each class": of each client,
    or with ``scope=global`` of all together).

    Each round's record says how much of each plan's mass stayed where it was. A share of 1 throughout means that the
    projection moved nothing: fused, it is then a mean in which the base counts more. Where neurons do move, the
    classifiers of all clients but the base read them in the old order, unless ``pit_map_local_cls`` tells them.
    """

    title = "FedSKF"
    paper = "FedSKF, Electronics 2024, 13, 1772: selective knowledge fusion in federated class-incremental learning"
    takes_turns = True

    level: Literal["lwf", "pass", "icarl"] = option(
        "lwf", "what clients keep of old tasks: models, and prototypes or exemplars too"
    )
    w_pull: float = option(2.0, "pull of a client's classifier to the global one (alpha in the paper)", low=0.0)
    w_local: float = option(3.0, "weight of the client's own old model (beta in the paper)", low=0.0)
    w_global: float = option(1.0, "weight of the old global model (gamma in the paper)", low=0.0)
    tau: float = option(2.0, "softmax temperature; there is no tau squared", low=1e-3)
    tsd: TSDReading | Literal["off"] = option("recombined_sigmoid", "reading of TSD")
    tsd_reduction: Reduction = option("mean", "TSD over classes")
    ce_slice: CESlice | Literal["by_level"] = option("by_level", "labels among the task's classes, or all; new for lwf")
    sync: bool = option(True, "clients keep a classifier of their own; otherwise they take the global one every round")
    sync_round: int = option(2, "round of a task in which it is set to the global one", low=1)
    first_pull: Literal["off", "old_rows"] = option("off", "what is pulled before that round")
    old_local: Literal["pre_sync", "post_sync"] = option(
        "pre_sync", "the own old model: as the client left it, or its classifier on the last global extractor"
    )
    per_class: int = option(20, "of icarl: exemplars of each class that are kept", low=1)
    scope: Scope = option("client", "of icarl: whether each client keeps so many, or all together")
    selection: Selection = option("herding", "of icarl: how they are chosen")
    w_prototypes: float = option(10.0, "of pass: weight of the cross-entropy on prototypes", low=0.0)
    w_features: float = option(10.0, "of pass: weight of the distance of features from the own old model's", low=0.0)
    tau_labels: float = option(0.1, "of pass: softmax temperature of its cross-entropies", low=1e-3)
    scale: float = option(1.0, "of pass: factor on PASS's loss (see FedPASS)", low=0.0)
    radius: Radius = option("first", "of pass: task from which the size of the noise is taken")
    fusion: Fusion = option("uniform", "whether clients count by their examples in the mean, or all alike")
    pit: Literal["fused", "aligned", "off"] = option("fused", "result of the projection; off: the plain mean")
    pit_eta: float = option(0.5, "of fused: the base's share", low=0.0, high=1.0)
    pit_cost: Cost = option("euclidean", "distance of two neurons")
    pit_solver: Solver = option("emd", "exact plan, or an entropic one")
    pit_reg: float = option(0.01, "of sinkhorn: weight of the entropy", low=1e-6)
    pit_skip: Skip = option("tied", "plans of layers whose outputs are added, as Transport's skip")
    pit_bias_in_cost: bool = option(False, "compare biases and batch norms' scales too, not the weights alone")
    pit_counter: Literal["global", "per_task"] = option("global", "whether the base's turn goes on from task to task")
    pit_map_local_cls: bool = option(False, "clients put their classifier's columns where the projection moved neurons")

    def check(self) -> None:
        if self.level == "pass" and self.ce_slice == "new":
            raise ConfigError("FedSKF.level = pass tells all classes apart: leave FedSKF.ce_slice out.")

    @property
    def rows_per_class(self) -> int:
        return ROTATIONS if self.level == "pass" else 1

    def begin_task(self, server: Server[Turn], clients: Cohort) -> None:
        super().begin_task(server, clients)
        if self.pit_counter == "per_task":
            server.state.base = ""

    def round(self, server: Server[Turn], cohort: Cohort) -> None:
        kept = server.state
        # First of all, since not every network can be followed.
        layers = () if self.pit == "off" else channels(server.network(server.model))
        replies = cohort.ask(self.train, server.model, self.moves(kept, cohort))
        average = fused(replies, self.fusion)
        if self.pit == "off":
            server.model = average
            return
        base = next_in_turn(list(replies), kept.base)
        projection = self.transport.project(average, replies[base].model, layers)
        server.log("diagonal", list(projection.diagonal.values()))
        server.model, kept.base = projection.model, base
        if self.pit_map_local_cls and projection.last is not None and diagonal(projection.last) < 1:
            before = kept.moves | {client: [] for client in replies}
            kept.moves = {client: [*m, projection.last] for client, m in before.items()} | {base: []}
        else:
            kept.moves = {client: m for client, m in kept.moves.items() if client not in replies}

    def moves(self, kept: Turn, clients: Cohort) -> list[Tensor]:
        """Return for each client how its channels have moved since it trained."""
        return each({client.id: kept.moves.get(client.id, []) for client in clients})

    def end_task(self, server: Server[Turn], clients: Cohort) -> None:
        count = share(self.per_class, self.scope, server.population)
        clients.ask(self.remember, server.model, self.moves(server.state, clients), count)

    @on_client
    def train(self, client: Client[Personal], model: Weights, moves: list[Tensor]) -> Fit:
        """Train the global extractor under the client's own classifier, taught by both old models."""
        kept = client.state
        data = joined(client.data, kept.memory)
        lesson = once_a_task(client, self.lesson(kept), data)
        start = self.start(client, model, moves)
        fit = client.fit(start, self.labels(client) + self.pull(client, model) + lesson, data)
        kept.own = fit.model
        return fit

    @on_client
    def remember(self, client: Client[Personal], model: Weights, moves: list[Tensor], count: int) -> None:
        """Keep the task's last models, the own and the global one, and what the level has beside models."""
        kept = client.state
        kept.old_global, kept.old_own = model, kept.own or model
        if self.level == "icarl":
            kept.memory = remembered(client, kept.old_own, kept.memory, count, self.selection)
        if self.level == "pass":
            kept.prototypes = added(kept.prototypes, own_prototypes(client, kept.old_own), self.radius == "first")
        if self.old_local == "post_sync":
            kept.old_own = {**model, **laid(head_of(kept.old_own), moves)}

    def start(self, client: Client[Personal], model: Weights, moves: list[Tensor]) -> Weights:
        """Return what is trained: the global model, with the client's own classifier unless it is time to meet."""
        kept = client.state
        due = kept.synced != client.task and client.round >= self.sync_round
        if due:
            kept.synced = client.task
        if due or not self.sync or not kept.own:
            return model
        # Moved first: the rows of new classes come from the server, and read its order already.
        return {**model, **continued(laid(head_of(kept.own), moves), model)}

    def labels(self, client: Client[Personal]) -> Objective:
        """Return what is learned beside what the lesson of the task holds."""
        if self.level == "pass":
            weight = self.scale * self.w_prototypes
            return old_prototypes(client, client.state.prototypes, weight, self.tau_labels)
        return cross_entropy(client, self.slice)

    def pull(self, client: Client[Personal], model: Weights) -> Objective:
        """Return w_pull ||c - c_global||^2; in a task's first round, of the old classes' rows at most."""
        if not (self.sync and self.w_pull):
            return NOTHING
        anchor = head_of(model)
        if client.round > 1:
            return Quadratic(anchor, self.w_pull)
        if self.first_pull == "off" or not client.old:
            return NOTHING
        weight = model[WEIGHT]
        is_old = torch.arange(len(weight), device=weight.device) < self.rows_per_class * client.old
        rows = {name: is_old.view(-1, *[1] * (tensor.ndim - 1)).to(tensor) for name, tensor in anchor.items()}
        return Quadratic(anchor, self.w_pull, rows)

    def lesson(self, kept: Personal) -> Objective:
        """Return what old models teach in a task, before they are asked; with PASS, all that is learned from images."""
        if self.level == "pass":
            images = rotated_images(kept.old_own, self.w_features, self.tau_labels)
            return Rotated(Scaled(self.scale, images) + self.old_models(kept))
        return self.old_models(kept)

    def old_models(self, kept: Personal) -> Objective:
        """Return what the own and the global old model teach, the former with TSD."""
        if not kept.old_own:
            return NOTHING
        own = old_classes(kept.old_own, self.w_local, self.tau)
        if self.tsd != "off" and self.w_local:
            known = len(kept.old_own[WEIGHT])
            own = own + Scaled(self.w_local, TSD(kept.old_own, known, self.tsd, self.tsd_reduction))
        return own + old_classes(kept.old_global, self.w_global, self.tau)

    @property
    def slice(self) -> CESlice:
        """The classes with which labels compete."""
        if self.ce_slice == "by_level":
            return "new" if self.level == "lwf" else "all"
        return self.ce_slice

    @property
    def transport(self) -> Transport:
        """How the mean is laid onto the base."""
        result: Literal["fused", "aligned"] = "aligned" if self.pit == "aligned" else "fused"
        return Transport(
            self.pit_cost, self.pit_solver, self.pit_reg, self.pit_skip, self.pit_bias_in_cost, result, self.pit_eta
        )


def next_in_turn(clients: list[str], last: str) -> str:
    """Return whose turn it is among the clients of a round: the next after the last in their order, from the first on.

    Clients are numbered by name, so the order is that of the numbers.
    """
    order = sorted(clients, key=_place)
    return next((client for client in order if not last or _place(client) > _place(last)), order[0])


def laid(head: dict[str, Tensor], moves: list[Tensor]) -> dict[str, Tensor]:
    """Return a classifier that reads channels where they are now, after one move and the next."""
    for move in moves:
        head = laid_classifier(head, move)
    return head


def _place(client: str) -> tuple[int, str]:
    return len(client), client
