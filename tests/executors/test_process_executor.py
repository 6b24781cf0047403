"""Worker processes: the same results as in one process, and an error, never a wait, when one fails or dies."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
import torch
from thread_worker import with_thread
from torch import Tensor

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.moon import MOON
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.errors import ConfigError, RunError
from fedkeep.executors.process_executor import ProcessExecutor, step_handlers
from fedkeep.executors.workers import (
    DONE,
    Handler,
    Message,
    Worker,
    kill_workers,
    run_worker,
    serve,
    start_workers,
    stop_workers,
)
from fedkeep.interface import Algorithm, Client, Fit, algorithms, on_client
from fedkeep.interface.codec import encode
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.rounds import reply_store
from fedkeep.rounds.executor import Executor, Future
from fedkeep.rounds.messages import StepRequest
from fedkeep.testing.runs import WrappedSteps

METHODS = [tiny.configured(cls) for cls in algorithms().values() if cls.__module__.startswith("fedkeep.")]


def in_process(connection: Connection, methods: Sequence[Algorithm[Any, Any]], changes: dict[str, Any]) -> None:
    """Serve one method after another, since a process takes seconds to start."""
    torch.set_num_threads(1)
    handlers: dict[str, Handler] = {}

    def choose(content: Any, tensors: Any) -> Message:
        handlers.update(step_handlers(tiny.simulation(methods[content], **changes)))
        return None, {}

    handlers["choose"] = choose
    run_worker(connection, handlers)


def blocks(worker: Worker, number: signal.Signals) -> bool:
    """Tell whether a signal cannot reach a worker's process: a job's SIGTERM goes to all, and its parent decides."""
    assert worker.process is not None
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    return bool(int(re.findall(r"SigBlk:\s+(\w+)", status)[0], 16) >> (number - 1) & 1)


@pytest.fixture
def with_workers() -> Iterator[Any]:
    started: list[Worker] = []

    def give(*methods: Algorithm[Any, Any], workers: int = 2, **changes: Any) -> Iterator[ProcessExecutor]:
        """Start processes and yield an executor for each method, in this order."""
        started.extend(start_workers(workers, in_process, methods, changes))
        assert all(blocks(worker, signal.SIGTERM) and blocks(worker, signal.SIGHUP) for worker in started)
        for number, method in enumerate(methods):
            for worker in started:
                worker.send("choose", number)
                assert worker.receive()[0] == DONE
            simulation = tiny.simulation(method, **changes)
            simulation.executor = executor = ProcessExecutor(started, simulation)
            yield executor

    yield give
    kill_workers(started)
    assert all(worker.process is not None and not worker.process.is_alive() for worker in started)


def cases() -> Iterator[Any]:
    """Yield every method alone and in stacks; slow tests but for one method of each family."""
    for method in METHODS:
        marks = () if method.name() in tiny.FAMILIES else pytest.mark.slow
        for stack in (1, 2):
            yield pytest.param(method, stack, id=f"{method.name()}-{stack}", marks=marks)


@pytest.mark.parametrize(("method", "stack"), list(cases()))
def test_every_method_gives_the_same_bits(method: Algorithm[Any, Any], stack: int) -> None:
    alone, pooled = (tiny.simulation(method, stack=stack, training=tiny.SHORT) for _ in range(2))
    executor = with_thread(pooled, tiny.simulation(method, training=tiny.SHORT))
    try:
        assert tiny.run_rounds(pooled) == tiny.run_rounds(alone)
    finally:
        executor.stop()
    assert tiny.equal(alone.server.model, pooled.server.model)
    assert encode(alone.server.state) == encode(pooled.server.state)
    assert {c: encode(s) for c, s in alone.client_states.items()} == {
        c: encode(s) for c, s in pooled.client_states.items()
    }
    assert all(worker.heard for worker in executor.workers), "the worker has worked"


@pytest.mark.slow
def test_two_processes_give_the_same_bits(with_workers: Any) -> None:
    for executor in with_workers(FedAvg(), SFedKD(), MOON(), cohort_size=5):
        pooled = executor.state
        alone = tiny.simulation(pooled.algorithm, cohort_size=5)
        assert tiny.run_rounds(pooled) == tiny.run_rounds(alone), pooled.algorithm
        assert tiny.equal(alone.server.model, pooled.server.model), pooled.algorithm
        assert all(worker.heard for worker in executor.workers), "both have worked"
    for worker in executor.workers:
        worker.connection.close()  # as when this process is killed: nobody says goodbye
    for worker in executor.workers:
        worker.process.join(60)
        assert worker.process.exitcode == 0


class Sleeping(FedAvg):
    """Never comes back."""

    title = "sleeping"

    @on_client
    def train(self, client: Any, model: Weights) -> Fit:
        time.sleep(600)
        return client.fit(model, CrossEntropy())


@pytest.mark.slow
def test_a_worker_without_a_parent_ends_in_the_middle_of_a_step(with_workers: Any) -> None:
    (executor,) = with_workers(Sleeping(), workers=1)
    simulation = executor.state
    request = StepRequest("0", simulation.algorithm.train, (simulation.server.model,), {}, 1, 1)
    executor.submit(request)
    (worker,) = executor.workers
    worker.process.join(0.5)
    assert worker.process.is_alive()
    os.kill(worker.process.pid, signal.SIGINT)  # as from the keyboard: that is the parent's affair
    worker.process.join(0.5)
    assert worker.process.is_alive()
    worker.connection.close()
    worker.process.join(60)
    assert worker.process.exitcode == 0


def test_lost_clients_and_rolled_back_rounds_are_the_same() -> None:
    def lose(number: int, client: str, step: str) -> str | None:
        return "gone" if number == 2 or (number, client) == (3, "4") else None

    changes = {"fault_injector": lose, "min_clients": 2, "cohort_size": 5}
    alone, pooled = tiny.simulation(SFedKD(), **changes), tiny.simulation(SFedKD(), **changes)
    executor = with_thread(pooled, tiny.simulation(SFedKD(), **changes))
    records = tiny.run_rounds(pooled)
    executor.stop()
    assert records == tiny.run_rounds(alone)
    assert [record["rolled_back"] for record in records] == [False, True, False, False]
    assert tiny.equal(alone.server.model, pooled.server.model)


class Broken(FedAvg):
    """Fails at one client in round 2."""


def failing(error: BaseException) -> Any:
    train = FedAvg.train

    @functools.wraps(train)
    def step(self: FedAvg, client: Any, model: Any) -> Fit:
        if (client.round, client.id) == (2, "4"):
            raise error
        return train(self, client, model)

    return step


@pytest.mark.parametrize(
    ("error", "output"),
    [(ZeroDivisionError("on purpose"), "ZeroDivisionError: on purpose"), (ConfigError("do that"), "do that")],
)
def test_an_error_in_a_step_is_told_with_its_place(
    error: BaseException, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, undisturbed = (
        tiny.simulation(FedAvg(), cohort_size=6),
        tiny.run_rounds(tiny.simulation(FedAvg(), cohort_size=6)),
    )
    with_thread(simulation, tiny.simulation(FedAvg(), cohort_size=6))
    records = tiny.run_rounds(simulation, 1)
    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "train", failing(error))
        with pytest.raises(RunError, match=r"(?s)step 'train' of client 4, round 2") as caught:
            simulation.run_round()
    assert output in str(caught.value)
    assert simulation.finished == 1
    assert simulation.executor is simulation.serial
    assert records + tiny.run_rounds(simulation) == undisturbed, "the same round again, alone"


def test_an_error_in_what_is_done_ahead_fails_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = tiny.simulation(SFedKD(), cohort_size=5)
    with_thread(simulation, tiny.simulation(SFedKD(), cohort_size=5))
    tiny.run_rounds(simulation, 1)
    prepare = SFedKD.prepare

    @functools.wraps(prepare)
    def step(self: SFedKD, client: Any, *given: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(SFedKD, "prepare", step)
    with pytest.raises(RunError, match=r"(?s)step 'prepare' of client \d, round 2.*ZeroDivisionError: on purpose"):
        simulation.run_round()
    assert simulation.finished == 1


class Prepared(WrappedSteps):
    """Counts the preparations that were submitted and not yet waited for."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner, lambda request: request.step)
        self.outstanding: list[Future] = []
        self.most = 0

    def submit(self, *requests: StepRequest) -> list[Future]:
        futures = super().submit(*requests)
        self.outstanding += [
            f for f, request in zip(futures, requests, strict=True) if request.step.__name__ == "prepare"
        ]
        self.most = max(self.most, len(self.outstanding))
        return futures

    def wait(self, future: Future) -> Any:
        self.outstanding = [other for other in self.outstanding if other != future]
        return super().wait(future)


