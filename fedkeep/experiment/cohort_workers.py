"""Worker processes that share one trial's cohorts, started when the trial is long enough to pay for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import RunError
from fedkeep.interface import Algorithm
from fedkeep.interface.algorithm import client_steps, is_annotated
from fedkeep.simulation.callbacks import Callback
from fedkeep.simulation.process_executor import PATIENCE, ProcessExecutor
from fedkeep.simulation.state import RoundResult, SimulationState
from fedkeep.simulation.workers import DONE, Worker, stop_workers

log = logging.getLogger(__name__)
WORTH = 20.0
"""Seconds of work left from which processes, which take some seconds to start, are worth it."""


def useful_workers(algorithm: Algorithm[Any, Any], cohort: int, spare: int) -> int:
    """Return how many workers a method can use of those that there are; fewer than two are of no use.

    A sequence trains one client at a time: a second process only does ahead what the next clients were asked to
    prepare, which FedSeq's are not.
    """
    steps = client_steps(type(algorithm)).values()
    if spare < 2 or not all(map(is_annotated, steps)):
        return 0  # what is not annotated cannot travel
    if algorithm.schedule == "parallel":
        return min(spare, cohort)
    return 2 if any(annotations_of(step)["return"] is type(None) for step in steps) else 0


class CohortWorkers(Callback):
    """Starts workers after a round, and hands over to them once all are ready. No result depends on whether or when.

    Parameters
    ----------
    count : int
        How many; fewer than two: none ever.
    start : Callable[[], list[Worker]]
        Starts them.
    request : tuple[str, object]
        Kind and content of the request that prepares a worker for the trial's client steps.
    worth : float
        Seconds of work left from which they are started.
    """

    def __init__(
        self, count: int, start: Callable[[], list[Worker]], request: tuple[str, Any], worth: float | None = None
    ) -> None:
        self.count = count
        self.start = start
        self.request = request
        self.worth = WORTH if worth is None else worth
        self.workers: list[Worker] = []
        self.starting: list[Worker] = []

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        if self.starting:
            self._hand_over(state)
            return
        left = (state.rounds - state.finished) * (result.timings["train"] + result.timings["teachers"])
        if not self.workers and self.count > 1 and left > self.worth:
            self.workers = self.start()
            self.starting = list(self.workers)
            for worker in self.workers:
                worker.send(*self.request)

    def on_trial_end(self, state: SimulationState) -> None:
        stop_workers(self.workers, PATIENCE)

    def _hand_over(self, state: SimulationState) -> None:
        """Hand over to the workers if all are ready; go on alone if one could not start."""
        try:
            for worker in [worker for worker in self.starting if worker.connection.poll()]:
                kind, content, _ = worker.receive()
                if kind != DONE:
                    raise RunError(content)
                self.starting.remove(worker)
        except RunError as error:
            self.count, self.starting = 0, []
            stop_workers(self.workers, PATIENCE)
            log.warning(
                "A process that should have shared the cohorts could not start; the run goes on without: %s", error
            )
            return
        if not self.starting:
            state.executor = ProcessExecutor(self.workers, state)
