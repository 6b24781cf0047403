"""Choose how clients are trained, by measuring before the first round: as one stacked model, with compiled steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil, inf

from fedkeep.losses import CrossEntropy
from fedkeep.rounds.state import SimulationState
from fedkeep.training.compiled_training import steps_in_graph
from fedkeep.training.local_training import TrainJob, fit
from fedkeep.training.party import LocalClient

SIZES = (16, 32, 8, 4)  # in the order in which they are measured
FEW = 4  # clients for which training one after another is measured
WORTH = 1.2  # required speed-up of stacks: they change rounding, and this measurement is a rough one
LONG = 1000  # smallest number of trainings in a run for which measuring pays off
QUICK = 1.0  # seconds; what takes less is measured twice
LONG_SECONDS = 600.0  # smallest expected training time for which compiling pays off: it takes a minute or two
LONG_STEP = 0.008  # seconds; steps that take longer spend their time in layers that are compiled already


Measure = Callable[[SimulationState, list[str]], float]
"""Returns the seconds that it takes to train clients."""


def measure_alone(state: SimulationState, clients: list[str]) -> float:
    """Measure the seconds per client of training one after another."""

    def train(jobs: list[TrainJob]) -> None:
        for job in jobs:
            fit(state.context.runner, job, state.settings.training, state.context.compiler)

    return _timed(state, clients, train) / len(clients)


def measure_together(state: SimulationState, clients: list[str]) -> float:
    """Measure the seconds of training clients as one stack; infinity if that fails, perhaps for lack of memory."""

    def train(jobs: list[TrainJob]) -> None:
        for result in state.serial.vmap_trainer.fit(jobs):
            if isinstance(result, Exception):
                raise result

    try:
        return _timed(state, clients, train)
    except RuntimeError:
        return inf


def choose_stack_size(
    state: SimulationState, workers: int = 1, *, alone: Measure = measure_alone, together: Measure = measure_together
) -> int:
    """Choose the stack size with which a round is expected to be fastest.

    This measures one epoch of the first cohort's largest clients, with cross-entropy. The choice depends on the machine
    and on chance, so it must be saved with the run.

    ``workers``: Number of processes that will share the cohort; with fewer groups than that, some would be idle.
    ``alone``, ``together``: Measure one training, the mean of some after another, and the training of clients as one
        stack.
    Returns: The number of clients in a stack; 1 if stacks gain little.
    """
    run_settings, federation = state.settings.run, state.federation
    if state.algorithm.sequential or state.own_contexts or not state.context.runner.stackable:
        return 1
    if state.context.training.optimizer != "sgd":
        return 1
    if state.rounds * run_settings.cohort_size < LONG:
        return 1
    cohort = sorted(state.sample_cohort(1), key=federation.num_examples, reverse=True)
    if state.settings.device.type == "cuda":
        alone(state, cohort[:1])  # warm-up: a GPU's libraries are loaded on their first call, which takes seconds
    one = alone(state, cohort[:FEW])
    best, chosen = one * ceil(len(cohort) / workers) / WORTH, 1
    for size in SIZES:
        groups = ceil(len(cohort) / size)
        group = cohort[: ceil(len(cohort) / groups)]
        if len(group) < 2 or (size > SIZES[0] and groups == ceil(len(cohort) / SIZES[0])):
            continue  # the same groups again
        seconds = together(state, group)
        if size == SIZES[0] and seconds / len(group) > one:
            return 1  # these layers use the whole machine already
        if seconds * ceil(groups / workers) < best:
            best, chosen = seconds * ceil(groups / workers), size
    return chosen


def choose_compiled_steps(
    state: SimulationState, workers: int = 1, *, alone: Measure = measure_alone, together: Measure = measure_together
) -> int:
    """Choose whether steps are compiled (see `fedkeep.training.compiled_training`).

    Steps are compiled where local training is expected to take ten minutes or more, a step takes less than 8 ms, and a
    measurement with cross-entropy finds compiled steps 1.2 times as fast as the best without them. That measurement
    compiles once. As with stacks, the choice must be saved with the run.

    ``state``: The simulation, before its first round. Its ``stack`` is chosen already.
    ``workers``: Number of processes that will share the cohort.
    Returns: The number of steps in a graph; 0 if compiling gains little.
    """
    federation, training = state.federation, state.settings.training
    if state.own_contexts or training.optimizer != "sgd" or state.settings.privacy.noise_multiplier:
        return 0
    if state.rounds * state.settings.run.cohort_size < LONG:
        return 0
    sizes = [federation.num_examples(client) for client in federation.clients]
    num_steps = steps_in_graph(sizes, training.batch_size)
    cohort = sorted(state.sample_cohort(1), key=federation.num_examples, reverse=True)[: max(FEW, state.settings.stack)]
    one = alone(state, cohort[:FEW])
    steps_of_one = ceil(federation.num_examples(cohort[0]) / training.batch_size)
    trainings = state.rounds * state.settings.run.cohort_size * training.epochs
    if one * trainings / max(workers, 1) < LONG_SECONDS or one / max(steps_of_one, 1) > LONG_STEP:
        return 0
    best = min(one, together(state, cohort) / len(cohort)) if state.settings.stack > 1 else one
    state.compile_steps(num_steps)
    alone(state, cohort[:1])  # compiles
    compiled = alone(state, cohort[:FEW])
    return num_steps if compiled * WORTH < best else 0


def _timed(state: SimulationState, clients: list[str], train: Callable[[list[TrainJob]], object]) -> float:
    seconds = inf
    for _ in range(2):
        jobs = [_job(state, client) for client in clients]
        began = time.perf_counter()
        train(jobs)
        seconds = min(seconds, time.perf_counter() - began)
        if seconds > QUICK:
            break
    return seconds


def _job(state: SimulationState, client: str) -> TrainJob:
    data = state.federation.data(client)
    party = LocalClient(state.context, client, data, None, task=1, round=1, uses={})
    return party.train_job(state.server.model, CrossEntropy(), epochs=1)
