"""Worker processes that share one cell's cohorts: when they are hired, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

import fedkeep
from fedkeep.algorithms.fedavg import FedAvg
from fedkeep.algorithms.fedseq import FedSeq
from fedkeep.algorithms.sfedkd import SFedKD
from fedkeep.engine.pool import Pool
from fedkeep.experiment import helpers
from fedkeep.experiment.machine import Machine

pytestmark = pytest.mark.usefixtures("undrawn")


def test_who_can_use_how_many() -> None:
    assert helpers.useful(FedAvg(), cohort=10, spare=16) == 10
    assert helpers.useful(FedAvg(), cohort=10, spare=2) == 2
    assert helpers.useful(SFedKD(), cohort=10, spare=16) == 2
    assert helpers.useful(FedSeq(), cohort=10, spare=16) == 0


# Four processes for each; that two processes train FedAvg's clients as one does is tests/engine/test_pool.py's too.
@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "sfedkd"])
def test_helpers_change_nothing_but_the_time(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Pool] = []

    class Watched(Pool):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    consider = helpers.Helpers.consider

    def patient(self: helpers.Helpers, finished: Any) -> None:
        consider(self, finished)
        for worker in self.starting:
            assert worker.connection.poll(60)
        if self.starting:
            consider(self, finished)

    monkeypatch.setattr(helpers, "Pool", Watched)
    monkeypatch.setattr(helpers.Helpers, "consider", patient)
    recipe = fedkeep.load_recipe(tiny.write_recipe(tmp_path), methods=[method], rounds=4)
    alone = fedkeep.run(recipe, out=tmp_path / "alone", machine=Machine(workers=2))
    assert not made, "a run of seconds is not worth it"
    monkeypatch.setattr(helpers, "PAYS", 0.0)
    shared = fedkeep.run(recipe, out=tmp_path / "shared", machine=Machine(workers=2))
    (pool,) = made
    assert all(worker.knows for worker in pool.workers), "both have worked"
    assert len(pool.workers) == 2
    assert not any(worker.process and worker.process.is_alive() for worker in pool.workers)
    for name in ("rounds.jsonl", "model.safetensors"):
        (one,), (two,) = (list((run.path / "trials").glob(f"*/{name}")) for run in (alone, shared))
        assert one.read_bytes() == two.read_bytes()
