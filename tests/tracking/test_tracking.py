"""Metrics that a run logs, read back with the package that each is for, offline."""

from __future__ import annotations

import shutil
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny

import fedkeep
from fedkeep._utils.digests import write_json
from fedkeep.cli import main
from fedkeep.errors import ConfigError, MissingExtra
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.reporting.run_folder import Run, read_run
from fedkeep.reporting.summary import summary
from fedkeep.tracking import WRITERS, LoggedTrial


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return load_recipe(tiny.write_recipe(tmp_path_factory.mktemp("recipe")), methods=["fedavg"], rounds=3)


def expected(run: Run) -> dict[str, list[float]]:
    (trial,) = run.trials
    return {"accuracy": list(trial.accuracies), "forgetting": [0.0, *trial.forgetting_history[1:]]}


def check(found: dict[str, list[float]], run: Run, tolerance: float = 1e-9) -> None:
    for name, values in expected(run).items():
        assert found[name] == pytest.approx(values, abs=tolerance), name


class Memory:
    """A writer that keeps what it is given, by trial and round."""

    kept: ClassVar[dict[str, dict[int, Mapping[str, float]]]] = {}

    def __init__(self, trial: LoggedTrial, finished: int) -> None:
        self.rounds = self.kept.setdefault(trial.name, {})

    def write(self, round: int, values: Mapping[str, float]) -> None:
        self.rounds[round] = values

    def close(self) -> None:
        pass


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, Mapping[str, float]]]:
    monkeypatch.setitem(WRITERS, "tensorboard", Memory)
    Memory.kept.clear()
    return Memory.kept


def test_what_is_logged_is_whole_after_a_stop_and_a_resume(recipe: Recipe, tmp_path: Path, memory: Any) -> None:
    def write(self: Memory, round: int, values: Mapping[str, float]) -> None:
        self.rounds[round] = values
        if round == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "write", write)
        with pytest.raises(KeyboardInterrupt):
            fedkeep.run(recipe, out=tmp_path / "run", log="tensorboard")
    run = fedkeep.resume(tmp_path / "run")  # which logs as the run did
    found = memory["fedavg-seed0"]
    assert list(found) == [1, 2, 3]
    check({name: [values[name] for values in found.values()] for name in ("accuracy", "forgetting")}, run)
    assert [values["bytes_up"] for values in found.values()] == [row["up"] for row in run.trials[0].rounds]


def test_a_recipe_and_the_command_line_may_ask_for_it(recipe: Recipe, tmp_path: Path, memory: Any) -> None:
    text = 'log = ["tensorboard"]\n' + tiny.RECIPE
    assert load_recipe(tiny.write_recipe(tmp_path, text)).log == ("tensorboard",)
    path = tiny.write_recipe(tmp_path)
    arguments = ["--methods", "fedavg,fedseq", "--rounds", "1", "--workers", "1", "--quiet", "--log", "tensorboard"]
    assert main(["run", path, *arguments, "--out", str(tmp_path / "run")]) == 0
    assert sorted(memory) == ["fedavg-seed0", "fedseq-seed0"]


def test_logging_changes_no_result_and_parts_no_rows(recipe: Recipe, tmp_path: Path, memory: Any) -> None:
    plain = fedkeep.run(recipe, out=tmp_path / "plain")
    logged = fedkeep.run(recipe, out=tmp_path / "logged", log=["tensorboard"])
    assert plain.trials[0].rounds == logged.trials[0].rounds
    assert len(memory) == 1
    assert [row.label for row in summary([plain, read_run(logged.path)])] == ["FedAvg"]


