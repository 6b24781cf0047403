"""FedCAD on the real interface: the server hears the model on its own labelled images and trusts it class by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedkeep.errors import ConfigError
from fedkeep.fusion import weighted_mean
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.models import Weights
from fedkeep.objectives import Batch, Distillation, Objective, Student, WeightRule
from fedkeep.options import option


@dataclass(frozen=True, eq=False)
class ByClassCrossEntropy(Objective):
    """Mean over the batch of weight[label] * -ln p(label), not divided by the weights' sum; ``weight`` [classes]."""

    weight: Tensor

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[0]
        labels = batch.data["label"]
        return (self.weight[labels] * cross_entropy(student.logits(batch), labels, reduction="none")).mean()


@dataclass(frozen=True, eq=False)
class ByClassFull(WeightRule):
    """The full divergence KL(teacher || student) = TC + q_y NT, times ``weight`` [classes] of the label."""

    weight: Tensor

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        weight = self.weight[labels].expand(teachers.shape[:2])
        own = (teachers / tau).softmax(-1).gather(-1, labels.expand(weight.shape).unsqueeze(-1)).squeeze(-1)
        return weight, weight * (1 - own)


@dataclass(frozen=True)
class FedCAD(Algorithm):
    """Class-wise adaptive self-distillation: mean_i [(1 - a_y) CE_i + a_y KL_i], a_c = low + (high - low) E[p_c]."""

    title = "Sketch FedCAD"
    needs = ("auxiliary",)

    low: float = option(0.3, "weight of a class of which the server's model knows nothing", low=0.0, high=1.0)
    high: float = option(0.7, "weight of a class that it knows for certain", low=0.0, high=1.0)
    tau: float = option(2.0, "softmax temperature", low=1e-3)

    def check(self) -> None:
        if self.low > self.high:
            raise ConfigError(f"FedCAD.low is {self.low}, more than high, which is {self.high}.")

    def round(self, server: Server, cohort: Cohort) -> None:
        trust = self.low + (self.high - self.low) * self.confidence(server)
        server.log("trust", trust.tolist())
        server.model = weighted_mean(cohort.ask(self.train, server.model, trust))

    def confidence(self, server: Server) -> Tensor:
        """Return how probable the model finds the right class, on average over the server's images of it: [classes]."""
        labels = server.data["label"]
        said = (server.predict(server.model) / self.tau).softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        held = torch.bincount(labels, minlength=server.classes)
        # A class without images is one of which the model is known to know nothing, not a NaN for everybody.
        return torch.bincount(labels, weights=said, minlength=server.classes).to(said.dtype) / held.clamp(min=1)

    @on_client
    def train(self, client: Client, model: Weights, trust: Tensor) -> Fit:
        """Train on labels where the received model is not to be trusted, and on what it says where it is."""
        teaching = Distillation((model,), ByClassFull(trust), self.tau, scale="none")
        return client.fit(model, ByClassCrossEntropy(1 - trust) + teaching)
