"""Worker processes that share one trial's cohorts: when they are started, and that nothing else changes."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

import fedkeep
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.errors import ConfigError, RunError
from fedkeep.executors.process_executor import ProcessExecutor, step_handlers
from fedkeep.executors.workers import Worker, WorkerDied, serve
from fedkeep.experiment import trial_runner
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.plugins import import_user_code, instances_of
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import prepare_run
from fedkeep.experiment.runtime import Machine
from fedkeep.experiment.trial_runner import CohortWorkers, run_trials, useful_workers
from fedkeep.rounds.reply_step import ReplyStep
from fedkeep.rounds.state import RoundResult, SimulationState
from fedkeep.trials.trial import run_trial


def test_who_can_use_how_many() -> None:
    assert useful_workers(FedAvg(), cohort=10, spare=16) == 10
    assert useful_workers(FedAvg(), cohort=10, spare=2) == 2
    assert useful_workers(SFedKD(), cohort=10, spare=16) == 2
    assert useful_workers(FedSeq(), cohort=10, spare=16) == 0


def threads(count: int, begin: Callable[..., Any] = lambda *given: (None, {})) -> list[Worker]:
    """Start workers that are threads: the whole protocol, without the seconds that processes take."""
    workers = []
    for _ in range(count):
        near, far = multiprocessing.Pipe()
        handlers = {**step_handlers(tiny.simulation(SFedKD())), "begin": begin}
        threading.Thread(target=serve, args=(far, handlers), daemon=True).start()
        workers.append(Worker(near))
    return workers


def start_threads(count: int, main: Callable[..., None], *args: Any) -> list[Worker]:
    """Start threads in place of processes."""
    pipes = [multiprocessing.Pipe() for _ in range(count)]
    for _, far in pipes:
        threading.Thread(target=main, args=(far, *args), daemon=True).start()
    return [Worker(near) for near, _ in pipes]


class Patient(CohortWorkers):
    """Waits after a round until the workers are ready."""

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        super().on_round_end(state, result)
        for worker in self.starting:
            assert worker.connection.poll(60)
        if self.starting:
            super().on_round_end(state, result)
            self.used_from = state.finished


def test_workers_take_over_after_the_first_round_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_runner, "MIN_SECONDS_LEFT", 0.0)
    run_trial(tiny.simulation(SFedKD()), tmp_path / "alone")
    simulation = tiny.simulation(SFedKD())
    workers = Patient(2, lambda: threads(2), ("begin", "now"))
    run_trial(simulation, tmp_path / "shared", [workers])
    assert workers.used_from == 1
    assert isinstance(simulation.executor, ProcessExecutor)
    assert all(worker.heard for worker in workers.workers), "both have worked"
    assert all(worker.connection.closed for worker in workers.workers)
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "shared" / name).read_bytes()


@pytest.mark.parametrize(("count", "seconds"), [(1, 0.0), (2, 1e9)])
def test_no_worker_is_started_where_it_does_not_pay_off(
    count: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_runner, "MIN_SECONDS_LEFT", seconds)
    workers = CohortWorkers(count, lambda: pytest.fail("started"), ("begin", "now"))
    run_trial(tiny.simulation(SFedKD()), tmp_path / "trial", [workers])
    assert not workers.workers


def test_a_worker_that_cannot_start_is_told_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_runner, "MIN_SECONDS_LEFT", 0.0)

    def fail(*given: Any) -> Any:
        raise ConfigError("there is no such data set")

    run_trial(tiny.simulation(SFedKD()), tmp_path / "alone")
    simulation = tiny.simulation(SFedKD())
    run_trial(simulation, tmp_path / "shared", [Patient(2, lambda: threads(2, fail), ("begin", "now"))])
    assert simulation.executor is simulation.serial
    assert "there is no such data set" in caplog.text
    assert (tmp_path / "alone" / "rounds.jsonl").read_bytes() == (tmp_path / "shared" / "rounds.jsonl").read_bytes()


def test_workers_of_which_none_can_be_started_are_told_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_runner, "MIN_SECONDS_LEFT", 0.0)

    def full() -> list[Worker]:
        raise WorkerDied("worker process 2 of 2 could not be started: too many")

    simulation = tiny.simulation(SFedKD())
    run_trial(simulation, tmp_path / "trial", [CohortWorkers(2, full, ("begin", "now"))])
    assert simulation.executor is simulation.serial
    assert simulation.finished == simulation.rounds
    assert caplog.text.count("could not be started: too many") == 1


FAILS = """
import fedkeep

class Fails(fedkeep.Callback):
    def on_round_end(self, state, result):
        if state.algorithm.name() == "fedavg":
            raise KeyError("gone")
