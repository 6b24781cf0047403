"""Worker processes that share one trial's cohorts: when they are started, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

import fedkeep
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.experiment import cohort_workers
from fedkeep.experiment.cohort_workers import CohortWorkers, useful_workers
from fedkeep.experiment.runtime import Machine
from fedkeep.simulation.process_executor import ProcessExecutor


def test_who_can_use_how_many() -> None:
    assert useful_workers(FedAvg(), cohort=10, spare=16) == 10
    assert useful_workers(FedAvg(), cohort=10, spare=2) == 2
    assert useful_workers(SFedKD(), cohort=10, spare=16) == 2
    assert useful_workers(FedSeq(), cohort=10, spare=16) == 0


# Processes for each; that two processes train FedAvg's clients as one does is also tested with the executor.
@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "sfedkd"])
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
    monkeypatch.setattr(cohort_workers, "MIN_SECONDS_LEFT", 0.0)
    shared = fedkeep.run(recipe, out=tmp_path / "shared", machine=Machine(workers=2))
    assert len(executors) == 4
    assert all(worker.heard for worker in executors[0].workers), "both have worked"
    assert len(executors[0].workers) == 2
    assert not any(worker.process and worker.process.is_alive() for worker in executors[0].workers)
    for name in ("rounds.jsonl", "model.safetensors"):
        (one,), (two,) = (list((run.path / "trials").glob(f"*/{name}")) for run in (alone, shared))
        assert one.read_bytes() == two.read_bytes()
