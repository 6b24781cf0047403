"""A method is run in the setting of earlier records, and compared with their methods seed by seed."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from benchmark import _show_gains
from benchmark import main as benchmark
from rich.console import Console

from fedkeep.cli import main
from fedkeep.reporting.run_folder import Run, read_run
from fedkeep.reporting.summary import summary
from fedkeep.reporting.trial import TrialResult

METHOD = '''
"""FedAvg under another name."""

from fedkeep.algorithms.parallel.fedavg import FedAvg


class BenchmarkedAverage(FedAvg):
    """FedAvg itself."""

    title = "Another average"
'''

STILL = (
    METHOD.replace("BenchmarkedAverage", "Still").replace("Another average", "Still")
    + """
    def round(self, server, cohort):
        super().round(server, cohort)
        server.model = {name: 0 * tensor for name, tensor in server.model.items()}
"""
)

NETWORK = """
from torch import nn


def build(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    recipe = tiny.write_recipe(folder)
    command = ["run", recipe, "--methods", "fedavg,fedseq", "--seeds", "0,1", "--workers", "1", "--quiet"]
    command += ["--set", 'run.evaluation_models=["last", "moving"]', "--rounds", "6"]
    assert main([*command, "--out", str(folder / "run")]) == 0
    assert main(["archive", str(folder / "run"), "--out", str(folder)]) == 0
    return folder / "run.zip"


def test_a_new_method_is_compared_with_the_records(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "average.py", tmp_path / "out"
    file.write_text(METHOD)
    command = [str(file), "--against", str(records), "--out", str(out), "--workers", "1", "--quiet"]
    assert benchmark(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Another average in the setting of" in printed
    assert "FedAvg +0.00 [+0.00, +0.00], not" in printed, "it is FedAvg, on the same seeds and partition"
    assert "Another average, moving average beside 2 methods: better than 0, worse than 0," in printed, (
        "averages with averages"
    )
    assert "Another average beside 2 methods: better than 0, worse than 0," in printed
    run = read_run(out)
    assert run.labels == ("Another average", "Another average, moving average")
    assert {trial.seed for trial in run.trials} == {0, 1}


def test_a_method_that_the_records_have_is_called_new(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert benchmark(["fedseq", "--against", str(records), "--seeds", "1", "--workers", "1", "--quiet"]) == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("benchmark-run-"), "no name that must be quoted"
    assert read_run(folder).labels[0] == "FedSeq (new)"
    assert "FedSeq (new) beside " in " ".join(capsys.readouterr().out.split())


def test_what_has_not_learned_is_compared_with_nothing(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "still.py"
    file.write_text(STILL)
    command = [str(file), "--against", str(records), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert benchmark([*command, "--quiet"]) == 0
    assert "Still has not learned, so that it is compared with no other." in " ".join(capsys.readouterr().out.split())


def printed_gains(trials: list[TrialResult]) -> str:
    """Return what is said of FedSeq's gains on others."""
    console = Console(file=io.StringIO(), width=200)
    _show_gains(summary(Run(Path("run"), {}, "", tuple(trials))), "FedSeq", console)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def made_up(trial: TrialResult, correct: int, rounds: int = 40, **row: Any) -> TrialResult:
    """Return a trial with as many correct answers of each class in each round."""
    rows = [trial.rounds[-1] | {"round": n + 1, "correct": [correct - n % 2] * 10} | row for n in range(rounds)]
    return replace(trial, rounds=rows, info=trial.info | {"rounds": rounds, "test_total": [36] * 10})


def test_the_verdict_says_what_it_rests_on(records: Path) -> None:
    by_label = {t.label: t for t in read_run(records).trials if t.seed == 0}
    fedavg, fedseq = by_label["FedAvg"], by_label["FedSeq"]
    text = printed_gains([made_up(fedavg, 20), made_up(fedseq, 25)])
    assert "FedSeq beside 1 method: better than 1, worse than 0, not separated from 0 (within one seed; says " in text
    text = printed_gains([made_up(fedavg, 20, rounds=20), made_up(fedseq, 25)])
    assert "FedAvg not comparable: windows differ" in text
    assert "not separated from 0, 1 is not comparable: windows differ." in text
    assert "run more" not in text


def test_a_rival_whose_window_was_rolled_back_is_no_rival(records: Path) -> None:
    by_label = {t.label: t for t in read_run(records).trials if t.seed == 0}
    fedavg, fedseq = by_label["FedAvg"], by_label["FedSeq"]
    assert "beside 0 methods" in printed_gains([made_up(fedavg, 20, rolled_back=True), made_up(fedseq, 25)])
    text = printed_gains([made_up(fedavg, 20), made_up(fedseq, 25, rolled_back=True)])
    assert "FedSeq had rounds of its window rolled back, so that it is compared with no other." in text
    early = made_up(fedavg, 20)
    early.rounds[0]["rolled_back"] = True
    assert "FedAvg (1 of 40 rounds rolled back)" in printed_gains([early, made_up(fedseq, 25)])


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("fedseqq", [], "fedseq"),
        ("fedseq", ["--seeds", "7"], "no finished trial with seed 7, so that nothing could be paired with it"),
        ("empty.py", [], "empty.py defines no method"),
    ],
)
def test_what_cannot_be_benchmarked_is_said(
    records: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,
    changes: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.py").write_text("")
    assert benchmark([method, "--against", str(records), *changes]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("runs").exists()


def test_a_recipe_that_imports_its_model_is_run_only_if_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_network.py").write_text(NETWORK)
    text = tiny.RECIPE.replace('name = "mlp"\nhidden = [8]', 'name = "own_network:build"')
    shared = ["--workers", "1", "--quiet"]
    recipe = tiny.write_recipe(tmp_path, text)
    assert main(["run", recipe, "--methods", "fedavg", "--allow-code", "--out", "run", *shared]) == 0
    assert benchmark(["fedseq", "--against", "run", *shared]) == 1
    assert "--allow-code" in capsys.readouterr().err
    assert benchmark(["fedseq", "--against", "run", "--allow-code", *shared]) == 0
