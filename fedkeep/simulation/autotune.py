"""Choose how many clients are trained as one stacked model, by measuring, before the first round."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil, inf

from fedkeep.objectives import CrossEntropy
from fedkeep.simulation.simulation import Simulation
from fedkeep.training.local_training import TrainJob, fit
from fedkeep.training.party import LocalClient

SIZES = (16, 32, 8, 4)  # in the order in which they are tried
FEW = 4  # clients on which training one after another is timed
WORTH = 1.2  # how many times as fast stacks must be: they change rounding, and a timing here is a rough one
LONG = 1000  # trainings in a run, from which measuring pays
QUICK = 1.0  # seconds; what is over so soon is timed twice


def choose_stack_size(engine: Simulation, workers: int = 1) -> int:
    """Return the number for `Simulation.stack` with which a round is expected to be quickest; 1 where stacks gain little.

    What is timed is one pass over the data of the first round's largest clients, with cross-entropy. The choice depends
    on the machine and on chance: keep it with the run.

    Parameters
    ----------
    workers : processes that will share the cohort: more than there are groups find nothing to do.
    """
    plan, federation = engine.schedule, engine.federation
    if engine.algorithm.schedule != "parallel" or engine.own or not engine.context.runner.stackable:
        return 1
    if engine.rounds * plan.cohort < LONG:
        return 1
    cohort = sorted(engine.draw_cohort(1), key=federation.size, reverse=True)
    if engine.device.type == "cuda":
        _alone(engine, cohort[:1])  # a GPU's libraries are loaded when they are first called, which takes seconds
    alone = _alone(engine, cohort[:FEW])
    best, chosen = alone * ceil(len(cohort) / workers) / WORTH, 1
    for size in SIZES:
        groups = ceil(len(cohort) / size)
        group = cohort[: ceil(len(cohort) / groups)]
        if len(group) < 2 or (size > SIZES[0] and groups == ceil(len(cohort) / SIZES[0])):
            continue  # the same groups again
        seconds = _together(engine, group)
        if size == SIZES[0] and seconds / len(group) > alone:
            return 1  # such layers keep the machine busy as they are
        if seconds * ceil(groups / workers) < best:
            best, chosen = seconds * ceil(groups / workers), size
    return chosen


def _alone(engine: Simulation, clients: list[str]) -> float:
    """Return the seconds per client of training one after another."""

    def train(todo: list[TrainJob]) -> None:
        for assignment in todo:
            fit(engine.context.runner, assignment, engine.training)

    return _timed(engine, clients, train) / len(clients)


def _together(engine: Simulation, clients: list[str]) -> float:
    """Return the seconds of training clients as one stack; infinity where it fails, for lack of memory perhaps."""

    def train(todo: list[TrainJob]) -> None:
        for found in engine.serial.stacks.fit(todo):
            if isinstance(found, Exception):
                raise found

    try:
        return _timed(engine, clients, train)
    except RuntimeError:
        return inf


def _timed(engine: Simulation, clients: list[str], train: Callable[[list[TrainJob]], object]) -> float:
    seconds = inf
    for _ in range(2):
        todo = [_assignment(engine, client) for client in clients]
        began = time.perf_counter()
        train(todo)
        seconds = min(seconds, time.perf_counter() - began)
        if seconds > QUICK:
            break
    return seconds


def _assignment(engine: Simulation, client: str) -> TrainJob:
    data = engine.federation.data(client)
    party = LocalClient(engine.place, client, data, None, task=1, round=1, uses={})
    return party.assignment(engine.server.model, CrossEntropy(), passes=1)