def test_no_more_than_a_few_clients_are_prepared_ahead() -> None:
    simulation = tiny.simulation(SFedKD(), cohort_size=6, rounds=2)
    executor = with_thread(simulation, tiny.simulation(SFedKD(), cohort_size=6))
    simulation.executor = counting = Prepared(executor)
    tiny.run_rounds(simulation)
    executor.stop()
    assert executor.prefetch == 2
    assert 2 <= counting.most <= 3, "of six; one may be the one that is waited for"


class Answers(FedAvg):
    title = "answers what cannot travel, or is not what it said"
    reply: ClassVar[Any] = None

    def round(self, server: Any, cohort: Any) -> None:
        cohort.ask(self.tell)

    @on_client
    def tell(self, client: Any) -> Tensor:
        return self.reply


@pytest.mark.parametrize(
    "reply", [object(), lambda: 0, torch.eye(2).to_sparse(), "text"], ids=["object", "function", "sparse", "text"]
)
def test_an_answer_that_cannot_travel_is_told_with_its_place(reply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "reply", reply)
    simulation = tiny.simulation(Answers())
    with_thread(simulation, tiny.simulation(Answers()))
    with pytest.raises(RunError, match=r"(?s)step 'tell' of client \d, round 1"):
        simulation.run_round()
    assert simulation.executor is simulation.serial


