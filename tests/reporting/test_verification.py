"""Damage of a run folder: it is named, repaired from what is whole, or refused, and never taken as true."""

from __future__ import annotations

import random
import shutil
import zipfile
from pathlib import Path

import pytest
import tiny
from damage import DAMAGES, apply_damage, files_of

import fedkeep
from fedkeep.cli.main import main
from fedkeep.errors import FedKeepError, RunError
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.reporting.run_folder import read_run, write_archive

RESULTS = ("rounds.jsonl", "model.safetensors", "partition.json")
TRIAL = Path("trials") / "scaffold-seed0"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, ``whole``, and one that was stopped after the second of three rounds, ``cut``."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = load_recipe(tiny.write_recipe(folder), methods=["scaffold"], rounds=3)

    def stop(progress: object) -> None:
        if getattr(progress, "done", 0) == 2:
            raise KeyboardInterrupt

    fedkeep.run(recipe, out=folder / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(recipe, out=folder / "cut", on_progress=stop)
    return folder


def results(run: Path) -> dict[str, bytes]:
    return {name: (run / TRIAL / name).read_bytes() for name in RESULTS}


@pytest.mark.parametrize("state", ["whole", "cut"])
def test_a_damaged_file_never_ends_in_another_result(state: str, runs: Path, tmp_path: Path) -> None:
    """One damage of each kind to every file; tools/crash.py tries all of them."""
    outcomes = []
    kinds = {file.name.split("-")[0]: file for file in files_of(runs / state)}  # of several clients and rounds, one
    for number, file in enumerate(kinds.values()):
        damage = DAMAGES[number % len(DAMAGES)]
        run = tmp_path / f"{number}"
        shutil.copytree(runs / state, run)
        apply_damage(run / file, damage, random.Random(number))
        refusal = ""
        try:
            fedkeep.resume(run)
        except FedKeepError as error:
            refusal = str(error)
        assert refusal or results(run) == results(runs / "whole"), f"{file} {damage}"
        assert not refusal or file.name in refusal, f"{file} {damage}: the error should name the file"
        outcomes.append(bool(refusal))
    assert set(outcomes) == {False, True}, "some damage is repaired, and some refused"


@pytest.mark.parametrize(
    "name", ["rounds.jsonl", "timings.jsonl", "trial.json", "partition.json", "result.json", "model.safetensors"]
)
def test_no_report_is_made_of_damaged_files(name: str, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "whole", tmp_path / "run")
    file = tmp_path / "run" / TRIAL / name
    file.write_bytes(b" " + file.read_bytes()[1:])
    with pytest.raises(RunError, match=rf"{name} is damaged: expected .* found .*fedkeep resume"):
        read_run(tmp_path / "run")
    for command in ("report", "compare", "archive", "export"):
        assert main([command, str(tmp_path / "run")]) == 1
    if name == "model.safetensors":
        file.unlink()  # a report needs no model
        assert len(read_run(tmp_path / "run").trials)


def test_a_missing_description_does_not_hide_a_trial(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "whole", tmp_path / "run")
    (tmp_path / "run" / TRIAL / "trial.json").unlink()
    with pytest.raises(RunError, match=r"trial\.json is missing"):
        read_run(tmp_path / "run")


def test_a_lost_model_is_exported_again(runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(runs / "whole", tmp_path / "run")
    (tmp_path / "run" / TRIAL / "model.safetensors").unlink()
    fedkeep.resume(tmp_path / "run")
    assert results(tmp_path / "run") == results(runs / "whole")
    assert "model.safetensors is missing" in caplog.text


def test_verify_tells_each_trial(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(runs / "whole"), str(runs / "cut")]) == 0
    told = capsys.readouterr().out
    assert "scaffold-seed0: finished: all files of its manifest" in told
    assert "scaffold-seed0: unfinished: checkpoints of rounds 1, 2" in told
    shutil.copytree(runs / "whole", tmp_path / "run")
    model = tmp_path / "run" / TRIAL / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    assert main(["verify", str(tmp_path / "run")]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "scaffold-seed0: damaged:" in told
    assert "model.safetensors is damaged: expected" in told
    shutil.rmtree(tmp_path / "run" / TRIAL)
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert "scaffold-seed0: unfinished: there is nothing of it" in capsys.readouterr().out


def test_archives_are_verified(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_archive({"": runs / "whole"}, tmp_path / "run.zip")
    assert main(["verify", str(path)]) == 0
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = str(TRIAL / "rounds.jsonl")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:  # its CRCs are right, its digests are not
        for file, content in files.items():
            archive.writestr(file, content.replace(b"1", b"2", 1) if file == name else content)
    assert main(["verify", str(tmp_path / "other.zip")]) == 1
    assert "rounds.jsonl is damaged" in capsys.readouterr().out
    kept = Path(__file__).parents[2] / "results" / "choices.zip" / "choice-feddcl"
    assert main(["verify", str(kept)]) == 0
