"""LANDER: features are bound to what classes are called, and so are the synthetic images of old classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, log2, sqrt
from typing import Any

from torch import Tensor

from fedkeep.algorithms.incremental import cross_entropy, old_classes
from fedkeep.algorithms.synthetic import Made, WithSynthetic
from fedkeep.errors import ConfigError
from fedkeep.interface import Client, Cohort, Data, Fit, Server
from fedkeep.losses import Bounding, FeatureError, Objective, Scaled
from fedkeep.models import Weights
from fedkeep.models.heads import WEIGHT
from fedkeep.options import option
from fedkeep.generation.inversion import TextInverter, read_anchors
from fedkeep.generation.inversion.anchors import FORMS


@dataclass
class Best(Made):
    """What the server keeps: also the task's model that clients had the lowest loss with, and that loss."""

    best: Weights = field(default_factory=dict)
    lowest: float = inf


@dataclass(frozen=True)
class LANDER(WithSynthetic[Best]):
    """Label-text anchors: A (CE[new] + ltc * bound) on own examples + B (KD[old] + MSE of features) on synthetic ones.

    An anchor is the embedding of a class's name by a language model, a vector as wide as the network's features (512
    in the paper). The bounding loss, max(0, MSE(features, anchor) - r), has no anchor pull harder than that. The last
    global model of the task before teaches logits, at temperature 2 without tau^2, and features, and the server
    inverts it into images through the anchors (see `fedkeep.generation.TextInverter`). With n classes of which n_old
    are old, a = log2(n / 2 + 1) and b = sqrt(n_old / n), A = cur (1 + 1 / a) / b and B = pre a b. In the first task A
    is 1 and B is 0.

    ``anchors`` names the file, which the server alone reads: a .csv with a line for each class, its name and then the
    numbers; or a .safetensors with a vector under each class's name.

    A task leaves the global model with which clients had the lowest loss, not the last one. The code sums the losses of
    a visit's first pass; here it is the mean over all of a visit's steps, and the model of the first round, which does
    not know the new classes, is no candidate. Its learning rate falls from 0.04 to 0.001 on a cosine, which recipes
    cannot say: they have `training.lr_decay`.
    """

    title = "LANDER"
    paper = "Tran et al., 2024: Text-enhanced data-free approach for federated class-incremental learning"

    anchors: str = option("", "file with a vector for each class name: .csv or .safetensors")
    ltc: float = option(5.0, "weight of the bounding loss", low=0.0)
    r: float = option(0.015, "mean squared distance from the anchor that costs nothing", low=0.0)
    cur: float = option(0.2, "factor of what is learned from own examples", low=0.0)
    pre: float = option(0.4, "factor of what is learned from synthetic images", low=0.0)
    syn_batch_size: int = option(128, "synthetic images a step; the code has as many as own examples", low=2)
    nums: int = option(10000, "synthetic images", low=2)
    g_steps: int = option(40, "steps of the generator for each batch of images", low=1)
    warmup: int = option(10, "batches made, and thrown away, before a student is taught and challenged", low=0)
    bn: float = option(1.0, "weight of the distance of batch-norm statistics; nothing without batch norm", low=0.0)
    kd_steps: int = option(50, "steps of the student after each batch of images", low=0)
    sample_batch_size: int = option(128, "images in each of these", low=2)
    lr_s: float = option(0.1, "learning rate of the student (SGD with momentum 0.9)", low=0.0)

    def check(self) -> None:
        if not self.anchors:
            raise ConfigError(f"LANDER needs vectors for what classes are called. Set anchors to {FORMS}.")

    def begin_task(self, server: Server[Best], clients: Cohort) -> None:
        server.state.best, server.state.lowest = {}, inf
        super().begin_task(server, clients)

    def note(self, server: Server[Best], replies: Mapping[str, Fit]) -> None:
        super().note(server, replies)
        examples = sum(reply.examples for reply in replies.values())
        if server.round == 1 or not examples:
            return
        loss = sum(max(reply.loss, 0.0) * reply.examples for reply in replies.values()) / examples
        if loss < server.state.lowest:
            server.state.best, server.state.lowest = server.model, loss

    def end_task(self, server: Server[Best], clients: Cohort) -> None:
        server.model = server.state.best or server.model

    def images(self, server: Server[Best]) -> Data:
        inverter = TextInverter(self, self.problem(server), self.vectors(server), self.ltc, self.r)
        return inverter.make(self.batches, spared=self.warmup)

    def lesson(self, server: Server[Best]) -> Objective:
        own, old = self.shares(server.old, server.classes)
        bound = Scaled(own * self.ltc, Bounding(self.vectors(server), self.r))
        if not server.old:
            return bound
        features = Scaled(old, FeatureError(server.model, on=1))
        return bound + old_classes(server.model, old, self.tau, on=1) + features

    def batch(self, server: Server[Best]) -> int:
        return self.syn_batch_size

    def labels(self, client: Client[Any]) -> Objective:
        return Scaled(self.shares(client.old, client.classes)[0], cross_entropy(client, "new"))

    def shares(self, old: int, classes: int) -> tuple[float, float]:
        """Return A and B."""
        if not old:
            return 1.0, 0.0
        a, b = log2(classes / 2 + 1), sqrt(old / classes)
        return self.cur * (1 + 1 / a) / b, self.pre * a * b

    def vectors(self, server: Server[Best]) -> Tensor:
        """Return the anchors of all classes known now, [classes, width], on the server's device."""
        head = server.model[WEIGHT]
        found = read_anchors(self.anchors, server.label_names)
        if found.shape[1] != head.shape[1]:
            raise ConfigError(
                f"LANDER compares features with anchors: this network's features are {head.shape[1]} wide, and the "
                f"vectors in {self.anchors!r} have {found.shape[1]} numbers. Use a model with features as wide, such "
                "as resnet18 for 512, or another embedding."
            )
        return found.to(head.device)
