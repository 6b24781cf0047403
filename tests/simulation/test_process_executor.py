"""Worker processes: the same results as in one process, and an error, never a wait, when one fails or dies."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import tiny
import torch
from torch import Tensor

from fedkeep.algorithms.fedavg import FedAvg
from fedkeep.algorithms.fedseq import FedSeq
from fedkeep.algorithms.moon import MOON
from fedkeep.algorithms.sfedkd import SFedKD
from fedkeep.errors import ConfigError, RunError
from fedkeep.interface import Algorithm, Fit, algorithms, on_client
from fedkeep.interface.codec import encode
from fedkeep.simulation import ipc as line
from fedkeep.simulation.process_executor import ProcessExecutor, Worker, serve
from fedkeep.simulation.rounds import RoundState
from fedkeep.simulation.simulation import Simulation

METHODS = [tiny.configured(cls) for cls in algorithms().values() if cls.__module__.startswith("fedkeep.")]


def with_thread(engine: Simulation, twin: Simulation) -> ProcessExecutor:
    """Give an engine one worker that is a thread: the whole protocol, without the seconds that a process takes."""
    near, far = multiprocessing.Pipe()
    threading.Thread(target=serve, args=(twin, far), daemon=True).start()
    pool = ProcessExecutor([Worker(near)], engine)
    engine.executor = pool
    return pool


def in_process(methods: Sequence[Algorithm[Any, Any]], connections: Sequence[Any], changes: dict[str, Any]) -> None:
    """Serve one method after another, each until its connection is closed: a process takes seconds to start."""
    torch.set_num_threads(1)
    for method, connection in zip(methods, connections, strict=True):
        serve(tiny.engine(method, **changes), connection)


@pytest.fixture
def pools() -> Iterator[Any]:
    made: list[ProcessExecutor] = []

    def give(*engines: Simulation, workers: int = 2, **changes: Any) -> list[ProcessExecutor]:
        """Hire processes for engines, which play in this order; each pool is to be closed before the next works."""
        context = multiprocessing.get_context("spawn")
        hired: list[list[Worker]] = [[] for _ in engines]
        for _ in range(workers):
            lines = [context.Pipe() for _ in engines]
            far = [end for _, end in lines]
            process = context.Process(target=in_process, args=([e.algorithm for e in engines], far, changes))
            process.start()
            for end in far:
                end.close()
            for number, (near, _) in enumerate(lines, start=1):
                # Only the last to close a line sees the process end.
                hired[number - 1].append(Worker(near, process if number == len(engines) else None))
        pools = [ProcessExecutor(workers, engine) for workers, engine in zip(hired, engines, strict=True)]
        for pool in pools:
            pool.engine.executor = pool
        made.append(pools[-1])
        return pools

    yield give
    for pool in made:
        pool.close()
        assert all(worker.process is not None and not worker.process.is_alive() for worker in pool.workers)


@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_gives_the_same_bits(method: Algorithm[Any, Any], stack: int) -> None:
    alone, pooled = (tiny.engine(method, stack=stack, training=tiny.SHORT) for _ in range(2))
    pool = with_thread(pooled, tiny.engine(method, training=tiny.SHORT))
    try:
        assert tiny.played(pooled) == tiny.played(alone)
    finally:
        pool.close()
    assert tiny.equal(alone.server.model, pooled.server.model)
    assert encode(alone.server.state) == encode(pooled.server.state)
    assert {c: encode(s) for c, s in alone.states.items()} == {c: encode(s) for c, s in pooled.states.items()}
    assert pool.workers[0].knows, "the worker has worked"


def test_two_processes_give_the_same_bits(pools: Any) -> None:
    methods = (FedAvg(), SFedKD(), MOON())
    hired = pools(*(tiny.engine(method, cohort=5) for method in methods), cohort=5)
    for method, pool in zip(methods, hired, strict=True):
        alone, pooled = tiny.engine(method, cohort=5), pool.engine
        assert tiny.played(pooled) == tiny.played(alone), method
        assert tiny.equal(alone.server.model, pooled.server.model), method
        assert all(worker.knows for worker in pool.workers), "both have worked"
        if pool is not hired[-1]:
            pool.close()
    for worker in pool.workers:
        worker.connection.close()  # as when this process is killed: nobody says goodbye
    for worker in pool.workers:
        worker.process.join(60)
        assert worker.process.exitcode == 0


def test_lost_clients_and_undone_rounds_are_the_same() -> None:
    def lose(number: int, client: str, step: str) -> str | None:
        return "gone" if number == 2 or (number, client) == (3, "4") else None

    changes = {"fault_injector": lose, "min_clients": 2, "cohort": 5}
    alone, pooled = tiny.engine(SFedKD(), **changes), tiny.engine(SFedKD(), **changes)
    pool = with_thread(pooled, tiny.engine(SFedKD(), **changes))
    records = tiny.played(pooled)
    pool.close()
    assert records == tiny.played(alone)
    assert [record["undone"] for record in records] == [False, True, False, False]
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
    engine, undisturbed = tiny.engine(FedAvg(), cohort=6), tiny.played(tiny.engine(FedAvg(), cohort=6))
    with_thread(engine, tiny.engine(FedAvg(), cohort=6))
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
    engine = tiny.engine(SFedKD(), cohort=5)
    with_thread(engine, tiny.engine(SFedKD(), cohort=5))
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
    engine = tiny.engine(SFedKD(), cohort=6, rounds=2)
    pool = with_thread(engine, tiny.engine(SFedKD(), cohort=6))
    under_way: list[int] = []
    look_ahead = RoundState._look_ahead

    def watch(flight: RoundState) -> None:
        look_ahead(flight)
        under_way.append(len(flight.under_way))

    monkeypatch.setattr(RoundState, "_look_ahead", watch)
    tiny.played(engine)
    pool.close()
    assert pool.ahead == 2
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


def test_a_death_is_told_and_nothing_waits(pools: Any) -> None:
    engine = tiny.engine(FedSeq(), cohort=5)
    (pool,) = pools(engine, workers=1, cohort=5)
    tiny.played(engine, 1)
    process = pool.workers[0].process
    os.kill(process.pid, 9)
    with pytest.raises(RunError, match=r"a worker process died with code -9.*step 'train'"):
        engine.run_round()
    assert engine.finished == 1


def test_a_model_travels_to_a_worker_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine(FedAvg(), cohort=6, rounds=2)
    pool = with_thread(engine, tiny.engine(FedAvg(), cohort=6))
    models: list[int] = []
    send = line.send

    def watch(connection: Any, structure: Any, tensors: dict[str, Any]) -> None:
        if structure[0] != "done":  # of a request, not of an answer
            models.append(len(tensors))
        send(connection, structure, tensors)

    monkeypatch.setattr(line, "send", watch)
    tiny.played(engine)
    pool.close()
    whole = len(engine.server.model)
    assert models == [whole, 0, 0, 0, 0, 0] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("place", ["_written", "_heard"])
def test_an_exception_while_talking_to_a_worker_never_waits(
    error: BaseException, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = tiny.played(tiny.engine(FedAvg(), cohort=5))
    engine = tiny.engine(FedAvg(), cohort=5)
    with_thread(engine, tiny.engine(FedAvg(), cohort=5))
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
    pool = with_thread(engine, tiny.engine(Asks(), rounds=1))
    tiny.played(engine)
    pool.close()
    assert told == [[11.0] * 3]
