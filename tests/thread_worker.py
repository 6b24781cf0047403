"""A worker that is a thread: the whole protocol, without the seconds that a process takes."""

from __future__ import annotations

import multiprocessing
import threading

from fedkeep.executors.process_executor import ProcessExecutor, step_handlers
from fedkeep.executors.workers import Worker, serve
from fedkeep.trials.simulation import Simulation


def with_thread(simulation: Simulation, twin: Simulation) -> ProcessExecutor:
    """Give a simulation such a worker, which carries out steps with its twin."""
    near, far = multiprocessing.Pipe()
    threading.Thread(target=serve, args=(far, step_handlers(twin)), daemon=True).start()
    executor = ProcessExecutor([Worker(near)], simulation)
    simulation.executor = executor
    return executor
