"""FedPASS: old classes are kept by their mean features and noise around them, and each class is learned as four."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fedkeep.aggregation import Fusion, fused
from fedkeep.algorithms.incremental import Old, once_a_task
from fedkeep.interface import Algorithm, Client, Cohort, Fit, NoState, Server, on_client
from fedkeep.losses import (
    NOTHING,
    CrossEntropy,
    FeatureDistance,
    Objective,
    PrototypeEntropy,
    Prototypes,
    Rotated,
    Scaled,
)
from fedkeep.losses.prototypes import added, pooled, prototypes
from fedkeep.losses.rotations import ROTATIONS
from fedkeep.models import Weights
from fedkeep.models.heads import WEIGHT
from fedkeep.options import option

Radius = Literal["first", "latest"]


def rotated_images(teacher: Weights, w_features: float, tau: float) -> Objective:
    """Return what PASS learns from images, to be seen in all rotations: their labels, and features as they were.

    CE(z / tau) + w_features ||f - f_teacher||; without a teacher, the labels alone.
    """
    labels = CrossEntropy(tau=tau)
    return labels + Scaled(w_features, FeatureDistance(teacher)) if teacher and w_features else labels


def old_prototypes(client: Client[Any], known: Prototypes | None, weight: float, tau: float) -> Objective:
    """Return weight * CE(head(p) / tau) on noisy prototypes p of old classes, one for each example, drawn anew each
    round; for a client that knows none, nothing.
    """
    if known is None or not weight:
        return NOTHING
    features, classes = known.drawn(len(client.data["label"]), client.rng("prototypes"))
    return Scaled(weight, PrototypeEntropy(features, ROTATIONS * classes, tau))


def own_prototypes(client: Client[Any], model: Weights) -> Prototypes | None:
    """Return the prototypes of a client's examples of the task, under a model; None if it has none."""
    labels = client.data["label"]
    return prototypes(client.features(model), labels) if len(labels) else None


@dataclass
class Remembered(Old):
    """What a client keeps: also prototypes of old classes."""

    prototypes: Prototypes | None = None


@dataclass(frozen=True)
class FedPASS(Algorithm[NoState, Remembered]):
    """Federated prototype augmentation and self-supervision: CE(z / tau) + w_prototypes CE(head(p) / tau) + w_features
    ||f(x) - f_old(x)||.

    Images are seen in four rotations, and the classifier has four rows for each class: image x of class y, turned k
    times, has the label 4 y + k. What is evaluated, and exported with the other rows, is the first row of each class.
    p is the mean feature of a random old class plus noise. f_old are the features of the last global model of the task
    before; the distance is that of the whole batch as one vector, as in PASS's code, so it grows with the batch.

    A client keeps the prototypes of its own classes, and one that has seen no old class learns without. With
    ``scope=global`` clients tell the server theirs at a task's end, with the number of examples of each, and all learn
    with the means over all. The noise has the radius of the first task (PASS's code) or of the latest (PyCIL's); it is
    drawn for each example once a round.

    PASS trains with Adam, to which the size of a loss does not matter. To SGD it does: with the temperature and the
    weights above gradients are 10 to 100 times the usual, and training at usual learning rates breaks down as soon as
    there are old classes. ``scale`` makes the whole loss smaller.
    """

    title = "FedPASS"
    paper = "Zhu et al., 2021: Prototype augmentation and self-supervision for incremental learning; federated"

    w_prototypes: float = option(10.0, "weight of the classifier's cross-entropy on prototypes", low=0.0)
    w_features: float = option(10.0, "weight of the distance of features from the old model's", low=0.0)
    tau: float = option(0.1, "softmax temperature of both cross-entropies", low=1e-3)
    scale: float = option(
        1.0, "factor on the whole loss, for SGD; 1 as in PASS's code, which trains with Adam", low=0.0
    )
    scope: Literal["client", "global"] = option("client", "whose prototypes a client learns with: its own, or all")
    radius: Radius = option("first", "task from which the size of the noise is taken")
    fusion: Fusion = option("uniform", "whether clients count by their examples, or all alike")

    @property
    def rows_per_class(self) -> int:
        return ROTATIONS

    def round(self, server: Server, cohort: Cohort) -> None:
        server.model = fused(cohort.ask(self.train, server.model), self.fusion)

    def end_task(self, server: Server, clients: Cohort) -> None:
        if self.scope == "client":
            clients.ask(self.remember, server.model)
            return
        told = clients.ask(self.tell, server.model).values()
        clients.ask(self.hear, server.model, pooled([one for one in told if one is not None]))

    def fault(self, server: Server, reply: Any, examples: int) -> str | None:
        if not isinstance(reply, Prototypes):
            return None
        return reply.fault(range(server.old, server.classes), server.model[WEIGHT].shape[1], examples)

    @on_client
    def train(self, client: Client[Remembered], model: Weights) -> Fit:
        """Train on images in all rotations, and the classifier on noisy prototypes of old classes too."""
        kept = client.state
        images = once_a_task(client, Rotated(rotated_images(kept.teacher, self.w_features, self.tau)), client.data)
        old = old_prototypes(client, kept.prototypes, self.w_prototypes, self.tau)
        return client.fit(model, Scaled(self.scale, images + old))

    @on_client
    def remember(self, client: Client[Remembered], model: Weights) -> None:
        """Keep the task's last model, and the own prototypes of its classes under it."""
        self._keep(client.state, model, own_prototypes(client, model))

    @on_client
    def tell(self, client: Client[Remembered], model: Weights) -> Prototypes | None:
        """Tell the prototypes of the task's classes, under its last model."""
        return own_prototypes(client, model)

    @on_client
    def hear(self, client: Client[Remembered], model: Weights, everybodys: Prototypes | None) -> None:
        """Keep the task's last model, and everybody's prototypes of its classes."""
        self._keep(client.state, model, everybodys)

    def _keep(self, kept: Remembered, model: Weights, new: Prototypes | None) -> None:
        kept.teacher, kept.prototypes = model, added(kept.prototypes, new, self.radius == "first")
