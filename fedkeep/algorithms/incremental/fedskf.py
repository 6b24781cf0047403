"""FedSKF: the mean is aligned with one client's neurons; clients keep their own classifiers and have two teachers."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from fedkeep.aggregation import Aggregation, aggregate, project
from fedkeep.aggregation.transport import channel_groups
from fedkeep.algorithms.incremental.class_incremental import (
    CachedTaskLoss,
    cache_once_per_task,
    concat,
    distill_old_classes,
    label_loss,
    update_memory,
)
from fedkeep.algorithms.incremental.fedpass import compute_prototypes, loss_scale, prototype_loss, rotation_loss
from fedkeep.interface import Algorithm, Client, Cohort, Data, Fit, Server, Training, on_client
from fedkeep.losses import TSD, ZERO_LOSS, Loss, Prototypes, QuadraticPenalty, Rotated, Scaled
from fedkeep.losses.classification import TSDReading
from fedkeep.losses.prototypes import extend_prototypes
from fedkeep.losses.wrappers import ROTATIONS
from fedkeep.models import Weights
from fedkeep.models.heads import WEIGHT, classifier_tensors, expand_like
from fedkeep.options import option

SYNC_ROUND = 2  # the round of a task in which classifiers are set to the global one
W_PROTOTYPES, W_FEATURES, TAU_LABELS = 10.0, 10.0, 0.1  # of PASS, see `FedPASS`


@dataclass
class FedSKFServerState:
    """What the server keeps.

    ``base``: The client whose neurons were the base last; empty before the first.
    ``done``: With ``pit_turn="random"``: the clients that were the base in this cycle, which ends when all were.
    """

    base: str = ""
    done: list[str] = field(default_factory=list)


@dataclass
class FedSKFClientState(CachedTaskLoss):
    """What a client keeps besides its teachers' outputs.

    ``own_model``: Its model as the last training left it.
    ``old_own_model``: Its own model at the end of the task before.
    ``old_global_model``: The global model at the end of the task before.
    ``memory``: Exemplars of old classes, if any are kept.
    ``prototypes``: Mean features of old classes, if any are kept.
    ``synced_task``: The task in which its classifier was last set to the global one.
    """

    own_model: Weights = field(default_factory=dict)
    old_own_model: Weights = field(default_factory=dict)
    old_global_model: Weights = field(default_factory=dict)
    memory: Data = field(default_factory=dict)
    prototypes: Prototypes | None = None
    synced_task: int = 0


@dataclass(frozen=True)
class FedSKF(Algorithm[FedSKFServerState, FedSKFClientState]):
    """Federated class-incremental learning by selective knowledge fusion.

    The loss of a client is (eq. 10)

    CE + w_pull ||c - c_global||^2 + w_local (KD[old; own old model] + TSD) + w_global KD[old; old global model].

    *Selective synchronisation* (SKS, ``sync``): a client trains the global extractor under its own classifier c. The
    classifier is set to the global one in the second round of each task ("once a task, after the first communication")
    and pulled towards it afterwards; before, the global rows of new classes are untrained.

    *Projection* (PIT, ``pit``): the mean of the models is aligned with the neurons of one client's model by optimal
    transport (`fedkeep.aggregation.project`), each round another client's. With ``pit_turn=cyclic`` accuracy
    has the period of a turn, and if the number of rounds is a multiple of the number of clients K, every task ends with
    the same client. With ``random`` each client has one turn in every K rounds, in random order. The aligned mean is
    averaged with the base (``fused``), or taken alone (``aligned``, which with an exact plan computes what the mean
    does).

    *Global fusion* (GF): the old global model is the second teacher; ``w_global=0`` is without.

    What the paper leaves open: labels compete with the task's classes for LwF, and with all for iCaRL. As printed, TSD
    teaches nothing about old classes; ``tsd=glfc``, the form of its source, does, and gains with two exemplars
    (docs/findings.md). KD is at temperature 2 without tau squared. What a client keeps of old tasks is its ``level``:
    ``lwf`` models only; ``pass`` also prototypes, under its own model, with PASS's losses in all four rotations (see
    `FedPASS`) and the terms above over the rows of all rotations; ``icarl`` also exemplars, herded by its own model
    ("20 for each class" of each client).

    Each round's record has the share of each plan's mass on its diagonal. A share of 1 throughout means that no neuron
    moved: ``fused`` is then a mean in which the base counts more.
    """

    title = "FedSKF"
    paper = "FedSKF, Electronics 2024, 13, 1772: selective knowledge fusion in federated class-incremental learning"
    has_rotating_role = True

    level: Literal["lwf", "pass", "icarl"] = option("lwf", "what clients keep of tasks: models, prototypes, exemplars")
    w_pull: float = option(
        2.0, "pull of a client's classifier to the global one (alpha in the paper)", low=0.0, only=("sync", True)
    )
    w_local: float = option(3.0, "weight of the client's own old model (beta in the paper)", low=0.0)
    w_global: float = option(1.0, "weight of the old global model (gamma in the paper)", low=0.0)
    tau: float = option(2.0, "softmax temperature; there is no tau squared", low=1e-3)
    tsd: TSDReading | Literal["off"] = option("glfc", "reading of TSD")
    sync: bool = option(True, "clients keep a classifier of their own; otherwise they take the global one every round")
    pit: Literal["fused", "aligned", "off"] = option("aligned", "result of the projection; off: the plain mean")
    pit_turn: Literal["cyclic", "random"] = option(
        "cyclic", "whose neurons are the base: in order, or at random", only=("pit", "fused", "aligned")
    )
    exemplars_per_class: int = option(
        20, "of icarl: exemplars of each class that a client keeps", low=1, only=("level", "icarl")
    )
    scale: float | None = option(None, "of pass: factor on PASS's loss (see FedPASS)", low=0.0, only=("level", "pass"))
    aggregation: Aggregation = option("uniform", "whether clients count by their examples in the mean, or all alike")

    @property
    def rows_per_class(self) -> int:
        return ROTATIONS if self.level == "pass" else 1

    @property
    def keeps_examples(self) -> bool:
        return self.level == "icarl"

    @property
    def reason_against_dp_sgd(self) -> str:
        kept = {"pass": "mean features of old classes", "icarl": "examples that they choose by their features"}.get(
            self.level
        )
        why = f"with FedSKF.level={self.level} clients keep {kept}, which epsilon does not cover. Set FedSKF.level=lwf."
        return why if kept else ""

    @property
    def only_averages(self) -> bool:
        return self.pit == "off"  # otherwise it aligns with the model of one client

    def round(self, server: Server[FedSKFServerState], cohort: Cohort) -> None:
        # The network's layers come first, since not every network can be aligned.
        layers = () if self.pit == "off" else channel_groups(server.network(server.model))
        replies = cohort.ask(self.train, server.model)
        mean = aggregate(replies, self.aggregation)
        if self.pit == "off":
            server.model = mean
            return
        trained = [client for client, reply in replies.items() if reply.num_steps]
        base = self.next_base(server, trained or list(replies))
        projection = project(mean, replies[base].model, layers, eta=0.5 if self.pit == "fused" else 0.0)
        server.log("diagonal", list(projection.diagonal.values()))
        server.model, server.state.base = projection.model, base

    def end_task(self, server: Server[FedSKFServerState], clients: Cohort) -> None:
        clients.ask(self.remember, server.model, self.exemplars_per_class)

    def next_base(self, server: Server[FedSKFServerState], clients: list[str]) -> str:
        """Return the client with whose neurons the mean is aligned, of those that trained in a round."""
        state = server.state
        if self.pit_turn == "cyclic":
            return next_in_turn(clients, state.base)
        base = random_turn(clients, state.done, server.rng("base"))
        state.done = [*(state.done if set(clients) - set(state.done) else []), base]
        return base

    @on_client
    def train(self, client: Client[FedSKFClientState], model: Weights) -> Fit:
        """Train the global extractor under the client's own classifier, with both old models as teachers (eq. 10)."""
        state = client.state
        data = concat(client.data, state.memory)
        distillation = cache_once_per_task(client, self.distillation(state, client.training), data)
        start = self.initial_weights(client, model)
        if self.level == "pass":
            weight = loss_scale(self.scale, client.training) * W_PROTOTYPES
            labels = prototype_loss(client, state.prototypes, weight, TAU_LABELS)
        else:
            labels = label_loss(client, "new" if self.level == "lwf" else "all")
        fit = client.fit(start, labels + self.classifier_pull(client, model) + distillation, data)
        state.own_model = fit.model
        return fit

    @on_client
    def remember(self, client: Client[FedSKFClientState], model: Weights, count: int) -> None:
        """Keep the task's last models, the client's own and the global one, and what the level keeps besides."""
        state = client.state
        state.old_global_model, state.old_own_model = model, state.own_model or model
        if self.level == "icarl":
            state.memory = update_memory(client, state.old_own_model, state.memory, count)
        if self.level == "pass":
            state.prototypes = extend_prototypes(state.prototypes, compute_prototypes(client, state.old_own_model))

    def initial_weights(self, client: Client[FedSKFClientState], model: Weights) -> Weights:
        """Return where training starts: the global model, with the client's own classifier except when synchronised."""
        state = client.state
        due = state.synced_task != client.task and client.round >= SYNC_ROUND
        if due:
            state.synced_task = client.task
        if due or not self.sync or not state.own_model:
            return model
        return {**model, **expand_like(classifier_tensors(state.own_model), model)}

    def classifier_pull(self, client: Client[FedSKFClientState], model: Weights) -> Loss:
        """Return w_pull ||c - c_global||^2; nothing in a task's first round."""
        if not (self.sync and self.w_pull) or client.round == 1:
            return ZERO_LOSS
        return QuadraticPenalty(classifier_tensors(model), self.w_pull)

    def distillation(self, state: FedSKFClientState, training: Training) -> Loss:
        """Return what is cached in a task: the old models' terms, and for PASS the losses on rotated images too."""
        if self.level == "pass":
            images = rotation_loss(state.old_own_model, W_FEATURES, TAU_LABELS)
            return Rotated(Scaled(loss_scale(self.scale, training), images) + self.old_models(state))
        return self.old_models(state)

    def old_models(self, state: FedSKFClientState) -> Loss:
        """Return w_local (KD[old; own old model] + TSD) + w_global KD[old; old global model]."""
        if not state.old_own_model:
            return ZERO_LOSS
        loss = distill_old_classes(state.old_own_model, self.w_local, self.tau)
        if self.tsd != "off" and self.w_local:
            num_known = len(state.old_own_model[WEIGHT])
            loss = loss + Scaled(self.w_local, TSD(state.old_own_model, num_known, self.tsd))
        return loss + distill_old_classes(state.old_global_model, self.w_global, self.tau)


def next_in_turn(clients: list[str], last: str) -> str:
    """Return the next client after the last in the order of their numbers, among the clients of a round."""
    order = sorted(clients, key=_number)
    return next((client for client in order if not last or _number(client) > _number(last)), order[0])


def random_turn(clients: list[str], done: list[str], rng: torch.Generator) -> str:
    """Return a random client of a round that had no turn yet, or any if all had."""
    waiting = sorted(set(clients) - set(done) or clients, key=_number)
    return waiting[int(torch.randint(len(waiting), (), generator=rng))]


def _number(client: str) -> tuple[int, str]:
    """Return a sort key: clients are named by numbers."""
    return len(client), client
