"""Choose how many clients are trained as one stacked model, by measuring, before the first round."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil, inf

from fedkeep.losses import CrossEntropy
from fedkeep.simulation.state import SimulationState
from fedkeep.training.local_training import TrainJob, fit
from fedkeep.training.party import LocalClient

SIZES = (16, 32, 8, 4)  # in the order in which they are tried
FEW = 4  # clients on which training one after another is timed
WORTH = 1.2  # how many times as fast stacks must be: they change rounding, and a timing here is a rough one
LONG = 1000  # trainings in a run, from which measuring pays
QUICK = 1.0  # seconds; what is over so soon is timed twice


def choose_stack_size(state: SimulationState, workers: int = 1) -> int:
    """Return the stack size with which a round is expected to be quickest; 1 where stacks gain little.

    What is timed is one pass over the data of the first round's largest clients, with cross-entropy. The choice depends
    on the machine and on chance: keep it with the run.

    Parameters
    ----------
    state : SimulationState
        Before its first round.
    workers : int
        Processes that will share the cohort: more than there are groups find nothing to do.
    """
    schedule, federation = state.schedule, state.federation
    if state.algorithm.schedule != "parallel" or state.client_factories or not state.context.runner.stackable:
        return 1
    if state.rounds * schedule.cohort < LONG:
        return 1
    cohort = sorted(state.draw_cohort(1), key=federation.num_examples, reverse=True)
    if state.device.type == "cuda":
        _alone(state, cohort[:1])  # a GPU's libraries are loaded when they are first called, which takes seconds
    alone = _alone(state, cohort[:FEW])
    best, chosen = alone * ceil(len(cohort) / workers) / WORTH, 1
    for size in SIZES:
        groups = ceil(len(cohort) / size)
        group = cohort[: ceil(len(cohort) / groups)]
        if len(group) < 2 or (size > SIZES[0] and groups == ceil(len(cohort) / SIZES[0])):
            continue  # the same groups again
        seconds = _together(state, group)
        if size == SIZES[0] and seconds / len(group) > alone:
            return 1  # such layers keep the machine busy as they are
        if seconds * ceil(groups / workers) < best:
            best, chosen = seconds * ceil(groups / workers), size
    return chosen


def _alone(state: SimulationState, clients: list[str]) -> float:
    """Return the seconds per client of training one after another."""

    def train(todo: list[TrainJob]) -> None:
        for job in todo:
            fit(state.context.runner, job, state.training)

    return _timed(state, clients, train) / len(clients)


def _together(state: SimulationState, clients: list[str]) -> float:
    """Return the seconds of training clients as one stack; infinity where it fails, for lack of memory perhaps."""

    def train(todo: list[TrainJob]) -> None:
        for found in state.serial.vmap_trainer.fit(todo):
            if isinstance(found, Exception):
                raise found

    try:
        return _timed(state, clients, train)
    except RuntimeError:
        return inf


def _timed(state: SimulationState, clients: list[str], train: Callable[[list[TrainJob]], object]) -> float:
    seconds = inf
    for _ in range(2):
        todo = [_job(state, client) for client in clients]
        began = time.perf_counter()
        train(todo)
        seconds = min(seconds, time.perf_counter() - began)
        if seconds > QUICK:
            break
    return seconds


def _job(state: SimulationState, client: str) -> TrainJob:
    data = state.federation.data(client)
    party = LocalClient(state.context, client, data, None, task=1, round=1, uses={})
    return party.train_job(state.server.model, CrossEntropy(), epochs=1)