def test_tensorboard_reads_it(recipe: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tracking is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = fedkeep.run(recipe, out=tmp_path / "run", log="tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "logs" / "tensorboard" / "fedavg-seed0")).Reload()
    found = {name: [event.value for event in events.Scalars(name)] for name in ("accuracy", "forgetting")}
    check(found, run, 1e-6)
    assert [event.step for event in events.Scalars("accuracy")] == [1, 2, 3]
    shutil.rmtree(tmp_path / "run" / "trials" / "fedavg-seed0")  # as a damaged one is to be, and then it is run again
    fedkeep.resume(tmp_path / "run")
    assert [event.step for event in events.Reload().Scalars("accuracy")] == [1, 2, 3]


def test_a_trial_keeps_its_name_at_weights_and_biases_and_another_run_has_another(tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        return LoggedTrial(folder, folder / "trials" / "a", "", "", 0, {}, ()).digest

    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "run.json", {"id": "1"})
    first = digest(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert digest(tmp_path / "moved") == first
    write_json(tmp_path / "moved" / "run.json", {"id": "2"})
    assert digest(tmp_path / "moved") != first


def test_a_mode_that_cannot_be_is_told(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra tracking is not installed")
    monkeypatch.setenv("WANDB_MODE", "foo")
    with pytest.raises(ConfigError, match="log = 'wandb' cannot begin: "):
        fedkeep.run(recipe, out=tmp_path / "run", log="wandb")


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a log as LevelDB writes it: blocks of 32 kB, whose first here lacks 7 bytes."""
    location, parts = 0, b""
    while location + 7 <= len(log):
        left = 32768 - (location + 7) % 32768
        if left < 7:
            location += left
            continue
        size, kind = struct.unpack_from("<HB", log, location + 4)
        parts += log[location + 7 : location + 7 + size]
        location += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.slow
def test_weights_and_biases_reads_it(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra tracking is not installed")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = fedkeep.run(recipe, out=tmp_path / "run", log="wandb")
    (file,) = (tmp_path / "run" / "logs" / "wandb").glob("offline-run-*/run-*.wandb")  # offline unless asked
    found: dict[str, list[float]] = {"accuracy": [], "forgetting": []}
    for data in leveldb_records(file.read_bytes()[7:]):  # after the header of wandb
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item if record.WhichOneof("record_type") == "history" else ():
            name = item.key or item.nested_key[0]
            if name in found:
                found[name].append(float(item.value_json))
    check(found, run)


def test_what_cannot_be_logged_is_refused_before_training(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        replace(recipe, log="tensorbord")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtra, match="tensorboard"):
        fedkeep.run(recipe, out=tmp_path / "run", log="tensorboard")
    assert not (tmp_path / "run").exists()


def test_a_writer_that_fails_is_closed_and_the_trial_goes_on(
    recipe: Recipe, tmp_path: Path, memory: Any, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    closed = []

    def fail(self: Memory, round: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("down")

    monkeypatch.setattr(Memory, "write", fail)
    monkeypatch.setattr(Memory, "close", lambda self: closed.append(self))
    run = fedkeep.run(recipe, out=tmp_path / "run", log="tensorboard")
    assert len(closed) == 1
    assert all(trial.finished for trial in run.trials)
    assert caplog.text.count("goes on without it: ConnectionError: down") == 1


def test_a_log_that_cannot_begin_is_named_and_a_resume_goes_on_without(
    recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fedkeep.run(recipe, out=tmp_path / "run", log="tensorboard")
    for trial in (tmp_path / "run" / "trials").iterdir():
        (trial / "result.json").unlink()
    shutil.rmtree(tmp_path / "run" / "logs")
    (tmp_path / "run" / "logs").write_text("no folder")
    assert all(trial.finished for trial in fedkeep.resume(tmp_path / "run").trials)
    assert "log = 'tensorboard' cannot be written, and goes on without it" in caplog.text
    shutil.rmtree(tmp_path / "run" / "trials")
    with pytest.raises(ConfigError, match="log = 'tensorboard' cannot begin: "):
        fedkeep.resume(tmp_path / "run")


def test_a_round_is_written_whose_report_was_interrupted(recipe: Recipe, tmp_path: Path, memory: Any) -> None:
    def interrupt(progress: Any) -> None:
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(recipe, out=tmp_path / "run", log="tensorboard", on_progress=interrupt)
    run = fedkeep.resume(tmp_path / "run")
    found = memory["fedavg-seed0"]
    assert list(found) == [1, 2, 3]
    assert "train_seconds" in found[2]
    check({name: [values[name] for values in found.values()] for name in ("accuracy", "forgetting")}, run)