"""


def test_a_callback_that_fails_in_a_worker_ends_its_trial_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_runner, "run_worker", serve)  # a thread has no signals
    monkeypatch.setattr(trial_runner, "start_workers", start_threads)
    use = (str(tmp_path / "fails.py"),)
    Path(*use).write_text(FAILS)
    import_user_code(use)
    given = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg", "fedseq", "fedprox"], rounds=2)
    experiment = Experiment(given, Machine(workers=2, stack=1, use=use))
    trials = experiment.trials(prepare_run(experiment, tmp_path / "run"))
    with pytest.raises(RunError) as raised:
        run_trials(trials, retry="again")
    assert str(raised.value) == (
        "the callback Fails raised KeyError: 'gone'. It ended FedAvg with seed 0. Finished rounds are saved. Continue "
        "with: again"
    )
    assert [trial.is_finished for trial in trials] == [False, True, True]


STEP = """
from dataclasses import dataclass
from fedkeep import ReplyStep
from fedkeep.rounds.messages import Fault

@dataclass(frozen=True)
class Size:
    examples: int

class NotesSizes(ReplyStep):
    note_type = Size

    def allows_partial_aggregation(self, state):
        return True

    def begin_round(self, state, number):
        self.sizes = {}

    def check(self, state, reply):
        if reply.client == "1":
            raise Fault("is client 1")
        reply.notes[self.name] = Size(reply.value.num_examples)

    def accepted(self, round, reply):
        self.sizes[reply.client] = reply.notes[self.name].examples

    def record(self, round):
        return {"sizes": self.sizes}
"""


@pytest.mark.parametrize("used", [True, False], ids=["--use", "objects"])
def test_a_step_of_the_users_checks_in_workers_as_in_one_process(
    used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_runner, "MIN_SECONDS_LEFT", 0.0)
    monkeypatch.setattr(trial_runner, "CohortWorkers", Patient)
    monkeypatch.setattr(trial_runner, "run_worker", serve)  # a thread has no signals
    monkeypatch.setattr(trial_runner, "start_workers", start_threads)
    added_up: list[bool] = []
    aggregate_groups = ProcessExecutor.aggregate_groups

    def watched(self: ProcessExecutor, *given: Any) -> Any:
        added_up.append(True)
        return aggregate_groups(self, *given)

    monkeypatch.setattr(ProcessExecutor, "aggregate_groups", watched)
    use = (str(tmp_path / "notes_sizes.py"),)
    Path(*use).write_text(STEP)
    import_user_code(use)
    recipe = tiny.write_recipe(tmp_path)
    given = load_recipe(recipe, methods=["fedavg"], rounds=3, settings=["run.cohort_size=8"])
    found = []
    for workers in (1, 2):
        experiment = Experiment(given, Machine(workers=workers, use=use))
        folder = prepare_run(experiment, tmp_path / str(workers))
        trials = experiment.trials(folder)
        run_trials(trials, retry="", steps=None if used else instances_of(ReplyStep, use))
        found.append((trials[0].folder / "rounds.jsonl").read_text())
    assert found[0] == found[1]
    for record in map(json.loads, found[0].splitlines()):
        assert record["lost"] == {"1": "is client 1"}
        assert len(record["sizes"]) == 7
    assert len(added_up) == (2 if used else 0), "a step that is here alone sees every reply"


# Processes for each: the same with threads is above, and that two processes train clients as one does is tested with
# the executor.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "sfedkd"])
def test_workers_change_nothing_but_the_time(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executors: list[ProcessExecutor] = []
    on_round_end = CohortWorkers.on_round_end

    def patient(self: CohortWorkers, state: Any, result: Any) -> None:
        on_round_end(self, state, result)
        for worker in self.starting:
            assert worker.connection.poll(60)
        if self.starting:
            on_round_end(self, state, result)
        if isinstance(state.executor, ProcessExecutor):
            executors.append(state.executor)

    monkeypatch.setattr(CohortWorkers, "on_round_end", patient)
    recipe = fedkeep.load_recipe(tiny.write_recipe(tmp_path), methods=[method], rounds=4)
    alone = fedkeep.run(recipe, out=tmp_path / "alone", machine=Machine(workers=2))
    assert not executors, "a run of seconds is not worth it"
    monkeypatch.setattr(trial_runner, "MIN_SECONDS_LEFT", 0.0)
    shared = fedkeep.run(recipe, out=tmp_path / "shared", machine=Machine(workers=2))
    assert len(executors) == 4
    assert all(worker.heard for worker in executors[0].workers), "both have worked"
    assert len(executors[0].workers) == 2
    assert not any(worker.process and worker.process.is_alive() for worker in executors[0].workers)
    for name in ("rounds.jsonl", "model.safetensors"):
        (one,), (two,) = (list((run.path / "trials").glob(f"*/{name}")) for run in (alone, shared))
        assert one.read_bytes() == two.read_bytes()
