"""FedPASS: noise around mean features stands for old classes, and each class is learned as four rotations."""

from dataclasses import dataclass
from typing import Any

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.algorithms.incremental.class_incremental import OldModelState, cache_once_per_task
from fedkeep.interface import Algorithm, Client, Cohort, Fit, NoState, Server, Training, on_client
from fedkeep.losses import (
    ZERO_LOSS,
    CrossEntropy,
    FeatureDistance,
    Loss,
    PrototypeCrossEntropy,
    Prototypes,
    Rotated,
    Scaled,
)
from fedkeep.losses.prototypes import extend_prototypes, prototypes
from fedkeep.losses.wrappers import ROTATIONS
from fedkeep.models import Weights
from fedkeep.options import option

SGD_SCALE = 0.02
"""Factor on the loss with which SGD does not diverge at usual learning rates."""


def loss_scale(chosen: float | None, training: Training) -> float:
    """Return the factor on PASS's loss."""
    if chosen is not None:
        return chosen
    return SGD_SCALE if training.optimizer == "sgd" and training.max_grad_norm is None else 1.0


def rotation_loss(teacher: Weights, w_features: float, tau: float) -> Loss:
    """Return PASS's loss on images, to be applied in all rotations: CE(z / tau) + w_features ||f - f_teacher||.

    ``teacher``: The old model; if empty, only the cross-entropy is left.
    """
    labels = CrossEntropy(tau=tau)
    return labels + Scaled(w_features, FeatureDistance(teacher)) if teacher and w_features else labels


def prototype_loss(client: Client[Any], known: Prototypes | None, weight: float, tau: float) -> Loss:
    """Return weight * CE(head(p) / tau) on noisy prototypes p of old classes.

    One prototype is drawn for each example, anew in each round. Without known prototypes the loss is nothing.
    """
    if known is None or not weight:
        return ZERO_LOSS
    features, classes = known.sample(len(client.data["label"]), client.rng("prototypes"))
    return Scaled(weight, PrototypeCrossEntropy(features, ROTATIONS * classes, tau))


def compute_prototypes(client: Client[Any], model: Weights) -> Prototypes | None:
    """Return the prototypes of a client's examples of the task, under a model; None if it has no example."""
    labels = client.data["label"]
    return prototypes(client.features(model), labels) if len(labels) else None


@dataclass
class PrototypeState(OldModelState):
    """Client state: also prototypes.

    ``prototypes``: Of old classes.
    """

    prototypes: Prototypes | None = None


@dataclass(frozen=True)
class FedPASS(Algorithm[NoState, PrototypeState]):
    """Federated prototype augmentation and self-supervision.

    The loss is CE(z / tau) + w_prototypes CE(head(p) / tau) + w_features ||f(x) - f_old(x)||. Images are seen in four
    rotations, and the classifier has four rows for each class: image x of class y, turned k times, has the label
    4 y + k. The first row of each class is evaluated; exported models have all rows. p is the mean feature of a random
    old class plus noise. f_old are the features of the last global model of the task before; the distance is that of
    the whole batch as one vector, as in PASS's code, so it grows with the batch.

    A client keeps the prototypes of its own classes, and one that has seen no old class learns without. The noise has
    the radius of the first task, as in PASS's code; it is drawn for each example once a round.

    PASS trains with Adam, to which the size of a loss does not matter. To SGD it does: with the temperature and the
    weights above gradients are 10 to 100 times the usual, and training at usual learning rates diverges as soon as
    there are old classes. ``scale`` makes the whole loss smaller, by default where SGD trains without clipping.
    """

    title = "FedPASS"
    paper = "Zhu et al., 2021: Prototype augmentation and self-supervision for incremental learning; federated"
    rows_per_class = ROTATIONS
    reason_against_dp_sgd = (
        "FedPASS's clients learn from mean features of examples, which epsilon would not cover. Take FedLwF."
    )

    w_prototypes: float = option(10.0, "weight of the classifier's cross-entropy on prototypes", low=0.0)
    w_features: float = option(10.0, "weight of the distance of features from the old model's", low=0.0)
    tau: float = option(0.1, "softmax temperature of both cross-entropies", low=1e-3)
    scale: float | None = option(
        None, "factor on the whole loss; none: 1 with Adam or clipped gradients, 0.02 with plain SGD", low=0.0
    )
    aggregation: Aggregation = option("uniform", "whether clients count by their examples, or all alike")

    def round(self, server: Server, cohort: Cohort) -> None:
        server.model = aggregate(cohort.ask(self.train, server.model), self.aggregation)

    def end_task(self, server: Server, clients: Cohort) -> None:
        clients.ask(self.remember, server.model)

    @on_client
    def train(self, client: Client[PrototypeState], model: Weights) -> Fit:
        """Train on images in all rotations, and the classifier on noisy prototypes of old classes too."""
        state = client.state
        rotated = Rotated(rotation_loss(state.teacher, self.w_features, self.tau))
        images = cache_once_per_task(client, rotated, client.data)
        old_classes = prototype_loss(client, state.prototypes, self.w_prototypes, self.tau)
        return client.fit(model, Scaled(loss_scale(self.scale, client.training), images + old_classes))

    @on_client
    def remember(self, client: Client[PrototypeState], model: Weights) -> None:
        """Keep the task's last model, and the client's own prototypes under it."""
        state = client.state
        state.teacher, state.prototypes = model, extend_prototypes(state.prototypes, compute_prototypes(client, model))
