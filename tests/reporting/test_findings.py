"""The first lines of report and table: methods against methods, averages apart."""

from __future__ import annotations

import io
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import RECIPE, read_run, write_run, write_trial

from fedkeep.reporting.findings import findings, is_undecided
from fedkeep.reporting.html import render
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import differences, summary
from fedkeep.reporting.table import print_table


def run_of(path: Path, **correct: list[int]) -> Run:
    """Write a run of one round whose methods have these correct predictions, of 200, by seed."""
    run = write_run(path, recipe=RECIPE.replace("rounds = 4", "rounds = 1"))
    for label, values in correct.items():
        for seed, value in enumerate(values):
            write_trial(run, label, seed, [[value // 2, value - value // 2]], total=[100, 100])
    return read_run(run)


@pytest.fixture
def with_average(tmp_path: Path) -> Run:
    """FedSeq is above FedAvg; its moving average is above its last model, so no row is above all others."""
    run = run_of(tmp_path / "run", FedAvg=[160, 162], FedSeq=[181, 182], SFedKD=[178, 184])
    above = run_of(tmp_path / "above", FedSeq=[183, 184]).trials
    average = [replace(trial, label="FedSeq, moving average", evaluation_model="moving") for trial in above]
    return replace(run, trials=(*run.trials, *average))


def test_methods_are_compared_with_methods_and_averages_apart(with_average: Run) -> None:
    rows = summary(with_average)
    first, averages = findings(rows)
    assert first == (
        "Accuracy, round 1: FedSeq (90.8 %) is 10.2 points above FedAvg (80.5 %; 95 % interval 7.1 to 13.4), and "
        "not separated from SFedKD (90.5 %) with 2 seeds."
    )
    assert averages == (
        "Averages: FedSeq's moving average is 1.0 points above its last model (95 % interval 1.0 to 1.0)."
    )
    assert is_undecided(rows)
    page = " ".join(unescape(render(with_average)).split())
    assert first in page
    assert averages in page
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(print_table(rows))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert " ".join(printed.split()).startswith(first), "it stands above the table"


def test_many_methods_are_counted(tmp_path: Path) -> None:
    rows = summary(run_of(tmp_path / "run", A=[120, 121], B=[130, 131], C=[140, 141], D=[190, 191]))
    (first,) = findings(rows)
    assert first == (
        "Accuracy, round 1: D (95.2 %) is 25.0 points above C (70.2 %; 95 % interval 25.0 to 25.0), further above "
        "2 others."
    )
    assert not is_undecided(rows)


def test_one_seed_of_one_evaluation_decides_nothing(tmp_path: Path) -> None:
    rows = summary(run_of(tmp_path / "run", A=[120], B=[190]))
    assert findings(rows)[0] == "Accuracy, round 1: B (95.0 %) and A (60.0 %) are not separated with one seed."
    assert is_undecided(rows)


def test_one_method_is_compared_with_none(tmp_path: Path) -> None:
    rows = summary(run_of(tmp_path / "run", A=[120, 130]))
    assert findings(rows) == []
    assert not is_undecided(rows)


def test_what_one_round_took_from_a_class_is_told_at_its_worst(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedSeq", 0, [[90, 5], [50, 90], [92, 40], [90, 95]], total=[100, 100])
    write_trial(run, "FedSeq", 1, [[90, 90], [90, 90], [93, 90], [31, 95]], total=[100, 100])
    found = read_run(run)
    average = [
        replace(trial, label="FedSeq, moving average", evaluation_model="moving")
        for trial in run_of(tmp_path / "b", FedSeq=[180]).trials
    ]
    rows = summary(replace(found, trials=(*found.trials, *average)))
    assert findings(rows)[0] == (
        "Forgotten in a single round, rounds 3–4, at worst: FedSeq fell from 93 to 31 % on class 0; moving averages "
        "lost 0 points at most."
    ), "rounds 3 and 4 are the window"
    small = write_run(tmp_path / "small")
    write_trial(small, "FedSeq", 0, [[10, 10], [10, 10], [10, 10], [0, 10]])
    assert findings(summary(read_run(small))) == [], "ten examples tell nothing"


def test_the_best_method_loses_to_none_on_the_seeds_of_both(tmp_path: Path) -> None:
    """A's other seeds are worse, and B would be best by its mean alone."""
    rows = summary(run_of(tmp_path / "run", B=[160, 162], A=[164, 166, 124, 126], C=[140, 142]))
    assert findings(rows)[0] == (
        "Accuracy, round 1: A (72.5 %) is 2.0 points above B (80.5 %; 95 % interval 2.0 to 2.0 on the seeds of both), "
        "further above C (70.5 %)."
    )


def test_seeds_do_not_decide_what_cannot_be_compared(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", A=[160, 162], B=[140, 142])
    other = [replace(t, info=t.info | {"dependencies": {"data set": t.label}}) for t in run.trials]
    rows = summary(replace(run, trials=tuple(other)))
    assert differences(rows, "A")[0].reason
    assert not is_undecided(rows)


def test_a_method_of_other_seeds_hides_no_comparison(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", A=[160, 162], B=[140, 142])
    alone = [replace(trial, label="C", info=trial.info | {"seed": 7}) for trial in run.trials if trial.label == "A"]
    rows = summary(replace(run, trials=(*run.trials, alone[0])))
    assert findings(rows)[0].startswith("Accuracy, round 1: A (80.5 %) is 10.0 points above B (70.5 %; 95 %")
    assert is_undecided([row for row in rows if row.label != "B"])
