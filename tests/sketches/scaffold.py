"""SCAFFOLD on the real interface: control variates on both sides, twice the model each way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkeep.fusion import weighted_mean
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.models import Weights
from fedkeep.models.weights import add, mean, scale, subtract
from fedkeep.objectives import Batch, CrossEntropy, Objective, Student


@dataclass(frozen=True, eq=False)
class Slope(Objective):
    """A penalty that is linear in the parameters, sum <slope, w>: it adds ``slope`` to every gradient."""

    slope: Weights

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        # Over the student's parameters, not over the slope: a whole model has buffers too, which are not trained.
        return torch.stack([(self.slope[name] * weight).sum() for name, weight in student.weights.items()]).sum()


@dataclass
class Control:
    """What a client keeps: its own control variate, in the form of a model; empty before its first visit."""

    c: Weights = field(default_factory=dict)


@dataclass
class Controls(Control):
    """What the server keeps: the mean control variate, and over how many clients."""

    population: int = 0


@dataclass(frozen=True, eq=False)
class ControlledFit(Fit):
    """A fit, and how far the client's control variate moved."""

    moved: Weights


@dataclass(frozen=True)
class Scaffold(Algorithm[Controls, Control]):
    """Stochastic controlled averaging: steps along g - c_i + c; c_i <- c_i - c + (w - w_i) / (K_eff lr)."""

    title = "Sketch SCAFFOLD"

    def begin_task(self, server: Server[Controls], clients: Cohort) -> None:
        super().begin_task(server, clients)
        server.state.population = len(clients)

    def round(self, server: Server[Controls], cohort: Cohort) -> None:
        kept = server.state
        c = kept.c or scale(server.model, 0.0)
        replies = cohort.ask(self.train, server.model, c)
        server.model = weighted_mean(replies)
        kept.c = add(c, mean([reply.moved for reply in replies.values()]), len(replies) / kept.population)

    @on_client
    def train(self, client: Client[Control], model: Weights, c: Weights) -> ControlledFit:
        """Train with the drift of the client's own gradient taken out, and refresh what is known of it."""
        own = client.state.c or scale(model, 0.0)
        fit = client.fit(model, CrossEntropy() + Slope(subtract(c, own)))
        new = own
        if fit.steps:
            rate = client.training.lr_at(client.round) * effective_steps(fit.steps, client.training.momentum)
            new = add(subtract(own, c), subtract(model, fit.model), 1 / rate)
        client.state.c = new
        return ControlledFit(fit.model, fit.examples, fit.steps, fit.loss, moved=subtract(new, own))


def effective_steps(steps: int, momentum: float) -> float:
    """Return how many plain steps go as far along a constant gradient as these with momentum."""
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
