"""`fedkeep reproduce`, on a table of two columns that is made here."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import tiny
from filelock import FileLock

from fedkeep._utils.digests import digest_of, read_json, read_manifest, write_json, write_manifest
from fedkeep.cli.main import main
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment import reproduce
from fedkeep.experiment.runtime import Machine
from fedkeep.reporting.reproduction import ColumnResult, MethodResult, column_table, read_reproduction
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.trial import TrialResult


def further_heads(column: ColumnResult) -> list[str]:
    """The titles of a table behind the seeds."""
    heads = column_table(column).heads
    return heads[heads.index("seeds") + 1 :]


def further_texts(column: ColumnResult, line: MethodResult) -> list[str]:
    table = column_table(column)
    return table.lines[column.lines.index(line)][table.heads.index("seeds") + 1 :]


BASE = tiny.RECIPE.replace('title = "tiny"', 'title = "Toy"').replace("seeds = [0]", "seeds = [0, 1]")
PAPER = """
[paper]
table = "Toy, table 1"
columns = ["second", "first"]
target = 20
notes = "Made up for a test."

[paper.accuracy]
FedAvg = [10.0, 0.5]
FedSeq = [11.5]
Prox = [12.0, 0.1]

[paper.forgetting]
FedAvg = [5.0]

[paper.rounds_to]
FedAvg = [2]
"""
PROX = '\n[[methods]]\nalgorithm = "fedprox"\nlabel = "Prox"\nmu = 0.3\ngrid = { mu = [0.1, 1.0] }\n'


@pytest.fixture
def table(tmp_path: Path) -> str:
    folder = tmp_path / "toy"
    folder.mkdir()
    methods = BASE[BASE.index("[[methods]]") :].replace('[[methods]]\nalgorithm = "sfedkd"\nteachers = 2\n', PROX)
    (folder / "_table.toml").write_text(BASE[: BASE.index("[[methods]]")] + PAPER + methods)
    (folder / "first.toml").write_text('extends = "_table.toml"\ntitle = "Toy: first"\n')
    (folder / "second.toml").write_text('extends = "_table.toml"\ntitle = "Toy: second"\n[partition]\nalpha = 5.0\n')
    return str(folder)


def lines(folder: Path) -> dict[tuple[str, str], MethodResult]:
    """The lines of a reproduction's tables, by column and label."""
    found = {}
    for column in read_reproduction(folder).columns:
        found |= {(column.name, line.row.label if line.row else line.label): line for line in column.lines}
    return found


def run(table: str, out: Path, *words: str) -> int:
    return main(["reproduce", table, "--out", str(out), "--quiet", "--workers", "1", *words])


