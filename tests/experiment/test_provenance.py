"""Whole files of another run, method, seed or code are refused by name."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

import fedkeep
from fedkeep._utils.digests import Identity, read_json, read_manifest, write_json, write_manifest
from fedkeep.cli import main
from fedkeep.errors import FedKeepError, RunError
from fedkeep.experiment import provenance
from fedkeep.experiment.plugins import code_of, import_user_code
from fedkeep.experiment.provenance import UNKNOWN, check_code, keep_code
from fedkeep.reporting.run_folder import read_run, verify_run, write_archive

METHOD = """
from dataclasses import dataclass

import {name}_rates as rates
from fedkeep.algorithms.parallel.fedavg import FedAvg


@dataclass(frozen=True)
class {title}(FedAvg):
    title = "{name}"

    def round(self, server, cohort):
        super().round(server, cohort)
        server.log("rate", rates.RATE)
"""


def begin(folder: Path, *, rounds: int | None = None, methods: str = "fedavg", lr: float = 0.05, seed: int = 0) -> Path:
    """Run two rounds; or stop after so many, with a checkpoint."""

    def stop(step: object) -> None:
        if rounds is not None and step.done == rounds:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    settings, path = [f"training.lr={lr}"], tiny.write_recipe(folder.parent)
    recipe = fedkeep.load_recipe(path, methods=methods.split(","), rounds=2, settings=settings, seeds=[seed])
    try:
        fedkeep.run(recipe, out=folder, on_progress=stop)
    except KeyboardInterrupt:
        assert rounds is not None
    return folder


def put(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True) if target.is_dir() else target.unlink(missing_ok=True)
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished and half-done runs that differ in the learning rate, in the method, or in the seed."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "mine": begin(folder / "mine"),
        "half": begin(folder / "half", rounds=1),
        "other": begin(folder / "other", lr=0.1),
        "other half": begin(folder / "other-half", rounds=1, lr=0.1),
        "prox half": begin(folder / "prox-half", rounds=1, methods="fedprox"),
        "seed": begin(folder / "seed", seed=1),
        "momentum": begin(folder / "momentum", lr=0.025),
    }


TRIAL = "trials/fedavg-seed0"
CASES = {
    "a recipe in a half-done run": ("half", "other", "recipe.toml", "recipe.toml", "training.lr is 0.1, not 0.05"),
    "a recipe in a finished run": ("mine", "momentum", "recipe.toml", "recipe.toml", "training.lr is 0.025, not 0.05"),
    "a finished trial": ("half", "other", TRIAL, TRIAL, "training.lr is 0.1, not 0.05"),
    "a half-done trial": ("mine", "other half", TRIAL, TRIAL, "training.lr is 0.1, not 0.05"),
    "a checkpoint": ("half", "other half", f"{TRIAL}/checkpoint", f"{TRIAL}/checkpoint", "training.lr is 0.1"),
    "a checkpoint of a method": (
        "half",
        "prox half",
        "trials/fedprox-seed0",
        TRIAL,
        "its method is FedProx, not FedAvg",
    ),
    "a trial of a seed": ("half", "seed", "trials/fedavg-seed1", TRIAL, "its seed is 1, not 0"),
    "a description": (
        "half",
        "other half",
        f"{TRIAL}/trial.json",
        f"{TRIAL}/trial.json",
        "training.lr is 0.1, not 0.05",
    ),
    "a trial that the recipe does not name": (
        "mine",
        "seed",
        "trials/fedavg-seed1",
        "trials/fedavg-seed1",
        "does not name",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_whole_file_of_another_run_is_refused_by_name(
    case: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into, source, name, target, said = CASES[case]
    shutil.copytree(runs[into], tmp_path / "run")
    put(runs[source] / name, tmp_path / "run" / target)
    asked: list[Callable[[], object]] = [
        lambda: fedkeep.resume(tmp_path / "run"),
        lambda: read_run(tmp_path / "run"),
        lambda: write_archive({"": tmp_path / "run"}, tmp_path / "run.zip") and read_run(tmp_path / "run.zip"),
    ]
    for ask in asked[
        : 3 if "checkpoint" not in case and "half-done trial" not in case and "description" not in case else 2
    ]:
        with pytest.raises(RunError) as error:
            ask()
        assert said in str(error.value)
        assert target.split("/")[-1] in str(error.value)
        assert any(word in str(error.value) for word in ("Put back", "put back"))
    for words in (["resume", str(tmp_path / "run")], ["compare", str(tmp_path / "run"), str(runs["mine"])]):
        assert main(words) == 1
        assert said in " ".join(capsys.readouterr().err.split())
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert said in " ".join(capsys.readouterr().out.split())
    assert "foreign" in {found.status for found in verify_run(tmp_path / "run")}


def test_trials_of_two_machines_with_other_options_or_data_are_not_gathered(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = begin(tmp_path / "a" / "run", methods="fedavg,fedprox")
    second = begin(tmp_path / "b" / "run", methods="fedavg,fedprox", lr=0.1)
    put(second / "trials" / "fedprox-seed0", first / "trials" / "fedprox-seed0")
    with pytest.raises(FedKeepError, match=r"fedprox-seed0.* does not belong here: its training.lr is 0.1, not 0.05"):
        fedkeep.resume(first)
    same = begin(tmp_path / "same", methods="fedavg,fedprox")
    trial = same / "trials" / "fedprox-seed0"
    info = read_json(trial / "trial.json")
    info["dependencies"]["training data"] = "another"
    write_json(trial / "trial.json", info)
    (trial / "manifest.json").unlink()  # as if it were half-done, on a machine with another data set
    with pytest.raises(FedKeepError, match="do not belong together: they were run with another training data"):
        read_run(same)
    assert verify_run(same)[0].status == "foreign"


def test_a_manifest_of_an_older_round_under_the_newer_name_is_not_taken(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["half"], tmp_path / "run")
    folder = tmp_path / "run" / TRIAL / "checkpoint"
    shutil.copy(folder / "manifest-1.json", folder / "manifest-2.json")
    fedkeep.resume(tmp_path / "run")
    mine, found = (run / TRIAL / "rounds.jsonl" for run in (runs["mine"], tmp_path / "run"))
    assert found.read_bytes() == mine.read_bytes()


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_damaged(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["half"], run)
    (manifest,) = (run / TRIAL / "checkpoint").glob("manifest-*.json")

    def replaced(*given: Any) -> list[str]:
        manifest.rename(manifest.with_name("manifest-9.json"))
        return ["it is missing"]

    monkeypatch.setattr(provenance, "find_checkpoint_damage", replaced)
    assert {found.status for found in verify_run(run)} == {"finished", "unfinished"}


def test_runs_of_versions_that_did_not_say_it_are_read_and_continued(runs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("mine", "half"):
        run = tmp_path / name
        shutil.copytree(runs[name], run)
        for path in [run / "run.json", *run.glob("trials/*/trial.json")]:
            content = read_json(path)
            del content["identity"]
            write_json(path, content)
        for path in [*run.glob("trials/*/checkpoint/manifest-*.json")]:
            files, content = read_manifest(path)
            del content["identity"]
            write_manifest(path, files, **content)
        for path in run.glob("trials/*/manifest.json"):
            shutil.copy(runs[name] / TRIAL / "trial.json", path.with_name("trial.json"))  # whose digest it holds
            files, _ = read_manifest(path)
            write_manifest(path, files)
        (trial,) = verify_run(run)[1:]
        assert trial.status == ("finished" if name == "mine" else "unfinished")
        assert trial.details[-1] == UNKNOWN
        assert len(fedkeep.resume(run).trials) >= 1
    mine, found = (run / TRIAL / "rounds.jsonl" for run in (runs["mine"], tmp_path / "half"))
    assert found.read_bytes() == mine.read_bytes()


@pytest.mark.parametrize("edited", ["ownedone.py", "ownedtwo_rates.py"])
def test_code_that_was_edited_is_refused_and_its_copy_goes_on(
    edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A method of the user's own, and a module that it imports."""
    name, run, folder = edited[:8], tmp_path / "run", tmp_path / "own"
    folder.mkdir()
    (folder / f"{name}_rates.py").write_text("RATE = 0.5\n")
    file = folder / f"{name}.py"
    file.write_text(METHOD.format(name=name, title=name.capitalize()))
    monkeypatch.syspath_prepend(str(folder))
    words = ["--methods", name, "--rounds", "1", "--quiet", "--workers", "1", "--out", str(run)]
    assert main(["run", tiny.write_recipe(tmp_path), "--use", str(file), *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    copies = {path.name: path.read_bytes() for path in (run / "code").iterdir()}
    assert copies == {path.name: path.read_bytes() for path in folder.glob("*.py")}
    copy = run / "code" / file.name
    assert f"--use {copy}" in said, "what follows names the copy"
    assert f"run/code/{file.name}" in (run / "report.html").read_text()
    (folder / edited).write_text((folder / edited).read_text() + "# changed\n")
    for words in (["--use", str(file)], []):
        assert main(["resume", str(run), *words, "--quiet"]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert f"{edited} was changed since, or is not given" in said or not words
        assert f"--use {copy}" in said
    if edited == file.name:  # what it imports is as it was
        assert main(["resume", str(run), "--use", str(copy), "--quiet"]) == 0
    assert {found.status for found in verify_run(run)} == {"finished"}
    copy.write_text(copy.read_text() + "# changed\n")
    assert verify_run(run)[0].status == "damaged"
    assert "was edited since the run began" in verify_run(run)[0].details[0]


def test_of_a_module_the_copy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kept_package"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    run, names = tmp_path / "run", {"kept_module": tmp_path / "kept_module.py"}
    names["kept_package.inner"] = package / "inner.py"
    for name, file in names.items():
        file.write_text("RATE = 0.5\n")
        import_user_code([name])
        kept = keep_code(run, [name])
        write_json(run / "run.json", {"use": kept["use"], "identity": Identity(code=kept["code"]).to_table()})
        file.write_text("RATE = 1.0\n")
        with pytest.raises(RunError) as caught:
            check_code(run, [name])
        copies = run / "code"
        whole = (
            f"(--use {copies}/kept_module.py)"
            if name == "kept_module"
            else f"(--use {name}, with {copies} in PYTHONPATH)"
        )
        assert whole in str(caught.value)


def test_an_archive_holds_the_copies_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kept_alone.py"
    file.write_text(
        METHOD.format(name="keptalone", title="Keptalone")
        .replace("import keptalone_rates as rates\n", "")
        .replace("rates.RATE", "1.0")
    )
    words = ["--methods", "keptalone", "--rounds", "1", "--quiet", "--workers", "1", "--out", str(tmp_path / "run")]
    assert main(["run", tiny.write_recipe(tmp_path), "--use", str(file), *words]) == 0
    assert main(["archive", str(tmp_path / "run"), "--out", str(tmp_path / "archives")]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "archives" / "run.zip")]) == 0
    assert "copies of your own code" in " ".join(capsys.readouterr().out.split())
    info = read_run(tmp_path / "archives" / "run.zip").info
    assert (info["use"], list(info["identity"]["code"])) == (["code/kept_alone.py"], ["kept_alone.py"])


def test_code_is_what_was_named_and_what_it_imports_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "belonging_package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "deep" / "__init__.py").touch()
    (package / "deep" / "a.py").write_text("import json\nimport torch\nfrom . import b\nfrom ..c import C\n")
    (package / "deep" / "b.py").write_text("def f():\n    import belonging_package.d\n")
    for name in ("c", "d", "unused"):
        (package / f"{name}.py").write_text("C = 1\n")
    (tmp_path / "belonging_file.py").write_text("import belonging_package.deep.a\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_user_code([str(tmp_path / "belonging_file.py")])
    inside = ["__init__", "c", "deep/__init__", "deep/a", "deep/b"]
    assert sorted(code_of([str(tmp_path / "belonging_file.py")])) == [
        "belonging_file.py",
        *(f"belonging_package/{name}.py" for name in inside),
    ]
    import_user_code(["belonging_package.d"])
    assert "belonging_package/d.py" in code_of(["belonging_package.deep.a"]), "what a function imports, once it did"
    assert code_of(["json"]) == {"json/__init__.py": Path(str(sys.modules["json"].__file__)).resolve()}
