"""FediCaRL: every client keeps a few examples of each class that it had, and learns them again with the new ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedkeep.algorithms.incremental import CESlice, Old, Scope, Selection, WithOldModel, joined, remembered, share
from fedkeep.interface import Client, Cohort, Data, Server, on_client
from fedkeep.losses import TSD, CompensatedEntropy, Objective, Scaled
from fedkeep.losses.exemplars import nearest_mean
from fedkeep.models import Weights
from fedkeep.models.heads import WEIGHT
from fedkeep.options import option


@dataclass
class WithExemplars(Old):
    """What a client keeps: also examples of old classes."""

    memory: Data = field(default_factory=dict)


@dataclass
class Means:
    """What the server keeps, to classify by it: the mean direction of each class's features, [classes, width]."""

    directions: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Sums:
    """What a client tells of its features, scaled to length 1: their sums by class [classes, width], and how many."""

    features: Tensor
    examples: Tensor


@dataclass(frozen=True)
class FediCaRL(WithOldModel[Means, WithExemplars]):
    """Federated iCaRL: CE[all] + w_old * KD[old] on the task's examples and the exemplars, taught by the last global
    model of the task before.

    A client keeps ``per_class`` examples of each class that it holds, chosen at the task's end by herding on the global
    model's features; with ``scope=global`` that is what all clients together keep. ``memory`` limits all classes of a
    client together, as in iCaRL's paper: exemplar sets shrink as classes come. Only models travel, and classified is
    with the linear head. With ``classify=nearest_mean`` it is by the nearest mean of features, as in iCaRL: then every
    client hears the new model too, and tells the sums of its features by class, of exemplars and the task's examples.

    ``loss=glfc`` is the loss of GLFC's code (Dong et al., 2022) instead: binary cross-entropies of all classes, half of
    it to the labels, with weights by which old and new classes pull alike, and half to what the old model says of the
    old classes beside the labels of the new. GLFC's choice of an old model by a second server is left out, and so is
    its detection of tasks; its code trains with a learning rate of 2.

    ``compat=target_repo`` keeps all examples that a client ever had, and draws ``memory`` of them (2000, if that is 0)
    at random for every visit, as TARGET's code does: over many rounds it sees most old data again, which is far more
    than iCaRL's memory. That code fails for a client with fewer; here it draws all there are.
    """

    title = "FediCaRL"
    paper = "Rebuffi et al., 2017: iCaRL, incremental classifier and representation learning; federated"

    w_old: float = option(1.0, "weight of what the old model says about old classes", low=0.0)
    ce_slice: CESlice = option("all", "labels among the task's classes, or among all that were seen")
    per_class: int = option(20, "examples of each class that are kept", low=1)
    memory: int = option(0, "examples of all classes that a client keeps at most; 0: no limit", low=0)
    scope: Scope = option("client", "whether each client keeps so many, or all together")
    selection: Selection = option("herding", "how they are chosen")
    classify: Literal["linear", "nearest_mean"] = option("linear", "what is evaluated: the classifier, or means")
    loss: Literal["icarl", "glfc"] = option("icarl", "cross-entropy and distillation, or GLFC's weighted binary ones")
    compat: Literal["icarl", "target_repo"] = option(
        "icarl", "exemplars chosen once a task, or drawn from all past data at every visit, as in TARGET's code"
    )

    def round(self, server: Server[Means], cohort: Cohort) -> None:
        super().round(server, cohort)
        if self.classify == "nearest_mean":
            replies = cohort.ask(self.tell, server.model).values()
            examples = torch.stack([reply.examples for reply in replies]).sum(0)
            means = torch.stack([reply.features for reply in replies]).sum(0) / examples[:, None]
            server.state.directions = normalize(means, dim=1)  # not a number where nobody has an example

    def predict(self, server: Server[Means], model: Weights, images: Tensor) -> Tensor:
        if server.state.directions is None or len(server.state.directions) < server.classes:
            return super().predict(server, model, images)
        scores = nearest_mean(server.features(model, {"image": images}), server.state.directions)
        return scores.clamp(min=-100)  # of a class without a mean; others are above -4, and a loss must be finite

    def end_task(self, server: Server[Means], clients: Cohort) -> None:
        count = share(self.per_class, self.scope, server.population)
        if self.memory:
            count = min(count, max(1, self.memory // server.classes))
        clients.ask(self.keep, server.model, count)

    @on_client
    def keep(self, client: Client[WithExemplars], model: Weights, count: int) -> None:
        """Keep the task's last model, and some of its examples."""
        kept = client.state
        kept.teacher = model
        if self.compat == "target_repo":
            kept.memory = joined(client.data, kept.memory)
        else:
            kept.memory = remembered(client, model, kept.memory, count, self.selection)

    @on_client
    def tell(self, client: Client[WithExemplars], model: Weights) -> Sums:
        """Tell the sums of features by class, under the new model."""
        data = self.examples(client)
        labels = data["label"]
        rows = normalize(client.features(model, data), dim=1)
        sums = rows.new_zeros(client.classes, rows.shape[1]).index_add_(0, labels, rows)
        return Sums(sums, torch.bincount(labels, minlength=client.classes).to(sums))

    def examples(self, client: Client[WithExemplars]) -> Data:
        memory = client.state.memory
        if self.compat == "target_repo" and memory:
            count = len(memory["label"])
            chosen = torch.randperm(count, generator=client.rng("exemplars"))[: self.memory or 2000]
            memory = {name: column[chosen.to(column.device)] for name, column in memory.items()}
        return joined(client.data, memory)

    def taught(self, client: Client[WithExemplars], data: Data) -> Objective:
        if self.compat == "target_repo":
            return self.lesson(client.state)  # about other examples at every visit
        return super().taught(client, data)

    def labels(self, client: Client[WithExemplars]) -> Objective:
        if self.loss == "icarl":
            return super().labels(client)
        return Scaled(0.5 if client.old else 1.0, CompensatedEntropy(client.old))

    def lesson(self, kept: WithExemplars) -> Objective:
        if self.loss == "icarl" or not kept.teacher:
            return super().lesson(kept)
        return Scaled(self.w_old / 2, TSD(kept.teacher, len(kept.teacher[WEIGHT]), "glfc"))
