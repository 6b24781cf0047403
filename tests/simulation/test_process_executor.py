"""Worker processes: the same results as in one process, and an error, never a wait, when one fails or dies."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import pytest
import tiny
import torch
from torch import Tensor

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.moon import MOON
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.errors import ConfigError, RunError
from fedkeep.interface import Algorithm, Fit, algorithms, on_client
from fedkeep.interface.codec import encode
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.simulation.messages import ClientTask
from fedkeep.simulation.process_executor import ProcessExecutor, step_handlers
from fedkeep.simulation.rounds import RoundState
from fedkeep.simulation.simulation import Simulation
from fedkeep.simulation.workers import DONE, Handler, Message, Worker, kill_workers, run_worker, serve, start_workers

METHODS = [tiny.configured(cls) for cls in algorithms().values() if cls.__module__.startswith("fedkeep.")]


def with_thread(engine: Simulation, twin: Simulation) -> ProcessExecutor:
    """Give an engine one worker that is a thread: the whole protocol, without the seconds that a process takes."""
    near, far = multiprocessing.Pipe()
    threading.Thread(target=serve, args=(far, step_handlers(twin)), daemon=True).start()
    executor = ProcessExecutor([Worker(near)], engine)
    engine.executor = executor
    return executor


def in_process(connection: Connection, methods: Sequence[Algorithm[Any, Any]], changes: dict[str, Any]) -> None:
    """Serve one method after another, since a process takes seconds to start."""
    torch.set_num_threads(1)
    handlers: dict[str, Handler] = {}

    def choose(content: Any, tensors: Any) -> Message:
        handlers.update(step_handlers(tiny.engine(methods[content], **changes)))
        return None, {}

    handlers["choose"] = choose
    run_worker(connection, handlers)


@pytest.fixture
def hired() -> Iterator[Any]:
    started: list[Worker] = []

    def give(*methods: Algorithm[Any, Any], workers: int = 2, **changes: Any) -> Iterator[ProcessExecutor]:
        """Start processes and yield an executor for each method, in this order."""
        started.extend(start_workers(workers, in_process, methods, changes))
        for number, method in enumerate(methods):
            for worker in started:
                worker.send("choose", number)
                assert worker.receive()[0] == DONE
            engine = tiny.engine(method, **changes)
            engine.executor = executor = ProcessExecutor(started, engine)
            yield executor

    yield give
    kill_workers(started)
    assert all(worker.process is not None and not worker.process.is_alive() for worker in started)


@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_gives_the_same_bits(method: Algorithm[Any, Any], stack: int) -> None:
    alone, pooled = (tiny.engine(method, stack=stack, training=tiny.SHORT) for _ in range(2))
    executor = with_thread(pooled, tiny.engine(method, training=tiny.SHORT))
    try:
        assert tiny.played(pooled) == tiny.played(alone)
    finally:
        executor.stop()
    assert tiny.equal(alone.server.model, pooled.server.model)
    assert encode(alone.server.state) == encode(pooled.server.state)
    assert {c: encode(s) for c, s in alone.client_states.items()} == {
        c: encode(s) for c, s in pooled.client_states.items()
    }
    assert all(executor.known.values()), "the worker has worked"


def test_two_processes_give_the_same_bits(hired: Any) -> None:
    for executor in hired(FedAvg(), SFedKD(), MOON(), cohort_size=5):
        pooled = executor.state
        alone = tiny.engine(pooled.algorithm, cohort_size=5)
        assert tiny.played(pooled) == tiny.played(alone), pooled.algorithm
        assert tiny.equal(alone.server.model, pooled.server.model), pooled.algorithm
        assert all(executor.known.values()), "both have worked"
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


def test_a_worker_without_a_parent_ends_in_the_middle_of_a_step(hired: Any) -> None:
    (executor,) = hired(Sleeping(), workers=1)
    engine = executor.state
    task = ClientTask("0", engine.algorithm.train, (engine.server.model,), {}, 1, 1)
    executor.submit(task)
    (worker,) = executor.workers
    worker.process.join(1)
    assert worker.process.is_alive()
    os.kill(worker.process.pid, signal.SIGINT)  # as from the keyboard: that is the parent's affair
    worker.process.join(1)
    assert worker.process.is_alive()
    worker.connection.close()
    worker.process.join(60)
    assert worker.process.exitcode == 0


def test_lost_clients_and_undone_rounds_are_the_same() -> None:
    def lose(number: int, client: str, step: str) -> str | None:
        return "gone" if number == 2 or (number, client) == (3, "4") else None

    changes = {"fault_injector": lose, "min_clients": 2, "cohort_size": 5}
    alone, pooled = tiny.engine(SFedKD(), **changes), tiny.engine(SFedKD(), **changes)
    executor = with_thread(pooled, tiny.engine(SFedKD(), **changes))
    records = tiny.played(pooled)
    executor.stop()
    assert records == tiny.played(alone)
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
    ("error", "said"),
    [(ZeroDivisionError("on purpose"), "ZeroDivisionError: on purpose"), (ConfigError("do that"), "do that")],
)
def test_an_error_in_a_step_is_told_with_its_place(
    error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, undisturbed = tiny.engine(FedAvg(), cohort_size=6), tiny.played(tiny.engine(FedAvg(), cohort_size=6))
    with_thread(engine, tiny.engine(FedAvg(), cohort_size=6))
    records = tiny.played(engine, 1)
    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "train", failing(error))
        with pytest.raises(RunError, match=r"(?s)step 'train' of client 4, round 2") as caught:
            engine.run_round()
    assert said in str(caught.value)
    assert engine.finished == 1
    assert engine.executor is engine.serial
    assert records + tiny.played(engine) == undisturbed, "the same round again, alone"


def test_an_error_in_what_is_done_ahead_fails_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine(SFedKD(), cohort_size=5)
    with_thread(engine, tiny.engine(SFedKD(), cohort_size=5))
    tiny.played(engine, 1)
    prepare = SFedKD.prepare

    @functools.wraps(prepare)
    def step(self: SFedKD, client: Any, *given: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(SFedKD, "prepare", step)
    with pytest.raises(RunError, match=r"(?s)step 'prepare' of client \d, round 2.*ZeroDivisionError: on purpose"):
        engine.run_round()
    assert engine.finished == 1


def test_no_more_than_a_few_clients_are_prepared_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine(SFedKD(), cohort_size=6, rounds=2)
    executor = with_thread(engine, tiny.engine(SFedKD(), cohort_size=6))
    under_way: list[int] = []
    look_ahead = RoundState._look_ahead

    def watch(round: RoundState) -> None:
        look_ahead(round)
        under_way.append(len(round.under_way))

    monkeypatch.setattr(RoundState, "_look_ahead", watch)
    tiny.played(engine)
    executor.stop()
    assert executor.ahead == 2
    assert 2 <= max(under_way) <= 3, "of six; one may be the one that is waited for"


class Answers(FedAvg):
    title = "answers what cannot travel, or is not what it said"
    said: ClassVar[Any] = None

    def round(self, server: Any, cohort: Any) -> None:
        cohort.ask(self.tell)

    @on_client
    def tell(self, client: Any) -> Tensor:
        return self.said


@pytest.mark.parametrize(
    "said", [object(), lambda: 0, torch.eye(2).to_sparse(), "text"], ids=["object", "function", "sparse", "text"]
)
def test_an_answer_that_cannot_travel_is_told_with_its_place(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "said", said)
    engine = tiny.engine(Answers())
    with_thread(engine, tiny.engine(Answers()))
    with pytest.raises(RunError, match=r"(?s)step 'tell' of client \d, round 1"):
        engine.run_round()
    assert engine.executor is engine.serial


def test_a_death_is_told_and_nothing_waits(hired: Any) -> None:
    (executor,) = hired(FedSeq(), workers=1, cohort_size=5)
    engine = executor.state
    tiny.played(engine, 1)
    process = executor.workers[0].process
    os.kill(process.pid, 9)
    with pytest.raises(RunError, match=r"a worker process died with code -9.*step 'train'"):
        engine.run_round()
    assert engine.finished == 1


def test_a_model_travels_to_a_worker_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine(FedAvg(), cohort_size=6, rounds=2)
    executor = with_thread(engine, tiny.engine(FedAvg(), cohort_size=6))
    models: list[int] = []
    send = Worker.send

    def watch(self: Worker, kind: str, content: Any, tensors: dict[str, Any]) -> None:
        models.append(len(tensors))
        send(self, kind, content, tensors)

    monkeypatch.setattr(Worker, "send", watch)
    tiny.played(engine)
    executor.stop()
    whole = len(engine.server.model)
    assert models == [whole, 0, 0, 0, 0, 0] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("place", ["_encode", "_accept"])
def test_an_exception_while_talking_to_a_worker_never_waits(
    error: BaseException, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = tiny.played(tiny.engine(FedAvg(), cohort_size=5))
    engine = tiny.engine(FedAvg(), cohort_size=5)
    with_thread(engine, tiny.engine(FedAvg(), cohort_size=5))
    records = tiny.played(engine, 1)

    def fail(*given: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ProcessExecutor, place, fail)
        with pytest.raises(type(error)):
            engine.run_round()
    assert records + tiny.played(engine) == undisturbed


def test_arguments_arrive_under_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the client parameter is not annotated, and with defaults."""
    told: list[list[float]] = []

    class Asks(FedAvg):
        title = "asks of its clients"

        def round(self, server: Any, cohort: Any) -> None:
            told.append(list(cohort.ask(self.tell, 5.0, 6.0).values()))
            super().round(server, cohort)

        @on_client
        def tell(self, client, a: float = 1.0, b: float = 2.0) -> float:  # type: ignore[no-untyped-def]
            return float(a + b)

    engine = tiny.engine(Asks(), rounds=1)
    executor = with_thread(engine, tiny.engine(Asks(), rounds=1))
    tiny.played(engine)
    executor.stop()
    assert told == [[11.0] * 3]