class PretendedProcess:
    killed = False

    def kill(self) -> None:
        self.killed = True

    def join(self) -> None:
        pass


def test_a_worker_whose_first_message_waits_is_let_end() -> None:
    """Its finished rounds would be lost: those who have sent nothing are still starting, and are killed."""
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    processes = [PretendedProcess() for _ in pipes]
    pipes[0][1].send_bytes(b"a round is finished")
    stop_workers([Worker(near, process) for (near, _), process in zip(pipes, processes, strict=True)])  # type: ignore[arg-type]
    assert [process.killed for process in processes] == [False, True]


def test_a_death_is_told_and_nothing_waits(with_workers: Any) -> None:
    (executor,) = with_workers(FedSeq(), workers=1, cohort_size=5)
    simulation = executor.state
    tiny.run_rounds(simulation, 1)
    process = executor.workers[0].process
    os.kill(process.pid, 9)
    with pytest.raises(RunError, match=r"a worker process died with code -9.*step 'train'"):
        simulation.run_round()
    assert simulation.finished == 1


def test_what_cannot_be_started_ends_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[SpawnProcess] = []
    start = SpawnProcess.start

    def second_fails(self: SpawnProcess) -> None:
        if started:
            raise OSError(24, "Too many open files")
        start(self)
        started.append(self)

    monkeypatch.setattr(SpawnProcess, "start", second_fails)
    with pytest.raises(RunError, match=r"worker process 2 of 8 could not be started: .*Too many open files.*workers=1"):
        start_workers(8, in_process, [], {})
    assert not started[0].is_alive()


NO_MEMORY = """
import torch
from fedkeep.executors import workers

def empty(head):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

def main(connection):
    workers._empty = empty
    workers.run_worker(connection, {})

if __name__ == "__main__":
    (worker,) = workers.start_workers(1, main)
    try:
        worker.send("step", None, {"model": torch.zeros(10**7)})
        worker.receive()
    except workers.WorkerDied as error:
        print(error)
"""


