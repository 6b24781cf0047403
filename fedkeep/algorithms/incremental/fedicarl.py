"""FediCaRL: every client keeps a few examples of each class that it had, and learns them again with the new ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.algorithms.incremental.class_incremental import (
    OldModelState,
    cache_once_per_task,
    concat,
    distill_old_classes,
    update_memory,
)
from fedkeep.interface import Algorithm, Client, Cohort, Data, Fit, Server, on_client
from fedkeep.losses import TSD, ZERO_LOSS, CompensatedCrossEntropy, CrossEntropy, Loss, Scaled
from fedkeep.losses.prototypes import nearest_mean_scores
from fedkeep.models import Weights
from fedkeep.models.heads import WEIGHT
from fedkeep.options import option


@dataclass
class ExemplarState(OldModelState):
    """Client state: also exemplars.

    ``memory``: Examples of old classes.
    """

    memory: Data = field(default_factory=dict)


@dataclass
class ClassMeans:
    """Server state: the class means by which it classifies.

    ``normalized_means``: [classes, width], the mean of each class's features, scaled to length 1; None before the first
        round.
    """

    normalized_means: Tensor | None = None


ROUNDING = 1e-3
"""By how much a sum of vectors of length 1 may be longer than their number."""


@dataclass(frozen=True, eq=False)
class FeatureSums:
    """A client's reply about its features, each scaled to length 1.

    ``sums``: Their sums by class, [classes, width].
    ``num_examples``: The number of examples of each class, [classes].
    """

    sums: Tensor
    num_examples: Tensor

    def validate(self, classes: int, width: int, available: int) -> str | None:
        """Return what is wrong with the sums that a client sent, or None if nothing is.

        ``available``: How many examples and exemplars the client has at most.
        """
        shapes = {"sums": (self.sums, [classes, width]), "numbers": (self.num_examples, [classes])}
        for what, (tensor, expected) in shapes.items():
            if list(tensor.shape) != expected or tensor.dtype != torch.float32:
                found = f"{list(tensor.shape)} in {tensor.dtype}"
                return f"{what} of its features by class of shape {found}, not {expected} in float32"
        counts = self.num_examples
        if bool((counts < 0).any() | (counts != counts.round()).any()) or counts.double().sum() > available:
            return f"features of examples that cannot be: {counts.tolist()} by class, and it has {available} at most"
        if bool((self.sums.double().norm(dim=1) > counts * (1 + ROUNDING)).any()):
            return "sums of features of length 1 that are longer than their number"
        return None


@dataclass(frozen=True)
class FediCaRL(Algorithm[ClassMeans, ExemplarState]):
    """Federated iCaRL: CE[all] + w_old * KD[old] on the task's examples and the exemplars.

    The teacher is the last global model of the task before. A client keeps ``exemplars_per_class`` examples of each
    class that it holds, chosen at the task's end by herding on the global model's features. ``max_exemplars`` limits
    all classes of a client together, as in iCaRL's paper: exemplar sets shrink as classes arrive. Only models travel,
    and the linear classifier is evaluated. With
    ``classify=nearest_mean`` an image gets the class of the nearest mean of features, as in iCaRL: then the clients of
    a round also receive the new model, and report the sums of its features by class, of exemplars and the task's
    examples. A class of which none of them has an example keeps its mean of an earlier round. The means are those of
    the last model, so that no average of models is evaluated.

    ``loss=glfc`` is the loss of GLFC's code (Dong et al., 2022) instead: binary cross-entropies of all classes. Half of
    it has the labels as targets, with weights that balance old and new classes, and half the old model's outputs for
    old classes beside the labels of the new. GLFC's choice of an old model by a second server is left out, and so is
    its detection of tasks; its code trains with a learning rate of 2.
    """

    title = "FediCaRL"
    paper = "Rebuffi et al., 2017: iCaRL, incremental classifier and representation learning; federated"

    w_old: float = option(1.0, "weight of the distillation of old classes", low=0.0)
    tau: float = option(2.0, "softmax temperature; there is no tau squared", low=1e-3)
    aggregation: Aggregation = option("uniform", "whether clients count by their examples, or all alike")
    exemplars_per_class: int = option(20, "examples of each class that are kept", low=1)
    max_exemplars: int = option(0, "examples that a client keeps at most, though one of each class; 0: no limit", low=0)
    classify: Literal["linear", "nearest_mean"] = option("linear", "what is evaluated: the classifier, or means")
    loss: Literal["icarl", "glfc"] = option("icarl", "cross-entropy and distillation, or GLFC's weighted binary ones")

    @property
    def keeps_examples(self) -> bool:
        return True

    @property
    def reason_against_dp_sgd(self) -> str:
        return (
            "FediCaRL's clients keep examples that they choose by their features, which epsilon would not cover. Take "
            "FedLwF, which keeps none."
        )

    @property
    def reason_against_label_loss(self) -> str:
        return "" if self.loss == "icarl" else "with loss=glfc its cross-entropies are binary and weighted"

    @property
    def sets_eval_model(self) -> bool:
        return self.classify == "nearest_mean"

    def round(self, server: Server[ClassMeans], cohort: Cohort) -> None:
        server.model = aggregate(cohort.ask(self.train, server.model), self.aggregation)
        if self.classify == "nearest_mean":
            replies = cohort.ask(self.report_features, server.model).values()
            examples = torch.stack([reply.num_examples for reply in replies]).sum(0)
            means = normalize(torch.stack([reply.sums for reply in replies]).sum(0) / examples[:, None], dim=1)
            earlier = server.state.normalized_means
            if earlier is not None:  # else NaN for a class of which nobody has an example
                held = examples[: len(earlier)] > 0
                means[: len(earlier)] = torch.where(held[:, None], means[: len(earlier)], earlier)
            server.state.normalized_means = means

    def predict(self, server: Server[ClassMeans], model: Weights, images: Tensor) -> Tensor:
        if server.state.normalized_means is None or len(server.state.normalized_means) < server.num_classes:
            return super().predict(server, model, images)
        scores = nearest_mean_scores(server.features(model, {"input": images}), server.state.normalized_means)
        return scores.clamp(min=-100)  # of a class without a mean; others are above -4, and a loss must be finite

    def end_task(self, server: Server[ClassMeans], clients: Cohort) -> None:
        count = self.exemplars_per_class
        if self.max_exemplars:
            count = min(count, max(1, self.max_exemplars // server.num_classes))
        clients.ask(self.remember, server.model, count)

    def validate_reply(self, server: Server[ClassMeans], reply: Any, examples: int) -> str | None:
        if not isinstance(reply, FeatureSums):
            return None
        kept = self.exemplars_per_class * server.num_old_classes
        return reply.validate(server.num_classes, server.initial_model[WEIGHT].shape[1], examples + kept)

    @on_client
    def train(self, client: Client[ExemplarState], model: Weights) -> Fit:
        """Train the global model on the task's examples and the exemplars."""
        state = client.state
        data = concat(client.data, state.memory)
        labels: Loss = CrossEntropy()
        if self.loss == "glfc":
            labels = Scaled(0.5 if client.num_old_classes else 1.0, CompensatedCrossEntropy(client.num_old_classes))
        return client.fit(model, labels + cache_once_per_task(client, self.distillation(state.teacher), data), data)

    def distillation(self, teacher: Weights) -> Loss:
        """Return the distillation of old classes, before the teacher is evaluated."""
        if self.loss == "icarl":
            return distill_old_classes(teacher, self.w_old, self.tau)
        return Scaled(self.w_old / 2, TSD(teacher, len(teacher[WEIGHT]), "glfc")) if teacher else ZERO_LOSS

    @on_client
    def remember(self, client: Client[ExemplarState], model: Weights, count: int) -> None:
        """Keep the task's last model, and some of its examples."""
        state = client.state
        state.teacher = model
        state.memory = update_memory(client, model, state.memory, count, "herding")

    @on_client
    def report_features(self, client: Client[ExemplarState], model: Weights) -> FeatureSums:
        """Report the sums of features by class, under the new model."""
        data = concat(client.data, client.state.memory)
        labels = data["label"]
        rows = normalize(client.features(model, data), dim=1)
        sums = rows.new_zeros(client.num_classes, rows.shape[1]).index_add_(0, labels, rows)
        return FeatureSums(sums, torch.bincount(labels, minlength=client.num_classes).to(sums))
