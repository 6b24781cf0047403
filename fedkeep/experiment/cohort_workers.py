"""Worker processes that train one trial's cohorts in parallel, if the trial is long enough for them to pay off."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import RunError
from fedkeep.executors.process_executor import ProcessExecutor
from fedkeep.executors.workers import DONE, Worker, kill_workers
from fedkeep.interface import Algorithm
from fedkeep.interface.algorithm import client_steps, is_annotated
from fedkeep.rounds.state import RoundResult, SimulationState
from fedkeep.trials.callbacks import Callback

log = logging.getLogger(__name__)
MIN_SECONDS_LEFT = 20.0
"""Seconds of remaining work from which worker processes pay off, since starting them takes some seconds."""


def most_workers(algorithm: Algorithm[Any, Any], cohort: int) -> int:
    """Return how many workers a method can keep busy.

    A sequential method trains one client at a time. A second process then only runs the steps that prepare the next
    clients, and methods such as FedSeq have no such steps.

    Returns: The number of workers; 0 if values without a type annotation would have to be sent.
    """
    steps = client_steps(type(algorithm)).values()
    if not all(map(is_annotated, steps)):
        return 0
    if not algorithm.sequential:
        return cohort
    return 2 if any(annotations_of(step)["return"] is type(None) for step in steps) else 1


def useful_workers(algorithm: Algorithm[Any, Any], cohort: int, spare: int) -> int:
    """Return how many worker processes of this machine a method can use.

    It is 0 in place of 1: a single worker gains nothing over this process.

    ``cohort``: The number of clients in a round.
    """
    count = min(spare, most_workers(algorithm, cohort))
    return count if count > 1 else 0


class CohortWorkers(Callback):
    """Starts workers after a round, and uses them once all are ready. Results do not depend on whether or when.

    ``count``: The number of workers; fewer than two: none are started.
    ``request``: Kind and content of the request that prepares a worker for the trial's client steps.
    ``min_seconds_left``: Seconds of remaining work from which they are started; default: `MIN_SECONDS_LEFT`.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[], list[Worker]],
        request: tuple[str, Any],
        min_seconds_left: float | None = None,
    ) -> None:
        self.count = count
        self.start = start
        self.request = request
        self.min_seconds_left = MIN_SECONDS_LEFT if min_seconds_left is None else min_seconds_left
        self.workers: list[Worker] = []
        self.starting: list[Worker] = []

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        if self.starting:
            self._use_workers(state)
            return
        left = (state.rounds - state.finished) * (result.timings["train"] + result.timings["teachers"])
        if not self.workers and self.count > 1 and left > self.min_seconds_left:
            self.workers = self.start()
            self.starting = list(self.workers)
            for worker in self.workers:
                worker.send(*self.request)

    def on_trial_end(self, state: SimulationState) -> None:
        kill_workers(self.workers)

    def _use_workers(self, state: SimulationState) -> None:
        """Switch to the workers if all are ready; continue without them if one could not start."""
        try:
            for worker in [worker for worker in self.starting if worker.connection.poll()]:
                kind, content, _ = worker.receive()
                if kind != DONE:
                    raise RunError(content)
                self.starting.remove(worker)
        except RunError as error:
            self.count, self.starting = 0, []
            kill_workers(self.workers)
            log.warning("A worker process could not start, and the run continues without workers: %s", error)
            return
        if not self.starting:
            state.executor = ProcessExecutor(self.workers, state)
