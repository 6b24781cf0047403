"""Step between a simulation and its clients: look on, or break what they do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedkeep.data import Data
from fedkeep.interface import Fit
from fedkeep.losses import Loss
from fedkeep.models import Weights
from fedkeep.rounds.messages import StepRequest
from fedkeep.rounds.state import SimulationState
from fedkeep.testing.runs import Step, watch_clients, wrap_steps
from fedkeep.training.local_training import TrainJob
from fedkeep.training.party import LocalClient, LocalParty
from fedkeep.trials.simulation import Simulation


@contextmanager
def raising_in(simulation: Simulation, step: str, number: int, client: str) -> Iterator[None]:
    """Raise ZeroDivisionError in a client's step of a round, for the block."""

    def wrap(request: StepRequest) -> Step:
        @functools.wraps(request.step)
        def wrapped(client: LocalClient, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError("on purpose")

        at = simulation.finished + 1, request.client, request.step.__name__
        return wrapped if at == (number, client, step) else request.step

    before = simulation.executor
    wrap_steps(simulation, wrap)
    try:
        yield
    finally:
        simulation.executor = before


def let_diverge(simulation: Simulation, number: int, client: str) -> None:
    """Let a client's training in a round end in weights that are no numbers, before its step computes with them."""

    def diverged(fit: Fit) -> Fit:
        return replace(fit, model={name: torch.full_like(tensor, float("nan")) for name, tensor in fit.model.items()})

    def after(party: LocalParty, fit: Fit) -> Fit:
        return diverged(fit) if (simulation.finished + 1, party.name) == (number, client) else fit

    watch_clients(simulation, lambda party: _after_fit(party, after))


@dataclass(frozen=True, eq=False)
class RecordedFit:
    """A local training: what was given to it, and what came of it.

    ``task``, ``round``: When it was, both counted from 1.
    ``client``: Who trained; empty for the server.
    ``model``: The weights with which it began.
    ``loss``: The loss as the method gave it.
    ``data``: The data sets that the method gave; none for the client's own examples.
    ``job``: The training with its data and cached teachers.
    ``fit``: The result.
    """

    task: int
    round: int
    client: str
    model: Weights
    loss: Loss
    data: tuple[Data, ...]
    job: TrainJob
    fit: Fit


def record_fits(simulation: SimulationState) -> list[RecordedFit]:
    """Return a list to which every local training is added from now on, the server's too."""
    fits: list[RecordedFit] = []

    def watch(party: LocalParty) -> None:
        make, train = party.train_job, party.fit
        jobs: list[TrainJob] = []

        def train_job(*args: Any, **kwargs: Any) -> TrainJob:
            jobs.append(make(*args, **kwargs))
            return jobs[-1]

        def fit(model: Weights, loss: Loss, *data: Data, **kwargs: Any) -> Fit:
            result = train(model, loss, *data, **kwargs)
            fits.append(RecordedFit(party.task, party.round, party.name, model, loss, data, jobs[-1], result))
            return result

        party.train_job, party.fit = train_job, fit  # type: ignore[method-assign]

    watch(simulation.server)
    watch_clients(simulation, watch)
    return fits


def _after_fit(party: LocalParty, after: Callable[[LocalParty, Fit], Fit]) -> None:
    """Let a party's local trainings return what a function makes of them."""
    train = party.fit

    def fit(*args: Any, **kwargs: Any) -> Fit:
        return after(party, train(*args, **kwargs))

    party.fit = fit  # type: ignore[method-assign]
