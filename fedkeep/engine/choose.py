"""Choose how many clients are trained as one stacked model, by measuring, before the first round."""

from __future__ import annotations

import time
from math import ceil

from fedkeep.engine.embedded import Embedded
from fedkeep.engine.fit import Assignment, fit
from fedkeep.engine.toolbox import LocalClient
from fedkeep.objectives import CrossEntropy

SIZES = (4, 8, 16, 32)
WORTH = 1.2  # how many times as fast stacks must be: they change rounding, and a timing here is a rough one
LONG = 1000  # trainings in a run, from which measuring pays


def choose_stack(engine: Embedded, workers: int = 1) -> int:
    """Return the number for `Embedded.stack` with which a round is expected to be quickest; 1 where stacks gain little.

    What is timed is one pass over the data of the first round's largest clients, with cross-entropy. The choice depends
    on the machine and on chance: keep it with the run.

    Parameters
    ----------
    workers : processes that will share the cohort: more than there are groups find nothing to do.
    """
    plan, federation = engine.plan, engine.federation
    if engine.algorithm.schedule != "parallel" or engine.place.networks.has_batch_norm:
        return 1
    if plan.rounds * plan.cohort < LONG:
        return 1
    cohort = sorted(engine.draw_cohort(1), key=federation.size, reverse=True)
    alone = _alone(engine, cohort[: SIZES[0]])
    best, chosen = alone * ceil(len(cohort) / workers) / WORTH, 1
    for size in SIZES:
        groups = ceil(len(cohort) / size)
        group = cohort[: ceil(len(cohort) / groups)]
        if len(group) < 2:
            break
        seconds = _together(engine, group)
        if seconds / len(group) > alone:
            break  # larger stacks will hardly help
        if seconds * ceil(groups / workers) < best:
            best, chosen = seconds * ceil(groups / workers), size
        if groups == 1:
            break
    return chosen


def _alone(engine: Embedded, clients: list[str]) -> float:
    """Return the seconds per client of training one after another, the better of two times."""

    def once() -> float:
        todo = [_assignment(engine, client) for client in clients]
        began = time.perf_counter()
        for assignment in todo:
            fit(engine.place.networks, assignment, engine.training)
        return (time.perf_counter() - began) / len(clients)

    return min(once(), once())


def _together(engine: Embedded, clients: list[str]) -> float:
    """Return the seconds of training them as one stack, likewise."""

    def once() -> float:
        todo = [_assignment(engine, client) for client in clients]
        began = time.perf_counter()
        engine.here.stacks.fit(todo)
        return time.perf_counter() - began

    return min(once(), once())


def _assignment(engine: Embedded, client: str) -> Assignment:
    data = engine.federation.data(client)
    party = LocalClient(engine.place, client, data, None, task=1, round=1, uses={})
    return party.assignment(engine.server.model, CrossEntropy(), passes=1)
