"""Worker processes that perform client steps, each with its own network and the same data.

What travels is what would travel to a client: values, through the codec, never pickle. A tensor goes to a worker once a
round, however many clients are sent it. Work goes to whoever is idle, so a round's result must not depend on who did
what: every step draws from generators that are named by the client, and replies are put in the cohort's order.
"""

from __future__ import annotations

import json
import signal
import threading
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedkeep.engine.perform import (
    Outcome,
    Performer,
    Request,
    Ticket,
    answer_type,
    place_of,
    read_request,
    write_request,
)
from fedkeep.engine.toolbox import Clock
from fedkeep.errors import FedKeepError, RunError
from fedkeep.interface.codec import decode, encode, standalone

if TYPE_CHECKING:
    from fedkeep.engine.embedded import Embedded

HEAD = "head"
DONE, FAILED = b"+", b"-"


@dataclass
class Worker:
    """One worker: its process (none in tests, where it is a thread) and the line to it."""

    connection: Connection
    process: BaseProcess | None = None
    job: _Job | None = None
    knows: set[str] = field(default_factory=set)  # tensors of this round that it has


@dataclass(eq=False)
class _Job:
    request: Request
    outcome: Outcome | None = None
    error: BaseException | None = None


class Pool(Performer):
    """Performs steps in worker processes.

    Parameters
    ----------
    workers : at least one, each of which runs `serve` for an engine like this one.
    engine : whose steps are performed; gives types, and the clock that the seconds are added to.
    """

    def __init__(self, workers: Sequence[Worker], engine: Embedded) -> None:
        self.workers = list(workers)
        self.engine = engine
        self.ahead = 2 * len(self.workers)
        self.backlog: deque[_Job] = deque()
        self.round = 0
        self.names: dict[int, tuple[str, Tensor]] = {}  # by identity; holds the tensor, so that none takes its place

    def submit(self, request: Request) -> Ticket:
        if request.round != self.round:
            self.round, self.names = request.round, {}
            for worker in self.workers:
                worker.knows.clear()
        job = _Job(request)
        self.backlog.append(job)
        self._hand_out()
        return job

    def wait(self, ticket: Ticket) -> Outcome:
        job: _Job = ticket
        if job in self.backlog:  # somebody waits for it: before what is only done ahead
            self.backlog.remove(job)
            self.backlog.appendleft(job)
        while job.outcome is None and job.error is None:
            self._hand_out()
            self._take_in()
        if job.error is not None:
            raise job.error
        assert job.outcome is not None
        return job.outcome

    def drain(self) -> None:
        self.backlog.clear()
        while any(worker.job for worker in self.workers):
            self._take_in()

    def stop(self) -> None:
        """Let all workers go, in the middle of a step if need be; the engine goes on alone if it goes on."""
        self.backlog.clear()
        self.engine.performer = self.engine.here
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
                packed, fresh = self._packed(self.backlog[0].request, worker)
                worker.job = self.backlog.popleft()
                try:
                    worker.connection.send_bytes(packed)
                except OSError:
                    self._died(worker)
                worker.knows |= fresh

    def _take_in(self) -> None:
        """Wait until a worker that was given work has something to say, or dies."""
        busy = [worker for worker in self.workers if worker.job is not None]
        lines = {worker.connection: worker for worker in busy}
        deaths = {worker.process.sentinel: worker for worker in busy if worker.process is not None}
        ready = wait([*lines, *deaths])
        for line, worker in lines.items():
            if line in ready:
                try:
                    said = line.recv_bytes()
                except (EOFError, OSError):
                    self._died(worker)
                self._heard(worker, said)
        for sentinel, worker in deaths.items():
            if sentinel in ready and worker.job is not None and not worker.connection.poll():
                self._died(worker)

    def _heard(self, worker: Worker, said: bytes) -> None:
        job, worker.job = worker.job, None
        assert job is not None
        if said[:1] == FAILED:
            kind, text = json.loads(said[1:])
            job.error = RunError(text if kind == "known" else f"{place_of(job.request)} The worker's error:\n{text}")
            return
        hint = answer_type(job.request.step, self.engine.client_state)
        reply, state, uses, train, teachers = decode(said[1:], hint, self.engine.device)
        self.engine.place.clock.train += train
        self.engine.place.clock.teachers += teachers
        job.outcome = Outcome(reply, state, uses)

    def _died(self, worker: Worker) -> None:
        code = None
        if worker.process is not None:
            worker.process.join(timeout=5)
            code = worker.process.exitcode
        job, worker.job = worker.job, None
        where = place_of(job.request) if job else ""
        why = ", perhaps for lack of memory" if code in (None, -9) else ""
        raise RunError(f"a worker process died with code {code}{why}. {where}")

    def _packed(self, request: Request, worker: Worker) -> tuple[bytes, set[str]]:
        """Return a request as bytes, with those tensors that the worker does not have yet, and their names."""
        fresh: dict[str, Tensor] = {}

        def name(tensor: Tensor) -> str:
            if id(tensor) not in self.names:
                self.names[id(tensor)] = (str(len(self.names)), tensor)
            found = self.names[id(tensor)][0]
            if found not in worker.knows and found not in fresh:
                fresh[found] = standalone(tensor, fresh)
            return found

        head = write_request(request, name)
        text = bytearray(json.dumps(head, separators=(",", ":")).encode())
        return save({**fresh, HEAD: torch.frombuffer(text, dtype=torch.uint8)}), set(fresh)


def serve(engine: Embedded, connection: Connection) -> None:
    """Perform what comes over a connection until it is closed: the worker's half of `Pool`."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    known: dict[str, Tensor] = {}
    current = 0
    while True:
        try:
            blob = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            tensors = load(blob)
            head = json.loads(tensors.pop(HEAD).numpy().tobytes())
            if head["round"] != current:
                current, known = head["round"], {}
            known |= {name: tensor.to(engine.device) for name, tensor in tensors.items()}
            answer = DONE + _performed(engine, head, known)
        except FedKeepError as error:
            answer = FAILED + json.dumps(["known", "\n".join([str(error), *getattr(error, "__notes__", ())])]).encode()
        except Exception:
            answer = FAILED + json.dumps(["unknown", traceback.format_exc()]).encode()
        try:
            connection.send_bytes(answer)
        except OSError:  # nobody is there to hear it
            return


def _performed(engine: Embedded, head: Mapping[str, Any], known: Mapping[str, Tensor]) -> bytes:
    request = read_request(engine.algorithm, head, known, engine.client_state)
    engine.place.clock = Clock()
    outcome = engine.here.perform(request)
    clock = engine.place.clock
    return encode((outcome.reply, outcome.state, outcome.uses, clock.train, clock.teachers))
