"""Worker processes that perform client steps, each with its own network and the same data.

What travels is what would travel to a client: values, through the codec, never pickle. A tensor goes to a worker once a
round, however many clients are sent it. Work goes to whoever is idle, so a round's result must not depend on who did
what: every step draws from generators that are named by the client, and replies are put in the cohort's order.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedkeep.errors import FedKeepError, RunError, ValueRefused
from fedkeep.interface.codec import restore, take_apart
from fedkeep.simulation import ipc as line
from fedkeep.simulation.executor import Executor, Future
from fedkeep.simulation.messages import ClientTask, TaskResult, decode_task, describe_task, encode_task, results_type

if TYPE_CHECKING:
    from fedkeep.simulation.simulation import Simulation

DONE, KNOWN, UNKNOWN = "done", "known", "unknown"  # how a job ended: the latter two with an error


@dataclass
class Worker:
    """One worker: its process (none in tests, where it is a thread) and the line to it."""

    connection: Connection
    process: BaseProcess | None = None
    job: _Job | None = None
    knows: set[str] = field(default_factory=set)  # tensors of this round that it has


@dataclass(eq=False)
class _Job:
    requests: tuple[ClientTask, ...]
    outcomes: list[TaskResult] = field(default_factory=list)
    error: BaseException | None = None


class ProcessExecutor(Executor):
    """Performs steps in worker processes.

    Parameters
    ----------
    workers : at least one, each of which runs `serve` for an engine like this one.
    engine : whose steps are performed; gives types, and the clock that the seconds are added to.
    """

    def __init__(self, workers: Sequence[Worker], engine: Simulation) -> None:
        self.workers = list(workers)
        self.engine = engine
        self.ahead = 2 * len(self.workers)
        self.backlog: deque[_Job] = deque()
        self.round = 0, 0  # and its task
        self.names: dict[int, tuple[str, Tensor]] = {}  # by identity; holds the tensor, so that none takes its place

    def submit(self, *requests: ClientTask) -> list[Future]:
        round = requests[0].task, requests[0].round
        if round != self.round:
            self.round, self.names = round, {}
            for worker in self.workers:
                worker.knows.clear()
        job = _Job(requests)
        self.backlog.append(job)
        self._hand_out()
        return [(job, number) for number in range(len(requests))]

    def wait(self, ticket: Future) -> TaskResult:
        job: _Job = ticket[0]
        if job in self.backlog:  # somebody waits for it: before what is only done ahead
            self.backlog.remove(job)
            self.backlog.appendleft(job)
        while not job.outcomes and job.error is None:
            self._hand_out()
            self._take_in()
        if job.error is not None:
            raise job.error
        outcome: TaskResult = job.outcomes[ticket[1]]
        return outcome

    def drain(self) -> None:
        self.backlog.clear()
        while any(worker.job for worker in self.workers):
            self._take_in()

    def stop(self) -> None:
        """Let all workers go, in the middle of a step if need be; the engine goes on alone if it goes on."""
        self.backlog.clear()
        self.engine.executor = self.engine.serial
        for worker in self.workers:
            worker.connection.close()
            if worker.process is not None and worker.job is not None:
                worker.process.terminate()
        self.close()

    def close(self) -> None:
        """Let idle workers end, and wait for them."""
        for worker in self.workers:
            worker.connection.close()
        for worker in self.workers:
            if worker.process is not None:
                worker.process.join(timeout=10)
                if worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()

    def _hand_out(self) -> None:
        for worker in self.workers:
            if worker.job is None and self.backlog:
                written, fresh = self._written(self.backlog[0].requests, worker)
                worker.job = self.backlog.popleft()
                try:
                    line.send(worker.connection, written, fresh)
                except OSError:
                    self._died(worker)
                worker.knows |= set(fresh)

    def _take_in(self) -> None:
        """Wait until a worker that was given work has something to say, or dies."""
        busy = [worker for worker in self.workers if worker.job is not None]
        speaking = {worker.connection: worker for worker in busy}
        deaths = {worker.process.sentinel: worker for worker in busy if worker.process is not None}
        ready = wait([*speaking, *deaths])
        heard = []
        for connection, worker in speaking.items():
            if connection in ready:
                try:
                    answer = line.receive(connection)
                except (EOFError, OSError):
                    self._died(worker)
                assert worker.job is not None
                heard.append((worker.job, *answer))
                worker.job = None
        self._hand_out()  # nobody idles while answers are read
        for job, (how, said), tensors in heard:
            self._heard(job, how, said, tensors)
        for sentinel, worker in deaths.items():
            if sentinel in ready and worker.job is not None and not worker.connection.poll():
                self._died(worker)

    def _heard(self, job: _Job, how: str, said: Any, tensors: Mapping[str, Tensor]) -> None:
        if how != DONE:
            job.error = RunError(said if how == KNOWN else f"{_places_of(job)} The worker's error:\n{said}")
            return
        hint = results_type([request.step for request in job.requests], self.engine.client_state)
        here = {name: tensor.to(self.engine.device) for name, tensor in tensors.items()}
        try:
            outcomes, train, teachers = restore(said, here, hint)
        except ValueRefused as error:
            job.error = RunError(
                f"a worker's answer is not what its step says that it returns: {error} {_places_of(job)}"
            )
            return
        self.engine.context.clock.train += train
        self.engine.context.clock.teachers += teachers
        job.outcomes = [TaskResult(*outcome) for outcome in outcomes]

    def _died(self, worker: Worker) -> None:
        code = None
        if worker.process is not None:
            worker.process.join(timeout=5)
            code = worker.process.exitcode
        job, worker.job = worker.job, None
        where = _places_of(job) if job else ""
        why = {None: ", perhaps for lack of memory", -9: ", perhaps for lack of memory", 1: "; its error stands above"}
        raise RunError(f"a worker process died with code {code}{why.get(code, '')}. {where}")

    def _written(self, requests: Sequence[ClientTask], worker: Worker) -> tuple[list[Any], dict[str, Tensor]]:
        """Return requests written down, and those of their tensors that the worker does not have yet."""
        fresh: dict[str, Tensor] = {}

        def name(tensor: Tensor) -> str:
            if id(tensor) not in self.names:
                self.names[id(tensor)] = (str(len(self.names)), tensor)
            found = self.names[id(tensor)][0]
            if found not in worker.knows and found not in fresh:
                fresh[found] = tensor
            return found

        return [encode_task(request, name) for request in requests], fresh


def serve(engine: Simulation, connection: Connection) -> None:
    """Perform what comes over a connection until it is closed: the worker's half of `ProcessExecutor`."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    known: dict[str, Tensor] = {}
    current = 0, 0
    while True:
        try:
            written, tensors = line.receive(connection)
        except (EOFError, OSError):
            return
        answer: dict[str, Tensor] = {}
        try:
            round = written[0]["task"], written[0]["round"]
            if round != current:
                current, known = round, {}
                engine.enter(written[0]["task"])
            known |= {name: tensor.to(engine.device) for name, tensor in tensors.items()}
            said, answer = _performed(engine, written, known)
            how = DONE
        except FedKeepError as error:
            how, said = KNOWN, "\n".join([str(error), *getattr(error, "__notes__", ())])
        except Exception:
            how, said = UNKNOWN, traceback.format_exc()
        try:
            try:
                line.send(connection, [how, said], answer)
            except (RuntimeError, TypeError, ValueError):  # of a tensor that cannot travel
                line.send(connection, [UNKNOWN, traceback.format_exc()], {})
        except OSError:  # nobody is there to hear it
            return


def _performed(
    engine: Simulation, written: Sequence[Mapping[str, Any]], known: Mapping[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    requests = [decode_task(engine.algorithm, one, known, engine.client_state) for one in written]
    engine.context.clock.restart()
    outcomes = [engine.serial.wait(ticket) for ticket in engine.serial.submit(*requests)]
    said = tuple((outcome.reply, outcome.state, outcome.uses) for outcome in outcomes)
    return take_apart((said, engine.context.clock.train, engine.context.clock.teachers))


def _places_of(job: _Job) -> str:
    if len(job.requests) == 1:
        return describe_task(job.requests[0])
    clients = ", ".join(request.client for request in job.requests)
    return f"{describe_task(job.requests[0])} It was trained together with clients {clients}."
