"""What a trial keeps when it is ended early, when a disk is full, or when its folder vanishes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from torch import Tensor, nn

import fedkeep
from fedkeep._utils.digests import read_all
from fedkeep.errors import RunError
from fedkeep.interface.privacy import Privacy
from fedkeep.reporting.run_folder import read_run
from fedkeep.trials import trial as module
from fedkeep.trials.callbacks import Callback, OnRoundEnd
from fedkeep.trials.trial import JsonlWriter, run_trial


class Stop(Callback):
    """Ends a trial with its second round."""

    def on_round_end(self, state: Any, result: Any) -> Any:
        return state.finished >= 2, {"seen": 1.0}


class Killed(BaseException):
    pass


def simulation(**changes: Any) -> Any:
    return tiny.simulation(fedkeep.get_algorithm("fedavg")(), rounds=4, **changes)


def test_a_trial_that_was_ended_stays_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_trial(simulation(), tmp_path / "whole", own=[Stop()])
    export = module._export

    def kill(*arguments: Any) -> None:
        raise Killed

    monkeypatch.setattr(module, "_export", kill)
    with pytest.raises(Killed):
        run_trial(simulation(), tmp_path / "killed", own=[Stop()])
    monkeypatch.setattr(module, "_export", export)
    run_trial(simulation(), tmp_path / "killed", own=[])
    for name in ("rounds.jsonl", "model.safetensors", "result.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert json.loads((tmp_path / "whole" / "result.json").read_text()) == {"rounds": 2}


def test_a_damaged_model_of_a_trial_that_was_ended_is_written_again(tmp_path: Path) -> None:
    run = fedkeep.run(
        tiny.write_recipe(tmp_path), methods=["fedavg"], rounds=4, out=tmp_path / "run", callbacks=[Stop()]
    )
    for name in ("model.safetensors", "confusion.json"):
        file = tmp_path / "run" / "trials" / "fedavg-seed0" / name
        whole = file.read_bytes()
        for content in (whole[:-3], b""):
            file.write_bytes(content) if content else file.unlink()
            again = fedkeep.resume(run.path)
            assert file.read_bytes() == whole, name
            assert [trial.rounds_done for trial in again.trials] == [2]


def test_tied_frozen_weights_are_exported(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
            self.second.weight = self.first.weight.requires_grad_(False)

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.out(self.second(self.first(images.flatten(1)).relu()))
            return logits

    run = fedkeep.run("demo", model=Tied(), methods=["fedavg"], rounds=1, seeds=1, out=tmp_path / "run")
    assert run["fedavg"].model() is not None


@pytest.mark.parametrize("file", ["privacy.jsonl", "rounds.jsonl"])
def test_a_round_that_a_full_disk_kept_from_the_records_is_in_them_once(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is made before the trial ends, so that the round is written again."""
    write, full = JsonlWriter.write, [1]

    def once(self: JsonlWriter, line: dict[str, Any]) -> None:
        if self.path.name == file and line.get("round") == 2 and full:
            full.clear()
            self.file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")  # and not hashed
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, line)

    privacy = Privacy(noise_multiplier=1.0)
    monkeypatch.setattr(JsonlWriter, "write", once)
    with pytest.raises(OSError, match="No space left"):
        run_trial(simulation(privacy=privacy), tmp_path / "trial")
    run_trial(simulation(privacy=privacy), tmp_path / "trial")
    for name in ("privacy.jsonl", "rounds.jsonl"):
        lines = [json.loads(line)["round"] for line in (tmp_path / "trial" / name).read_text().splitlines()]
        assert lines == [1, 2, 3, 4], name
    listed = module.read_json(tmp_path / "trial" / "manifest.json")["files"]["privacy.jsonl"]
    assert len(read_all(tmp_path / "trial" / "privacy.jsonl")) == listed["bytes"]


def test_a_folder_that_is_removed_ends_its_trial(tmp_path: Path) -> None:
    seen: list[int] = []

    def remove(state: Any, result: Any) -> None:
        seen.append(state.finished)
        if state.finished == 2:
            shutil.rmtree(tmp_path / "trial")

    with pytest.raises(RunError, match=r"rounds.jsonl was removed while its trial was run"):
        run_trial(simulation(), tmp_path / "trial", [OnRoundEnd(remove)])
    assert seen == [1, 2]


def test_a_program_may_go_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny.write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    go = OnRoundEnd(lambda state, result: os.chdir(tmp_path / "elsewhere"))
    run = fedkeep.run(recipe, methods=["fedavg"], out="run", callbacks=[go])
    assert [*(tmp_path / "elsewhere").iterdir()] == []
    assert run["fedavg"].model() is not None
    assert all(trial.finished for trial in read_run(tmp_path / "run").trials)


class Broken(Callback):
    """Raises in the round in which another callback ends the trial."""

    def on_round_end(self, state: Any, result: Any) -> Any:
        if state.finished == 2:
            raise ValueError("no")


def test_the_last_round_of_a_trial_is_evaluated_whatever_came_between(tmp_path: Path) -> None:
    def run(*callbacks: Callback) -> Any:
        run_trial(simulation(evaluate_every=3), tmp_path / "trial", own=callbacks)

    with pytest.raises(RunError, match="the callback Broken raised ValueError"):
        run(Stop(), Broken())
    run(Stop())
    last = json.loads((tmp_path / "trial" / "rounds.jsonl").read_text().splitlines()[-1])
    assert "correct" in last
