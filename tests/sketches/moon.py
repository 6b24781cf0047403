"""MOON on the real interface: features are drawn to the global model's and away from those of the client's last own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from fedkeep.fusion import weighted_mean
from fedkeep.interface import Algorithm, Client, Cohort, Fit, NoState, Server, on_client
from fedkeep.models import Weights
from fedkeep.objectives import Batch, CrossEntropy, Objective, Student
from fedkeep.options import option


@dataclass(frozen=True, eq=False)
class Contrast(Objective):
    """weight * -ln softmax(s(z, z_towards) / tau, s(z, z_away) / tau)[0], s the cosine; columns [n, width].

    Frozen features are given as columns, not as models: `settle` and `Student.frozen` know logits only.
    """

    towards: Tensor
    away: Tensor
    weight: float
    tau: float

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[0]
        z = student.features(batch)
        near, far = (cosine_similarity(z, column[batch.index]) for column in (self.towards, self.away))
        logits = torch.stack((near, far), dim=-1) / self.tau
        return self.weight * cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.int64))


@dataclass
class Own:
    """What a client keeps: the model as it left it at its last visit."""

    model: Weights | None = None


@dataclass(frozen=True)
class Moon(Algorithm[NoState, Own]):
    """Model-contrastive federated learning: CE + weight * contrast on what the classifier reads."""

    title = "Sketch MOON"

    weight: float = option(1.0, "weight of the contrast (mu in the paper)", low=0.0)
    tau: float = option(0.5, "its temperature", low=1e-3)

    def round(self, server: Server, cohort: Cohort) -> None:
        server.model = weighted_mean(cohort.ask(self.train, server.model))

    @on_client
    def train(self, client: Client[Own], model: Weights) -> Fit:
        """Train with the contrast between the received model and the client's own last one."""
        # At a first visit the paper takes the initial model, which a client cannot name; the received one gives no
        # gradient.
        last = model if client.state.model is None else client.state.model
        contrast = Contrast(client.features(model), client.features(last), self.weight, self.tau)
        fit = client.fit(model, CrossEntropy() + contrast)
        client.state.model = fit.model
        return fit
