"""CohortWorkers of one cell: worker processes that share its cohorts, hired when the run is long enough to pay for them."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedkeep.annotations import annotations_of
from fedkeep.experiment.build import build_federation, build_simulation
from fedkeep.experiment.reading import load_recipe
from fedkeep.experiment.runtime import Machine
from fedkeep.interface import Algorithm
from fedkeep.interface.algorithm import client_steps, is_annotated
from fedkeep.simulation.process_executor import ProcessExecutor, Worker, serve
from fedkeep.simulation.simulation import RoundResult, Simulation

log = logging.getLogger(__name__)
PAYS = 20.0  # seconds of work left from which processes, which take some seconds to start, are worth it


def useful(algorithm: Algorithm[Any, Any], cohort: int, spare: int) -> int:
    """Return how many helpers a method can use of those that there are; fewer than two are of no use.

    A sequence trains one client at a time: a second process only does ahead what the next clients were asked to
    prepare, which FedSeq's are not.
    """
    steps = client_steps(type(algorithm)).values()
    if spare < 2 or not all(map(is_annotated, steps)):
        return 0  # what is not annotated cannot travel
    if algorithm.schedule == "parallel":
        return min(spare, cohort)
    return 2 if any(annotations_of(step)["return"] is type(None) for step in steps) else 0


class CohortWorkers:
    """The helpers of one cell. Results do not depend on whether, or when, they are hired.

    Parameters
    ----------
    folder, label, seed : the cell. count : how many to hire; fewer than two: none ever.
    """

    def __init__(self, engine: Simulation, folder: Path, label: str, seed: int, machine: Machine, count: int) -> None:
        self.engine = engine
        self.cell = str(folder), label, seed, machine
        self.count = count
        self.starting: list[Worker] = []
        self.pool: ProcessExecutor | None = None

    def consider(self, finished: RoundResult) -> None:
        """After a round, hire if what is left will take long enough, and hand over once all are ready."""
        left: float = self.engine.rounds - self.engine.finished
        if self.starting:
            self._await()
            return
        left *= finished.timings["train"] + finished.timings["teachers"]
        if self.pool is None and self.count > 1 and left > PAYS:
            self._hire()

    def dismiss(self) -> None:
        """Let all helpers go."""
        for worker in self.starting:
            worker.connection.close()
            if worker.process is not None:
                worker.process.kill()
                worker.process.join()
        self.starting = []
        if self.pool is not None:
            self.pool.close()

    def _hire(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(self.count):
            near, far = context.Pipe()
            process = context.Process(target=_help, args=(far, *self.cell), daemon=True)
            with _without_interrupts():
                process.start()
            far.close()  # so that the helper's death closes the line
            self.starting.append(Worker(near, process))

    def _await(self) -> None:
        """Hand over to the helpers if all have said that they are ready; go on alone if one could not start."""
        try:
            ready = all(worker.connection.poll() for worker in self.starting)
            if ready:
                for worker in self.starting:
                    worker.connection.recv_bytes()
        except (EOFError, OSError):
            self.count = 0
            self.dismiss()
            log.warning(
                "A process that should have helped with %s could not start; the run goes on without.", self.cell[0]
            )
            return
        if ready:
            self.engine.executor = self.pool = ProcessExecutor(self.starting, self.engine)
            self.starting = []


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let processes that start here ignore Ctrl-C, which reaches the whole group: this one decides what it means."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _help(connection: Connection, folder: str, label: str, seed: int, machine: Machine) -> None:
    """Perform client steps of one cell, in a process of its own, until the line is closed."""
    from fedkeep.experiment.plugins import use

    torch.set_num_threads(machine.threads)
    use(machine.use)
    recipe = load_recipe(str(Path(folder) / "recipe.toml"), allow_code=machine.allow_code)
    method = recipe.method(label)
    federation = build_federation(recipe, seed, machine.data_dir)
    engine = build_simulation(recipe, method, seed, federation, data_dir=machine.data_dir)
    connection.send_bytes(b"ready")
    serve(engine, connection)