def test_a_table_grows_call_by_call_and_plays_nothing_twice(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(table, out, "--columns", "first", "--methods", "fedavg", "--seeds", "0") == 0
    assert "1 trial to run" in capsys.readouterr().out
    trial = out / "toy" / "first" / "trials" / "fedavg-seed0"
    before = {name: (trial / name).stat().st_mtime_ns for name in ("rounds.jsonl", "result.json")}
    assert not (out / "toy" / "second").exists()
    assert run(table, out) == 0
    assert "11 trials to run" in capsys.readouterr().out
    assert {name: (trial / name).stat().st_mtime_ns for name in before} == before
    assert run(table, out) == 0
    messages = capsys.readouterr().out
    assert "0 trials to run" in messages
    assert "Toy: first" in messages
    found = lines(out / "toy")
    assert [column for column, _ in found] == ["second"] * 3 + ["first"] * 3, "the paper's order"
    for line in found.values():
        assert line.row
        assert line.paper
        assert line.row.seeds == (0, 1)
        assert line.difference == pytest.approx(100 * line.row.value("window_mean").mean - line.paper.mean)
    text = (out / "toy" / "table.md").read_text()
    assert "Made up for a test." in text
    assert "rounds to 20 %, paper" in text
    assert "| Prox | 12.00 ±0.10 |" in text
    assert "### Toy: second" in text or "## Toy: second" in text


def test_a_table_names_the_frozen_networks_that_it_rests_on(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--columns", "first", "--methods", "fedavg", "--seeds", "0"]
    assert run(table, tmp_path, *words) == 0
    trial = tmp_path / "toy" / "first" / "trials" / "fedavg-seed0" / "trial.json"
    rested = {"generator": "g (paper): it has seen them all", "extractor": "e: vit"}
    write_json(trial, read_json(trial) | rested)
    files, _ = read_manifest(trial.parent / "manifest.json")
    write_manifest(trial.parent / "manifest.json", files | {trial.name: digest_of(trial.read_bytes())})
    assert run(table, tmp_path, *words) == 0
    output = "Generator of images: g (paper): it has seen them all. Pre-trained extractor: e: vit."
    for messages in (capsys.readouterr().out, (tmp_path / "toy" / "table.md").read_text()):
        assert output in " ".join(messages.split())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('measured = "window_mean"', "paper.measured names two metrics"),
        ('measured = ["train_seconds", "forgetting"]', "not 'train_seconds'. Each is one of: "),
        ('measured = ["windowmean", "forgetting"]', "no metric 'windowmean'. Did you mean 'window_mean'"),
        ('columns = "second, first"', "paper.columns must be a list"),
    ],
)
def test_what_is_wrong_with_the_paper_section_is_told_before_anything_runs(
    line: str, said: str, table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Path(table) / "_table.toml"
    text = base.read_text().replace('columns = ["second", "first"]\n', "") if "columns" in line else base.read_text()
    base.write_text(text.replace("[paper]", f"[paper]\n{line}"))
    assert run(table, tmp_path / "out") != 0
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_the_best_of_a_grid_stands_beside_the_papers_number(table: str, tmp_path: Path) -> None:
    assert run(table, tmp_path, "--columns", "first", "--seeds", "0", "--grid") == 0
    found = {label: line for (_, label), line in lines(tmp_path / "toy").items()}
    points = {name: found[name].row.value("window_mean").mean for name in ("Prox (mu 0.1)", "Prox (mu 1)")}
    best = max(points, key=lambda name: points[name])
    assert [name for name in points if found[name].paper] == [best]
    assert "best of its grid on the test set" in (tmp_path / "toy" / "table.md").read_text()
    # What was run without the grid before is no second line of the paper's.
    (column,) = read_reproduction(tmp_path / "toy").columns
    pairs = column.agreement[1]
    assert run(table, tmp_path, "--columns", "first", "--seeds", "0", "--methods", "prox") == 0
    (column,) = read_reproduction(tmp_path / "toy").columns
    assert (column.agreement[1], pairs) == (3, 3)
    assert [line.label for line in column.lines if line.is_printed] == ["FedAvg", "FedSeq", "Prox"]


def test_options_that_were_not_changed_are_in_no_label(table: str, tmp_path: Path) -> None:
    for grid in (False, True):
        (column,) = reproduce.select_columns(
            *reproduce.find_table(table),
            tmp_path,
            ["first"],
            1.0,
            methods=["prox"],
            settings=["fedprox.mu=5"],
            grid=grid,
        )
        assert [method.label for method in column.recipe.methods] == ["Prox, changed: mu=5.0"]


def test_a_machine_that_later_calls_ask_for_is_told(
    table: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--columns", "first", "--methods", "fedavg", "--rounds", "0.5"]
    assert run(table, tmp_path, *words, "--seeds", "0") == 0
    assert "keeps" not in caplog.text
    assert run(table, tmp_path, *words, "--seeds", "1", "--threads", "2") == 0
    assert "was begun with --device cpu --threads 1 --stack 0, which this trial keeps" in caplog.text


def test_a_label_with_a_comma_can_be_named(table: str, tmp_path: Path) -> None:
    path = Path(table, "_table.toml")
    path.write_text(path.read_text().replace('label = "Prox"', 'label = "Prox, tuned"'))
    (column,) = reproduce.select_columns(
        *reproduce.find_table(table), tmp_path, ["first"], 1.0, methods=["fedavg", "prox, tuned"]
    )
    assert [method.label for method in column.recipe.methods] == ["FedAvg", "Prox, tuned"]


def test_a_share_of_the_rounds_has_a_folder_of_its_own(table: str, tmp_path: Path) -> None:
    assert run(table, tmp_path, "--columns", "first", "--methods", "fedseq", "--seeds", "1", "--rounds", "0.5") == 0
    folder = tmp_path / "toy-rounds-0.5"
    assert "1 of 2 rounds; finished seed 1" in (folder / "table.md").read_text()
    result = json.loads((folder / "first" / "trials" / "fedseq-seed1" / "result.json").read_text())
    assert result == {"rounds": 1}


def test_the_command_under_a_table_repeats_it(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seeds are those of all calls, not of the last one; its methods those of the table, a file's among them."""
    own = tmp_path / "own_seq.py"
    own.write_text(
        "from dataclasses import dataclass\nfrom fedkeep.algorithms.sequential.fedseq import FedSeq\n"
        "@dataclass(frozen=True)\nclass OwnSeq(FedSeq):\n    title = 'OwnSeq'\n"
    )
    words = ["--columns", "first", "--methods", "fedseq,ownseq,prox", f"--use={own}", "--rounds", "0.5"]
    words += ["--set", "run.ema_decay=0.5"]
    monkeypatch.setattr(sys, "argv", ["fedkeep", "reproduce", table, *words, "--seeds", "1"])
    assert run(table, tmp_path / "one", *words, "--seeds", "1") == run(table, tmp_path / "one", *words) == 0
    written = (tmp_path / "one" / "toy-rounds-0.5" / "table.md").read_text()
    (command,) = re.findall(r"Run with `fedkeep (.*)` by FedKeep ", written)
    again = [*shlex.split(command), "--out", str(tmp_path / "two"), "--quiet", "--workers", "1"]
    assert main(again) == 0
    assert (tmp_path / "two" / "toy-rounds-0.5" / "table.md").read_text() == written


def test_seeds_that_a_later_call_added_to_some_methods_are_told(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--columns", "first", "--rounds", "0.5"]
    for more in (["--seeds", "0"], ["--seeds", "1", "--methods", "fedseq"]):
        monkeypatch.setattr(sys, "argv", ["fedkeep", "reproduce", table, *words, *more])
        assert run(table, tmp_path, *words, *more) == 0
    written = (tmp_path / "toy-rounds-0.5" / "table.md").read_text()
    assert re.search(r"--seeds 0 --methods .*` and `fedkeep reproduce .* --seeds 0,1 --methods FedSeq` by", written)


def test_what_is_set_of_one_method_is_told_with_it_alone(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--columns", "first", "--rounds", "0.5", "--set", "fedprox.mu=0.7"]
    for more in (["--seeds", "0"], ["--seeds", "1", "--methods", "prox"]):
        monkeypatch.setattr(sys, "argv", ["fedkeep", "reproduce", table, *words, *more])
        assert run(table, tmp_path, *words, *more) == 0
    written = (tmp_path / "toy-rounds-0.5" / "table.md").read_text()
    (told,) = re.findall(r"Run with (.*) by FedKeep", written)
    assert ["fedprox.mu" in command for command in told.split(" and ")] == [False, True]


def test_a_method_of_a_file_joins_a_table_that_was_begun_without_it(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "joins.py"
    own.write_text("from fedkeep import FedSeq\n\nclass Joins(FedSeq):\n    title = 'Joins'\n")
    words = ["--columns", "first", "--seeds", "0", "--rounds", "0.5"]
    assert run(table, tmp_path, *words, "--methods", "fedseq") == 0
    folder = tmp_path / "toy-rounds-0.5" / "first"
    assert not (folder / "code").exists()
    assert run(table, tmp_path, *words, "--methods", "joins", f"--use={own}") == 0
    assert (folder / "code" / "joins.py").read_text() == own.read_text()
    assert read_json(folder / "run.json")["use"] == ["code/joins.py"]
    assert main(["verify", str(folder)]) == 0
    own.write_text(f"{own.read_text()}# edited")
    assert run(table, tmp_path, *words, "--methods", "joins", f"--use={own}") == 1
    assert "joins.py was changed since" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "calls",
    [
        ["--methods prox --grid --set fedprox.aggregation=uniform"],
        ["--methods fedseq", "--methods prox --grid"],
    ],
)
def test_so_does_that_of_a_grid_and_of_several_calls(
    calls: list[str], table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (shlex.split(call) for call in calls):
        monkeypatch.setattr(sys, "argv", ["fedkeep", "reproduce", table, *words])
        assert run(table, Path("one"), "--columns", "first", "--seeds", "0", "--rounds", "0.5", *words) == 0
    (command,) = re.findall(r"Run with `fedkeep (.*)` by FedKeep ", Path("one/toy-rounds-0.5/table.md").read_text())
    again = [*shlex.split(command), "--out", "two", "--quiet", "--workers", "1"]
    assert main(again) == 0
    one, two = (lines(Path(folder, "toy-rounds-0.5")) for folder in ("one", "two"))
    values = [{name: line.row.value("window_mean").mean for name, line in of.items() if line.row} for of in (one, two)]
    assert values[0] == values[1]
    assert len(values[0]) >= 2


def test_other_settings_are_refused_by_name(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--columns", "first", "--methods", "fedavg", "--seeds", "0"]
    assert run(table, tmp_path, *words) == 0
    assert run(table, tmp_path, *words, "--set", "training.lr=0.5") == 1
    assert "begun with other settings (training)" in " ".join(capsys.readouterr().err.split())


def test_another_learning_rate_of_one_method_is_refused_by_its_label(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--columns", "first", "--methods", "prox", "--seeds", "0"]
    assert run(table, tmp_path, *words) == 0
    path = Path(table, "_table.toml")
    path.write_text(path.read_text().replace('label = "Prox"', 'label = "Prox"\ntraining = { lr = 0.3 }'))
    assert run(table, tmp_path, *words) == 1
    assert "begun with other settings (Prox)" in " ".join(capsys.readouterr().err.split())


def test_a_dry_run_plays_nothing(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(table, tmp_path / "out", "--dry-run", "--seeds", "0,1") == 0
    messages = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert messages.count("GB") == 6
    assert "sent in all" in messages
    assert "Nothing was run" in messages


def test_a_dry_run_that_measured_nothing_names_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path))
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    columns = "ham10000-2-1,cifar10-2-0.5,cifar10-2-10"
    assert main(["reproduce", "sfedkd/table1", "--columns", columns, "--methods", "fedavg", "--dry-run"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "In all" not in shown
    assert "cifar10-2-0.5, cifar10-2-10: The data set 'cifar10' was not found" in shown


def test_a_page_of_all_reproductions(table: str, tmp_path: Path) -> None:
    words = ["--columns", "first", "--methods", "fedavg", "--seeds", "0"]
    assert run(table, tmp_path / "out", *words) == 0
    assert run(table, tmp_path / "out", *words, "--rounds", "0.5") == 0
    (tmp_path / "out" / "notes.md").write_text("# Notes\n\n## toy\n\nA person says this.\n")
    assert main(["reproduce", "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert page.count("## Toy, table 1\n") == page.count("## Toy, table 1, 1 of 2 rounds\n") == 1
    assert "- [Toy, table 1, 1 of 2 rounds](#toy-table-1-1-of-2-rounds)\n" in page
    assert page.count("Accuracy in %.") == page.count("Student's t") == 1
    assert "A person says this." in page
    assert "1 of 2 rounds" in page


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--columns", "frist"], "has no column 'frist'. Did you mean 'first'?"),
        (["--methods", "fedavgg"], "there is no method 'fedavgg'. Did you mean"),
    ],
)
def test_what_there_is_not(
    words: list[str], output: str, table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(table, tmp_path, *words) == 1
    assert output in " ".join(capsys.readouterr().err.split())


def test_an_unknown_table_and_an_impossible_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "sfedkd/table11"]) == 1
    assert "Did you mean 'sfedkd/table1'" in " ".join(capsys.readouterr().err.split())
    for share in ("0", "1.5", "nan", "x"):
        with pytest.raises(SystemExit):
            main(["reproduce", "sfedkd/table1", "--rounds", share])


@pytest.mark.slow
def test_killed_it_goes_on_where_it_was(table: str, tmp_path: Path) -> None:
    """The whole command is killed, worker processes too; the table that one process resumes has the same records."""
    words = ["--columns", "first", "--methods", "fedavg,fedseq", "--set", "run.rounds=60"]
    assert run(table, tmp_path / "whole", *words) == 0
    command = [sys.executable, "-m", "fedkeep", "reproduce", table, "--out", str(tmp_path / "cut"), "--workers", "2"]
    process = subprocess.Popen([*command, *words], start_new_session=True, stdout=subprocess.DEVNULL)
    records = tmp_path / "cut" / "toy" / "first" / "trials" / "fedavg-seed0" / "rounds.jsonl"
    until = time.monotonic() + 300
    while not (records.exists() and len(records.read_bytes().splitlines()) > 3) and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for lock in (tmp_path / "cut").rglob(".lock"):
        with FileLock(lock, timeout=60):  # workers that were killed let go a moment later
            pass
    assert run(table, tmp_path / "cut", *words) == 0
    trials = tmp_path / "whole" / "toy" / "first" / "trials"
    names = sorted(trial.name for trial in trials.iterdir())
    assert len(names) == 4
    for name in names:
        for file in ("rounds.jsonl", "model.safetensors", "result.json"):
            other = tmp_path / "cut" / "toy" / "first" / "trials" / name / file
            assert other.read_bytes() == (trials / name / file).read_bytes(), (name, file)


def test_agreement_counts_pairs(table: str, tmp_path: Path) -> None:
    assert run(table, tmp_path, "--columns", "first", "--seeds", "0") == 0
    (column,) = read_reproduction(tmp_path / "toy").columns
    ours = {line.label: line.ours.mean for line in column.lines if line.ours}
    pairs = [("FedAvg", "FedSeq", True), ("FedAvg", "Prox", True), ("FedSeq", "Prox", True)]
    same = sum(ours[a] < ours[b] for a, b, _ in pairs)
    # The paper separates FedAvg from Prox by more than twice 0.5; FedSeq has no deviation to compare with.
    assert column.agreement == (same, 3, int(ours["FedAvg"] < ours["Prox"]), 1)


def test_a_table_of_forgetting_alone_is_compared_by_forgetting(table: str, tmp_path: Path) -> None:
    base = Path(table) / "_table.toml"
    text = base.read_text()
    start, end = text.index("[paper.accuracy]"), text.index("[paper.forgetting]")
    base.write_text((text[:start] + text[end:]).replace("FedAvg = [5.0]", "FedAvg = [5.0]\nFedSeq = [9.0]"))
    assert run(table, tmp_path, "--columns", "first", "--seeds", "0", "--methods", "fedavg,fedseq") == 0
    (column,) = read_reproduction(tmp_path / "toy").columns
    assert [line.label for line in column.lines] == ["FedAvg", "FedSeq"]
    assert column.agreement[1] == 1
    values = [line.row.value("forgetting").mean for line in column.lines if line.row]
    assert column.agreement[0] == (values[0] < values[1])
    assert all(line.difference is None for line in column.lines)


def test_what_tasks_cost_is_shown_though_no_paper_prints_it(table: str, tmp_path: Path) -> None:
    base = Path(table) / "_table.toml"
    text = base.read_text().replace("target = 20", 'measured = ["task_accuracy", "forgetting_chaudhry"]')
    start, end = text.index("[paper.accuracy]"), text.index("[[methods]]")
    base.write_text(text[:start] + "[tasks]\nnum_tasks = 2\n\n" + text[end:])
    assert run(table, tmp_path, "--columns", "first", "--seeds", "0", "--methods", "fedavg") == 0
    (column,) = read_reproduction(tmp_path / "toy").columns
    (line,) = column.lines
    assert line.row is not None
    assert further_heads(column) == ["forgetting"]
    assert further_texts(column, line) == [f"{100 * line.row.value('forgetting_chaudhry').mean:.2f}"]


def test_clients_own_models_stand_beside_the_papers(table: str, tmp_path: Path) -> None:
    base = Path(table) / "_table.toml"
    text = base.read_text().replace(
        "[paper.forgetting]", "[paper.local_accuracy]\nFedAvg = [7.0, 0.5]\n\n[paper.forgetting]"
    )
    base.write_text(text.replace("cohort_size = 2\n", "cohort_size = 2\nevaluate_local_models = true\n"))
    assert run(table, tmp_path, "--columns", "first", "--seeds", "0", "--methods", "fedavg,fedseq") == 0
    (column,) = read_reproduction(tmp_path / "toy").columns
    at = further_heads(column).index("clients' models, paper")
    shown = {line.label: further_texts(column, line)[at : at + 2] for line in column.lines}
    (trial,) = [trial for trial in column.run.trials if trial.label == "FedAvg"]
    assert trial.local_last == list(trial.local_history.values())[-1]
    assert shown["FedAvg"] == ["7.00 ±0.50", f"{100 * trial.local_last:.2f}"]
    assert shown["FedSeq"][0] == "–"


def test_averages_say_when_they_reach_what_the_paper_has_for_their_method(table: str, tmp_path: Path) -> None:
    words = ["--columns", "first", "--seeds", "0,1", "--methods", "fedavg,fedseq", "--set", "run.rounds=6"]
    assert run(table, tmp_path / "plain", *words) == 0
    (plain,) = read_reproduction(tmp_path / "plain" / "toy").columns
    assert "rounds to the paper's" not in further_heads(plain), "where nothing is averaged there is nothing to add"
    assert run(table, tmp_path, *words, "--set", 'run.evaluation_models=["last", "moving"]') == 0
    (column,) = read_reproduction(tmp_path / "toy").columns
    at = further_heads(column).index("rounds to the paper's")
    shown = {line.label: further_texts(column, line)[at] for line in column.lines}
    assert list(shown) == ["FedAvg", "FedSeq", "Prox", "FedAvg, moving average", "FedSeq, moving average"]
    for label, text in shown.items():
        paper = {"FedAvg": 0.1, "FedSeq": 0.115}.get(label.partition(",")[0])
        if paper is None:
            assert text == "–"
            continue
        reached = [trial.rounds_to(paper) for trial in column.run.trials if trial.label == label]
        known = [number for number in reached if number == number]
        some = f" ({len(known)} of 2 seeds)" if len(known) == 1 else ""
        assert text == (f"{sum(known) / len(known):g}{some}" if known else "not reached")
    assert len(set(shown.values())) > 2


def test_times_to_a_target_stand_beside_the_papers(table: str, tmp_path: Path) -> None:
    base = Path(table) / "_table.toml"
    text = base.read_text().replace("target = 20", "target = 5")
    start, end = text.index("[paper.accuracy]"), text.index("[[methods]]")
    base.write_text(text[:start] + "[paper.speedup]\nFedAvg = [2.0]\nFedSeq = [1.0]\n" + text[end:])
    words = ["--columns", "first", "--seeds", "0,1", "--methods", "fedavg,fedseq"]
    assert run(table, tmp_path, *words) == 0
    (column,) = read_reproduction(tmp_path / "toy").columns
    assert further_heads(column) == ["times as fast to 5 %, paper", "ours"]
    assert column.verdict == "No accuracy or forgetting is printed for it."
    shown = {line.label: further_texts(column, line) for line in column.lines}
    trials = {(trial.label, trial.seed): trial for trial in column.run.trials}
    for trial in trials.values():
        rounds = trial.rounds_to(0.05)
        spent = sum(row["train"] + row["teachers"] for row in trial.timings if row["round"] <= rounds)
        assert trial.seconds_to(0.05) == pytest.approx(spent)
        assert trial.seconds_to(1.01) != trial.seconds_to(1.01), "not a number"
    ratios = [trials["FedSeq", seed].seconds_to(0.05) / trials["FedAvg", seed].seconds_to(0.05) for seed in (0, 1)]
    assert shown["FedAvg"] == ["2", f"{sum(ratios) / 2:.2f}"]
    assert shown["FedSeq"] == ["1", "1.00"]


def test_a_folder_of_another_kind_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no table"):
        reproduce.find_table(str(tmp_path))
    with pytest.raises(RunError, match=r"reproduction\.json is missing"):
        reproduce.table_of(tmp_path / reproduce.NOTE)


def test_preparing_twice_adds_and_never_takes_away(table: str, tmp_path: Path) -> None:
    found = reproduce.find_table(table)
    one = reproduce.select_columns(*found, tmp_path / "toy", ["first"], 1.0, methods=["fedavg"], seeds=[1])
    two = reproduce.select_columns(*found, tmp_path / "toy", ["first"], 1.0, methods=["fedseq"], seeds=[0])
    reproduce.prepare(one[0], Machine())
    unfinished = reproduce.prepare(two[0], Machine())
    both = unfinished[0].experiment.recipe
    assert [method.label for method in both.methods] == ["FedAvg", "FedSeq"]
    assert both.seeds == (0, 1)
    assert [(trial.method.label, trial.seed) for trial in unfinished] == [("FedSeq", 0)]


def test_changed_options_never_stand_beside_the_papers_number(table: str, tmp_path: Path) -> None:
    words = ["--columns", "first", "--seeds", "0"]
    assert run(table, tmp_path, *words, "--methods", "fedavg") == 0
    assert run(table, tmp_path, *words, "--methods", "fedprox", "--set", "prox.mu=50.0") == 0
    found = {label: line for (_, label), line in lines(tmp_path / "toy").items()}
    assert found["Prox"].row is None
    assert found["Prox, changed: mu=50.0"].paper is None


def test_averages_that_were_served_are_no_points_of_a_grid(table: str, tmp_path: Path) -> None:
    words = ["--columns", "first", "--seeds", "0", "--grid", "--methods", "prox"]
    assert run(table, tmp_path, *words, "--set", 'run.evaluation_models=["last", "moving"]') == 0
    beside = [label for (_, label), line in lines(tmp_path / "toy").items() if line.paper and line.row]
    assert beside in (["Prox (mu 0.1)"], ["Prox (mu 1)"])


def test_a_column_that_is_kept_in_an_archive_is_not_begun_beside_it(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--columns", "first", "--methods", "fedavg"]
    assert run(table, tmp_path / "out", *words, "--seeds", "0") == 0
    assert main(["archive", str(tmp_path / "out" / "toy"), "--out", str(tmp_path / "kept")]) == 0
    capsys.readouterr()
    assert run(table, tmp_path / "kept", *words, "--seeds", "1") == 1
    output = " ".join(capsys.readouterr().err.split())
    assert "To add to them, unpack it: python -m zipfile -e" in output
    archive, folder = output.split()[-2:]
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    Path(archive).unlink()
    assert run(table, tmp_path / "kept", *words, "--seeds", "0,1") == 0
    assert "1 trial to run" in capsys.readouterr().out, "what was unpacked is not run again"
    row = lines(tmp_path / "kept" / "toy")["first", "FedAvg"].row
    assert row is not None
    assert row.seeds == (0, 1)


def test_a_table_shows_what_ours_gained_on_the_papers_best(table: str, tmp_path: Path) -> None:
    assert run(table, tmp_path, "--columns", "first", "--methods", "fedavg,fedseq", "--seeds", "0,1") == 0
    (column,) = read_reproduction(tmp_path / "toy").columns
    fedavg, fedseq = column.line("FedAvg"), column.line("FedSeq")
    gain = column.gain(fedavg)
    assert gain
    assert fedavg.row
    assert fedseq.row
    assert (gain.reference, column.gain(fedseq)) == ("FedSeq", None)
    gap = fedavg.row.value("window_mean").mean - fedseq.row.value("window_mean").mean
    assert gain.interval.mean == pytest.approx(gap)
    assert gain.interval.low <= gap <= gain.interval.high
    assert "minus FedSeq, 95 %" in (tmp_path / "toy" / "table.md").read_text()
    base = Path(table) / "_table.toml"
    base.write_text(base.read_text().replace("target = 20", 'target = 20\nagainst = "FedAvg"'))
    assert run(table, tmp_path / "named", "--columns", "first", "--methods", "fedavg,fedseq", "--seeds", "0") == 0
    (column,) = read_reproduction(tmp_path / "named" / "toy").columns
    gain = column.gain(column.line("FedSeq"))
    assert gain
    assert gain.reference == "FedAvg"


def test_two_tables_of_one_name_do_not_mix(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--columns", "first", "--seeds", "0", "--methods", "fedavg"]
    assert run(table, tmp_path, *words) == 0
    write_json(tmp_path / "toy" / "reproduction.json", {"table": "other/toy"})
    assert run(table, tmp_path, *words) == 1
    assert "holds a reproduction of 'other/toy'" in " ".join(capsys.readouterr().err.split())


def test_a_kill_before_a_run_has_begun_blocks_nothing(table: str, tmp_path: Path) -> None:
    folder = tmp_path / "toy" / "first"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text("title = 'half'")
    (folder / ".run.json.77.tmp").write_text("{")
    assert run(table, tmp_path, "--columns", "first", "--seeds", "0", "--methods", "fedavg") == 0


def test_a_list_of_nothing_is_refused(table: str, tmp_path: Path) -> None:
    for words in (["--methods", ","], ["--columns", " , "]):
        with pytest.raises(SystemExit):
            run(table, tmp_path, *words)


def test_what_is_used_or_set_of_a_section_stands_in_every_command() -> None:
    def command(given: str, *labels: str) -> str:
        trials = tuple(
            TrialResult(label, [], [], {}, {"algorithm": label.lower(), "seed": seed}, True)
            for number, label in enumerate(labels)
            for seed in range(number + 1)
        )
        info = {"command": ["fedkeep", "reproduce", "toy", given], "recipe": "toy/first.toml", "fedkeep": "1"}
        return ColumnResult("first", Run(Path("x"), info, "", trials)).provenance

    assert command("--use=mine.py", "Mine", "Other").count("--use mine.py") == 2
    assert command("--set=training.lr=0.1", "Training", "Other").count("--set training.lr=0.1") == 2
    assert command("--set=mine.tau=2", "Mine", "Other").count("--set mine.tau=2") == 1
