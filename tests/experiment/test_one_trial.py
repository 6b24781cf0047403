"""Trials of one run that are run one by one, as by the tasks of a Slurm array."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny

import fedkeep
from fedkeep.cli import main
from fedkeep.errors import RunError
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.run import join_run


def test_trials_one_by_one_are_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    recipe, out = tiny.write_recipe(tmp_path), tmp_path / "array"
    command = ["run", recipe, "--methods", "fedavg,fedseq", "--rounds", "1", "--quiet", "--out", str(out)]
    alone = fedkeep.run(recipe, methods=["fedavg", "fedseq"], rounds=1, out=tmp_path / "alone")
    assert main([*command, "--trial", "2"]) == 0
    assert not (out / "report.html").exists()
    assert main([*command, "--trial", "1", "--threads", "2"]) == 0
    assert f"{out} was begun with --device cpu --threads 1 --stack 0, which this trial keeps" in caplog.text
    assert main([*command, "--trial", "1", "--data-dir", str(tmp_path)]) == 0, "it is finished already"
    said = " ".join(capsys.readouterr().out.split())
    assert "trial 1 of 2, fedavg-seed0, is finished" in said
    assert said.endswith(f"fedkeep resume {out} --data-dir {tmp_path}")
    assert main(["resume", str(out), "--quiet"]) == 0
    assert (out / "report.html").is_file()
    for path in alone.path.glob("trials/*/rounds.jsonl"):
        assert (out / path.relative_to(alone.path)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["--trial", "3", "--out", "run"], "this run has 2"),
        (["--trial", "1"], "--out DIR"),
        (["--trial", "1", "--out", "begun", "--rounds", "2"], "was begun with another recipe"),
        (["--trial", "1", "--out", "other"], "exists and is not empty"),
    ],
)
def test_what_is_no_trial_of_the_run(
    changes: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tiny.write_recipe(tmp_path)
    join_run(Experiment(fedkeep.load_recipe(recipe, methods=["fedavg", "fedseq"], rounds=1)), "begun")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    assert main(["run", recipe, "--methods", "fedavg,fedseq", "--rounds", "1", "--quiet", *changes]) == 1
    assert expected in capsys.readouterr().err


def test_many_processes_begin_one_run(tmp_path: Path) -> None:
    recipe = fedkeep.load_recipe(tiny.write_recipe(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        begun = list(pool.map(lambda _: join_run(Experiment(recipe), tmp_path / "run"), range(8)))
    assert set(begun) == {tmp_path / "run"}
    with pytest.raises(RunError, match="another recipe"):
        join_run(Experiment(fedkeep.load_recipe(tiny.write_recipe(tmp_path), seeds=[1])), tmp_path / "run")
