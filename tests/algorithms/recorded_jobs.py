"""Two tasks, of two classes and of one, and what clients were given to train in them: for losses by formula."""

from __future__ import annotations

from typing import Any

import tiny
from interception import record_fits
from torch import Tensor
from torch.func import functional_call

from fedkeep.interface import Algorithm, Fit
from fedkeep.models import Weights
from fedkeep.training.local_training import NetworkView, TrainJob
from fedkeep.trials.simulation import Simulation

AnyAlgorithm = Algorithm[Any, Any]
TWO_ONE = tiny.stream((2, 1), clients=4, absent=0)


class RecordedJobs:
    """What parties were given to train, and what came of it, by (task, round, client): in this order of names."""

    def __init__(self, simulation: Simulation) -> None:
        self._recorded = record_fits(simulation)

    @property
    def fits(self) -> dict[tuple[int, int, str], TrainJob]:
        return {(one.task, one.round, one.client): one.job for one in self._recorded}

    @property
    def results(self) -> dict[tuple[int, int, str], Fit]:
        return {(one.task, one.round, one.client): one.fit for one in self._recorded}


def loss_of(simulation: Any, given: TrainJob, model: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of a model on the first rows of what it was given to train, their images and labels."""
    batch, networks = given.streams[0].first(4), simulation.context.runner
    weights = {name: model[name] for name in networks.parameters}
    student = NetworkView(
        networks, weights, lambda images: functional_call(networks.train_network, dict(model), (images,))
    )
    value = given.loss(student, [batch])
    return value, batch.data["input"], batch.data["label"]


def logits(simulation: Any, model: Weights, images: Tensor) -> Tensor:
    return simulation.context.runner.logits(model, images)  # type: ignore[no-any-return]


def distilled(student: Tensor, teacher: Tensor, known: int, tau: float = 2.0) -> Tensor:
    output = (teacher[:, :known] / tau).softmax(-1)
    return -(output * (student[:, :known] / tau).log_softmax(-1)).sum(-1).mean()


def second_task(method: AnyAlgorithm, rounds: int = 4) -> tuple[Any, RecordedJobs, Weights]:
    """Run some rounds, two a task; return the simulation, what was trained, and the last model of the first task."""
    simulation = tiny.simulation_with_tasks(method, TWO_ONE, cohort_size=4)
    seen = RecordedJobs(simulation)
    tiny.run_rounds(simulation, 2)
    old = simulation.server.model
    tiny.run_rounds(simulation, rounds - 2)
    return simulation, seen, old