@pytest.mark.slow
def test_a_worker_without_memory_for_a_message_ends(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(NO_MEMORY)
    command = [sys.executable, str(tmp_path / "program.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.strip() == "a worker process died with code 1; its error stands above."
    assert "can't allocate memory" in ended.stderr


def test_a_model_travels_to_a_worker_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = tiny.simulation(FedAvg(), cohort_size=6, rounds=2)
    executor = with_thread(simulation, tiny.simulation(FedAvg(), cohort_size=6))
    models: list[int] = []
    send = Worker.send

    def watch(self: Worker, kind: str, content: Any, tensors: dict[str, Any]) -> None:
        models.append(len(tensors))
        send(self, kind, content, tensors)

    monkeypatch.setattr(Worker, "send", watch)
    tiny.run_rounds(simulation)
    executor.stop()
    whole = len(simulation.server.model)
    assert models == [whole, 0, 0, 0, 0, 0] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("location", ["_encode", "_accept"])
def test_an_exception_while_talking_to_a_worker_never_waits(
    error: BaseException, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = tiny.run_rounds(tiny.simulation(FedAvg(), cohort_size=5))
    simulation = tiny.simulation(FedAvg(), cohort_size=5)
    with_thread(simulation, tiny.simulation(FedAvg(), cohort_size=5))
    records = tiny.run_rounds(simulation, 1)

    def fail(*given: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ProcessExecutor, location, fail)
        with pytest.raises(type(error)):
            simulation.run_round()
    assert records + tiny.run_rounds(simulation) == undisturbed


def test_replies_do_not_wait_in_memory_for_a_slow_client(monkeypatch: pytest.MonkeyPatch) -> None:
    others_heard = threading.Event()

    class Waits(FedAvg):
        only_averages = False  # so that replies come one by one

        @on_client
        def train(self, client: Client, model: Weights) -> Fit:
            assert len(client.data["label"]) < max(tiny.SIZES) or others_heard.wait(20)
            return client.fit(model, CrossEntropy())

    monkeypatch.setattr(reply_store, "IN_MEMORY", 0)
    settings: dict[str, Any] = {"training": tiny.SHORT, "cohort_size": len(tiny.SIZES)}
    simulation = tiny.simulation(Waits(), **settings)
    workers = []
    for _ in range(2):
        near, far = multiprocessing.Pipe()
        handlers = step_handlers(tiny.simulation(Waits(), **settings))
        threading.Thread(target=serve, args=(far, handlers), daemon=True).start()
        workers.append(Worker(near))
    simulation.executor = executor = ProcessExecutor(workers, simulation)
    heard: list[weakref.ref[Tensor]] = []
    in_memory, accept = [], executor._accept

    def accepting(group: Any, kind: str, content: Any, tensors: dict[str, Tensor]) -> None:
        in_memory.append(sum(one() is not None for one in heard))
        assert kind == DONE, content
        heard.append(weakref.ref(next(iter(tensors.values()))))
        accept(group, kind, content, tensors)
        if len(heard) == len(tiny.SIZES) - 1:
            others_heard.set()

    monkeypatch.setattr(executor, "_accept", accepting)
    simulation.run_round()
    executor.stop()
    assert len(heard) == len(tiny.SIZES)
    assert max(in_memory) <= 1, "replies that came with one another"


def test_arguments_arrive_under_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the client parameter is not annotated, and with defaults."""
    text: list[list[float]] = []

    class Asks(FedAvg):
        title = "asks of its clients"

        def round(self, server: Any, cohort: Any) -> None:
            text.append(list(cohort.ask(self.tell, 5.0, 6.0).values()))
            super().round(server, cohort)

        @on_client
        def tell(self, client, a: float = 1.0, b: float = 2.0) -> float:  # type: ignore[no-untyped-def]
            return float(a + b)

    simulation = tiny.simulation(Asks(), rounds=1)
    executor = with_thread(simulation, tiny.simulation(Asks(), rounds=1))
    tiny.run_rounds(simulation)
    executor.stop()
    assert text == [[11.0] * 3]
