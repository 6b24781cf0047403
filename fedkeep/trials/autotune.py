"""Choose how clients are trained, by measuring before the first round: one by one, or as one stacked model."""

import time
from collections.abc import Callable
from math import ceil, inf

import torch
from torch import nn

from fedkeep.losses import CrossEntropy
from fedkeep.rounds.state import SimulationState
from fedkeep.training.local_training import TrainJob, fit
from fedkeep.training.party import LocalClient

SIZES = (16, 32, 8, 4)  # in the order in which they are measured
FEW, MORE = 4, 16  # clients for which training one after another is measured; more if these few take too little time
WORTH = 1.2  # required speed-up of stacks: they change rounding, and this measurement is a rough one
LONG = 1000  # smallest number of trainings in a run for which measuring pays off
MAX_IMAGES = 8  # in a batch, with convolutions: of ten, stacks of LeNet-5 and CNN-4 take 1 to 2 times as long
QUICK = 0.1  # seconds; what takes less is measured several times, of which the shortest counts
TIMES = 4


def measure_alone(state: SimulationState, clients: list[str]) -> float:
    """Measure the seconds per client of training one after another."""

    def train(jobs: list[TrainJob]) -> None:
        for job in jobs:
            fit(state.context.runner, job, state.settings.training)

    return _timed(state, clients, train) / len(clients)


def measure_together(state: SimulationState, clients: list[str]) -> float:
    """Measure the seconds of training clients as one stack; infinity if that fails, perhaps for lack of memory."""

    def train(jobs: list[TrainJob]) -> None:
        for result in state.serial.vmap_trainer.fit(jobs):
            if isinstance(result, Exception):
                raise result

    try:
        # A process's first stack loads libraries for a second or more, and tries whether such jobs can be stacked.
        train([_job(state, client) for client in clients[:2]])
        return _timed(state, clients, train)
    except RuntimeError:
        return inf


def choose_stack_size(state: SimulationState, workers: int = 1) -> int:
    """Choose the stack size with which a round is expected to be fastest.

    This measures one epoch of the first cohort's largest clients, with cross-entropy. The choice depends on the machine
    and on chance, so it must be saved with the run.

    ``workers``: Number of processes that will share the cohort; with fewer groups than that, some would be idle.
    Returns: The number of clients in a stack; 1 if stacks gain little.
    """
    run_settings, federation = state.settings.run, state.federation
    if state.algorithm.sequential or state.own_contexts or not state.context.runner.stackable:
        return 1
    if state.context.training.optimizer != "sgd":
        return 1
    if state.settings.device.type == "cuda":
        return 1  # captured steps are two to four times as quick as stacks of ten (benchmarks/gpu.md)
    if state.rounds * run_settings.cohort_size < LONG:
        return 1
    convolutions = any(isinstance(module, nn.Conv2d) for module in state.context.runner.train_network.modules())
    if convolutions and state.settings.training.batch_size > MAX_IMAGES:
        return 1
    cohort = sorted(state.sample_cohort(1), key=federation.num_examples, reverse=True)
    one = measure_alone(state, cohort[:FEW])
    if one * FEW < QUICK:  # a few milliseconds are sometimes twice as quick as a round
        one = measure_alone(state, cohort[:MORE])
    best, chosen = one * ceil(len(cohort) / workers) / WORTH, 1
    for size in SIZES:
        groups = ceil(len(cohort) / size)
        group = cohort[: ceil(len(cohort) / groups)]
        if len(group) < 2 or (size > SIZES[0] and groups == ceil(len(cohort) / SIZES[0])):
            continue  # the same groups again
        seconds = measure_together(state, group)
        if size == SIZES[0] and seconds / len(group) > one:
            return 1  # these layers use the whole machine already
        if seconds * ceil(groups / workers) < best:
            best, chosen = seconds * ceil(groups / workers), size
    return chosen


def _timed(state: SimulationState, clients: list[str], train: Callable[[list[TrainJob]], object]) -> float:
    # Workers start meanwhile and take this process's turns: with one thread the time that it computes is what counts.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = inf
    for _ in range(TIMES):
        jobs = [_job(state, client) for client in clients]
        began = clock()
        train(jobs)
        seconds = min(seconds, clock() - began)
        if seconds > QUICK:
            break
    return seconds


def _job(state: SimulationState, client: str) -> TrainJob:
    party = LocalClient(state.context, client, state.federation.data(client), None, task=1, round=1, uses={})
    return party.train_job(state.server.model, CrossEntropy(), epochs=1)
