"""A method that guesses is called that, is no rival and no winner, and its report says what to change."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from synthetic_run import read_run, write_run, write_trial

from fedkeep.cli import main
from fedkeep.metrics import chance_accuracy, is_at_chance
from fedkeep.reporting.findings import findings, warnings
from fedkeep.reporting.html import render
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import leaders, summary
from fedkeep.reporting.table import caption


def test_chance_is_the_commonest_class_and_has_an_error() -> None:
    assert chance_accuracy([30, 10, 0]) == 0.75
    assert math.isnan(chance_accuracy([0, 0]))
    bound = 0.5 + 1.645 * math.sqrt(0.25 / 100)
    assert is_at_chance([100 * bound - 1e-6 - 25, 25], [50, 50])
    assert not is_at_chance([100 * bound + 1e-6 - 25, 25], [50, 50])
    assert not is_at_chance([0, 0], [0, 0])


def test_who_knows_the_rare_classes_does_not_guess() -> None:
    """The commonest class is 95 % of the examples."""
    assert is_at_chance([950, 0], [950, 50]), "always the commonest class"
    assert is_at_chance([0, 50, 0], [950, 50, 0]), "always the rarest"
    assert is_at_chance([475, 25], [950, 50]), "a fair coin"
    assert not is_at_chance([855, 45], [950, 50]), "90 % of each"
    bound = 0.5 + 1.645 * math.sqrt(0.25 / 950 + 0.25 / 50) / 2
    rare = 50 * (2 * bound - 0.9)  # with 90 % of the commonest class
    assert is_at_chance([855, rare - 1e-6], [950, 50])
    assert not is_at_chance([855, rare + 1e-6], [950, 50])


@pytest.fixture
def diverged(tmp_path: Path) -> Run:
    """FedAvg learns and forgets a little; FedSeq predicts one class forever and so forgets nothing."""
    run = write_run(tmp_path / "run")
    for seed in range(2):
        write_trial(run, "FedAvg", seed, [[95, 95], [90, 95], [94, 96 + seed], [92, 95]], total=[100, 100])
        lost = {"lost": {"3": "answered with a model.weight that is not finite"}, "faults": {"3": "not finite"}}
        stuck = [[100, 0]] * 4
        write_trial(run, "FedSeq", seed, stuck, total=[100, 100], rows={2: lost, 3: lost} if seed else None)
    return read_run(run)


def test_who_has_not_learned_is_not_best_at_forgetting_nothing(diverged: Run) -> None:
    rows = summary(diverged)
    fedavg, fedseq = rows
    assert fedseq.value("window_forgetting").mean == 0 < fedavg.value("window_forgetting").mean
    assert leaders(rows, "window_forgetting") == leaders(rows, "window_mean") == set(), (
        "there is nobody to compare with"
    )
    assert (fedavg.learned, fedseq.learned) == (True, False)
    assert (fedavg.note, fedseq.note) == ("", "at chance in 2 of 2 seeds")
    assert "A method at chance has not learned, and is compared with no other." in caption(rows)
    assert findings(rows) == []


def test_warnings_name_trials_numbers_and_what_to_change(diverged: Run) -> None:
    stuck, not_finite, change = warnings(diverged.trials, diverged.settings)
    assert stuck.startswith(
        "FedSeq (seeds 0, 1) did not learn: accuracy is at chance (50.0 % where guessing gives 50.0 %)"
    )
    assert not_finite == "2 of 8 local trainings of FedSeq (seed 1) ended in numbers that are not finite."
    assert change.startswith("Local training diverges. Lower the learning rate, --set training.lr=0.01 (it is 0.1)")
    assert "--set training.max_grad_norm=1" in change
    page = " ".join(render(diverged).split())
    assert "did not learn" in page
    assert "--set training.lr=0.01" in page


def test_warnings_count_each_training_once_and_name_the_methods_own_rate(diverged: Run) -> None:
    averages = [replace(trial, label=f"{trial.label}, mean of the round") for trial in diverged.trials]
    _, not_finite, _ = warnings([*diverged.trials, *averages], diverged.settings)
    assert not_finite == "2 of 8 local trainings of FedSeq (seed 1) ended in numbers that are not finite."
    own = [replace(trial, info={**trial.info, "training": {"lr": 0.03}}) for trial in diverged.trials]
    assert "--set FedSeq.training.lr=0.003 (it is 0.03)" in warnings(own, diverged.settings)[-1]


def test_a_method_that_only_needs_more_rounds_is_not_told_to_learn_slower(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    losses = {number: {"loss": 2.0 / number} for number in range(1, 5)}
    write_trial(run, "FedAvg", 0, [[5, 5]] * 4, rows=losses)
    assert [line[:23] for line in warnings(read_run(run).trials, {})] == [
        "FedAvg (seed 0) did not",
        "Give it more rounds (--",
    ]


def test_what_does_not_learn_is_told_to_try_another_learning_rate(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[5, 5]] * 4)
    change = warnings(read_run(run).trials, {"training": {"lr": 0.01}})[-1]
    assert change.startswith("Give it more rounds (--rounds), or change the learning rate, ")
    assert "--set training.lr=0.1 or 0.001 (it is 0.01)" in change


@pytest.mark.parametrize("loss", [None, math.inf, math.nan])  # null today, Infinity and NaN in earlier versions
def test_a_test_loss_that_is_not_finite_is_no_learning(loss: float | None, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[9, 9]] * 4, rows={4: {"test_loss": loss}})
    (trial,) = read_run(run).trials
    assert trial.trouble == "test loss not finite"
    assert math.isnan(trial.test_losses[-1]) or loss == math.inf


def test_a_learning_rate_that_diverges_is_called_that_where_it_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--methods", "fedavg", "--seeds", "0", "--set", "training.lr=1e4", "--workers", "1", "--quiet"]
    assert main(["run", tiny.write_recipe(tmp_path), *words, "--out", str(tmp_path / "run")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "at chance" in printed
    assert "4 of 4 local trainings of FedAvg (seed 0) ended too far from where they began, and were refused." in printed
    assert "Local training diverges. Lower the learning rate, --set training.lr=1000 (it is 10000)" in printed


def test_a_trial_that_has_just_begun_may_still_guess(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[5, 5]], finished=False, planned=8)
    assert warnings(read_run(run).trials, {}) == []


def test_a_test_loss_that_is_not_finite_is_told_as_such(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[95, 95]] * 4, total=[100, 100], rows={4: {"test_loss": None}})
    read = read_run(run)
    (said, change) = warnings(read.trials, read.settings)
    assert said == "The test loss of FedAvg (seed 0) is not finite: it is compared with no other."
    assert change.startswith("Local training diverges. Lower the learning rate")


def test_guessing_is_judged_on_the_examples_that_were_tested(tmp_path: Path) -> None:
    """With run.client_test a lost client does not test."""
    run = write_run(tmp_path / "run")
    few = {"total": [10, 10]}
    write_trial(run, "FedAvg", 0, [[95, 95], [95, 95], [95, 95], [9, 9]], total=[100, 100], rows={4: few})
    write_trial(run, "FedSeq", 0, [[9, 9], [9, 9], [9, 9], [95, 95]], total=[100, 100], rows={1: few, 2: few, 3: few})
    assert all(trial.learned for trial in read_run(run).trials)
