"""The client's half of every sequence that is taught: hear the teachers while waiting, then train on what they said."""

from __future__ import annotations

from dataclasses import dataclass

from fedkeep.interface import Algorithm, Client, Fit, on_client
from fedkeep.interface.party import S
from fedkeep.losses import NOTHING, CrossEntropy, Distillation, Objective, Scale, WeightRule
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass
class Prepared:
    """What a client keeps from `prepare` to `train`."""

    lesson: Objective = NOTHING


@dataclass(frozen=True)
class Taught(Algorithm[S, Prepared]):
    """Base of sequences with teachers; who teaches, and how much, is decided in `round`."""

    schedule = "sequential"

    tau: float = option(4.0, "softmax temperature; the paper gives none", low=1e-3)
    kd_scale: Scale = option("tau2", "whether the distillation is multiplied by tau squared")

    @on_client
    def prepare(self, client: Client[Prepared], teachers: list[Weights], rule: WeightRule | None) -> None:
        """Hear the teachers, while waiting for the model."""
        lesson = NOTHING if rule is None else Distillation(tuple(teachers), rule, self.tau, self.kd_scale)
        client.state.lesson = client.settle(lesson)

    @on_client
    def train(self, client: Client[Prepared], model: Weights) -> Fit:
        """Train the model that the previous client left, on labels and on what the teachers said."""
        lesson, client.state.lesson = client.state.lesson, NOTHING
        return client.fit(model, CrossEntropy() + lesson)
