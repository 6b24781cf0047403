"""The path of a run: few calls from `fedkeep.run` to a loss, data prepared once per seed, callbacks in order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
from torch import Tensor

import fedkeep
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.experiment import build
from fedkeep.experiment.runtime import Machine
from fedkeep.losses import Batch, CrossEntropy, ModelView

CALLS = 13
"""At most, `fedkeep.run` and the loss's own included."""


def calls_on_the_stack() -> list[str]:
    """Return the package's calls that are under way, the first at the front."""
    package = str(Path(fedkeep.__file__).parent)
    frame, found = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(package):
            found.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}")
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


def test_few_calls_lead_from_a_run_to_the_loss_of_a_local_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    compute = CrossEntropy.__call__

    def watched(self: CrossEntropy, student: ModelView, batches: Sequence[Batch]) -> Tensor:
        seen.append(calls_on_the_stack())
        return compute(self, student, batches)

    monkeypatch.setattr(CrossEntropy, "__call__", watched)
    recipe = fedkeep.load_recipe(tiny.write_recipe(tmp_path), rounds=1)
    fedkeep.run(recipe, methods=[FedAvg()], out=tmp_path / "run")
    path = seen[0]
    assert path[0] == "api.run"
    assert path[-1].endswith("SGDStepper.step"), "the loss is called from a step"
    assert len(path) + 1 <= CALLS, " > ".join(path)
    assert all(other == path for other in seen)


def test_data_are_prepared_once_for_each_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    build_federation = build.build_federation

    def counted(recipe: Any, seed: int, data_dir: Any) -> Any:
        prepared.append(seed)
        return build_federation(recipe, seed, data_dir)

    monkeypatch.setattr(build, "build_federation", counted)
    recipe = fedkeep.load_recipe(tiny.write_recipe(tmp_path), seeds=[0, 1, 2], rounds=1)
    assert len(recipe.methods) == 3
    fedkeep.run(recipe, out=tmp_path / "run")
    assert sorted(prepared) == [0, 1, 2]


@dataclass
class Diary(fedkeep.Callback):
    entries: list[Any]

    def on_trial_begin(self, state: Any) -> None:
        self.entries.append(("begin", state.algorithm.name(), state.settings.seed, state.finished))

    def on_round_end(self, state: Any, result: Any) -> None:
        self.entries.append((result.record["round"], sum(result.record["correct"])))
        if len(self.entries) == 3 and not self.has_stopped:
            self.has_stopped = True
            raise KeyboardInterrupt

    def on_trial_end(self, state: Any) -> None:
        self.entries.append(("end", state.finished))

    has_stopped = False


@pytest.mark.parametrize("workers", [1, 2])
def test_callbacks_are_called_in_this_process_and_lose_no_round(workers: int, tmp_path: Path) -> None:
    recipe = fedkeep.load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg", "fedseq"], rounds=3)
    machine, diary = Machine(workers=workers), Diary([])
    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(recipe, out=tmp_path / "run", machine=machine, callbacks=[diary])
    run = fedkeep.resume(tmp_path / "run", machine=machine, callbacks=[diary])
    recorded = [(trial.path / "rounds.jsonl").read_text().count("\n") for trial in run.trials]
    began = [entry for entry in diary.entries if entry[0] == "begin"]
    assert began == [("begin", "fedavg", 0, 0), ("begin", "fedavg", 0, 2), ("begin", "fedseq", 0, 0)]
    assert [entry for entry in diary.entries if entry[0] == "end"] == [("end", 2), ("end", 3), ("end", 3)]
    assert [entry[0] for entry in diary.entries if isinstance(entry[0], int)] == [1, 2, 3, 1, 2, 3]
    assert recorded == [3, 3]
