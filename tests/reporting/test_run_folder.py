"""What a run folder says, against numbers computed by hand, and what is left of one that was killed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import read_run, write_json, write_run, write_trial

from fedkeep import FedSeq
from fedkeep.errors import RunError
from fedkeep.experiment.recipe import Method
from fedkeep.reporting.metric import metric_of
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.trial import LostClient
from fedkeep.tuning import _read_points


def test_numbers_of_a_cell_are_those_computed_by_hand(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rows = {
        2: {"lost": {"7": "dropped out"}, "up": 500},
        4: {"cohort": ["1", "2", "3"], "lost": {"1": "late", "2": "late"}, "rolled_back": True, "down": 3000, "up": 0},
    }
    write_trial(run, "FedAvg", 0, [[2, 8], None, [6, 4], [5, 5]], rows=rows)
    (trial,) = read_run(run).trials
    assert trial.finished
    assert (trial.rounds_done, trial.rounds_planned) == (4, 4)
    np.testing.assert_array_equal(trial.evaluated, [1, 3, 4])
    np.testing.assert_allclose(trial.accuracies, [0.5, 0.5, 0.5])
    np.testing.assert_allclose(trial.class_history, [[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]])
    # The golden example: ((0.6 - 0.5) + (0.8 - 0.5)) / 2; before it ((0.2 - 0.6) + (0.8 - 0.4)) / 2.
    assert trial.forgetting == pytest.approx(0.2)
    np.testing.assert_allclose(trial.forgetting_history, [np.nan, 0.0, 0.2], atol=1e-12)
    assert trial.train_seconds == pytest.approx(4 * 2.5)
    assert trial.seconds("evaluate") == pytest.approx(1.0)
    # Nine local trainings in all: 2 + 2 + 2 + 3.
    assert trial.down == pytest.approx((3 * 2000 + 3000) / 9)
    assert trial.up == pytest.approx((1000 + 500 + 1000 + 0) / 9)
    assert trial.traffic == 9000 + 2500
    assert trial.lost == [LostClient(2, "7", "dropped out"), LostClient(4, "1", "late"), LostClient(4, "2", "late")]
    assert trial.rolled_back == [4]


def test_last_best_and_window_differ(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedSeq", 0, [[10, 10], *([r, 0] for r in range(1, 11)), [3, 1]])
    (trial,) = read_run(run).trials
    assert trial.best == 1.0
    assert trial.last == pytest.approx(0.2)
    # The last six of twelve rounds are 6/20 .. 10/20 and 4/20: (40 + 4) / 20 / 6.
    assert trial.window_rounds == (7, 12)
    assert trial.window_mean == pytest.approx(44 / 120)
    assert trial.window_std == pytest.approx(np.std(np.array([*range(6, 11), 4]) / 20, ddof=1))


def test_balanced_accuracy_weighs_classes_alike_and_skips_those_without_test_data(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[90, 1, 0], [80, 4, 0]], total=[100, 10, 0])
    (trial,) = read_run(run).trials
    assert trial.last == pytest.approx(84 / 110)
    assert trial.balanced == pytest.approx(0.6)
    assert trial.forgetting == pytest.approx(((0.9 - 0.8) + (0.1 - 0.4)) / 2)
    assert np.isnan(trial.class_history[:, 2]).all()


def test_what_was_not_measured_is_nan_and_not_zero(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [None, None], timings=[], finished=False)
    write_trial(run, "FedAvg", 1, [[5, 5], None], finished=False)
    write_trial(run, "FedAvg", 2, [], finished=False, planned=9)
    never, once, empty = read_run(run).trials
    names = ("last", "best", "window_mean", "window_std", "window_forgetting", "forgetting", "balanced")
    assert all(math.isnan(getattr(never, name)) for name in (*names, "train_seconds"))
    assert all(math.isnan(getattr(empty, name)) for name in (*names, "down", "up"))
    assert math.isnan(once.forgetting)
    assert once.last == 0.5
    assert math.isnan(once.window_mean), "a part of a window does not stand for it"
    assert empty.class_history.shape == (0, 2)


@pytest.mark.parametrize("cut", ['{"task": 1, "rou', '{"task": 1, "round": 3, "cohort": ["é'])
def test_a_cut_last_line_is_left_out_and_the_cell_is_unfinished(tmp_path: Path, cut: str) -> None:
    run = write_run(tmp_path / "run")
    folder = write_trial(run, "FedAvg", 0, [[1, 1], [2, 2]], finished=False, planned=9)
    with (folder / "rounds.jsonl").open("ab") as file:
        file.write(cut.encode()[:-1])  # the second ends within a character
    (trial,) = read_run(run).trials
    assert not trial.finished
    assert (trial.rounds_done, trial.rounds_planned) == (2, 9)


def test_a_whole_last_line_counts_without_its_newline(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[1, 1]], cut='{"round": 2, "cohort": ["3"], "correct": [4, 4]}')
    assert read_run(run).trials[0].last == pytest.approx(0.4)


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    folder = write_trial(run, "FedAvg", 0, [[1, 1], [2, 2]])
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text(lines[0] + "{oops\n" + lines[1])
    with pytest.raises(RunError, match=r"rounds\.jsonl, line 2 is damaged"):
        read_run(run)


def test_a_round_written_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    folder = write_trial(run, "FedAvg", 0, [[1, 1], [2, 2]])
    with (folder / "timings.jsonl").open("a") as file:
        file.write('{"round": 2, "train": 7.0, "teachers": 0.0}\n')
    assert read_run(run).trials[0].train_seconds == pytest.approx(2.5 + 7.0)


def test_cells_come_in_the_order_of_the_recipe_then_by_seed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for label, seed in (("SFedKD", 1), ("FedSeq", 0), ("Another", 0), ("FedAvg", 10), ("FedAvg", 2)):
        write_trial(run, label, seed, [[1, 1]])
    order = [(trial.label, trial.seed) for trial in read_run(run).trials]
    assert order == [("FedAvg", 2), ("FedAvg", 10), ("FedSeq", 0), ("SFedKD", 1), ("Another", 0)]


def test_no_run_folder_is_an_error_that_lists_those_nearby(tmp_path: Path) -> None:
    write_run(tmp_path / "first")
    (tmp_path / "first" / "trials").mkdir()
    with pytest.raises(RunError, match=r"does not exist.*run\.json, recipe\.toml and trials/.*nearby.*first"):
        read_run(tmp_path / "frist")
    with pytest.raises(RunError, match=r"has no run\.json.*nearby.*first"):
        read_run(tmp_path)
    with pytest.raises(RunError, match=r"nearby: .*first[,.]"):
        read_run(tmp_path / "first" / "trials")


@pytest.mark.parametrize(
    ("correct", "message"),
    [
        ("[1, 1, 1]", "round 3: 'correct' counts more classes than the 2"),
        ("[1, false]", "'correct' is of another kind"),
    ],
)
def test_wrong_counts_of_correct_answers_are_named(tmp_path: Path, correct: str, message: str) -> None:
    run = write_run(tmp_path / "run")
    folder = write_trial(run, "FedAvg", 0, [[1, 1]])
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(f'{{"task": 1, "round": 3, "cohort": ["3"], "correct": {correct}}}\n')
    with pytest.raises(RunError, match=message):
        read_run(run)


def test_a_round_that_is_no_number_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    folder = write_trial(run, "FedAvg", 0, [[1, 1]])
    (folder / "rounds.jsonl").write_text('{"round": "3"}\n')
    with pytest.raises(RunError, match=r"rounds\.jsonl, line 1: expected an object with a 'round' and a 'task'"):
        read_run(run)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    folder = write_trial(run, "FedAvg", 0, [[1, 1]])
    write_json(folder / "trial.json", {"label": "FedAvg", "algorithm": "fedavg", "seed": 0})
    with pytest.raises(RunError, match=r"trial\.json lacks test_total"):
        read_run(run)
    for wrong in ({"test_total": 5}, {"test_total": ["5", "5"]}, {"seed": "0"}, {"options": []}):
        output = {"label": "FedAvg", "algorithm": "fedavg", "seed": 0, "test_total": [5, 5]} | wrong
        write_json(folder / "trial.json", output)
        with pytest.raises(RunError, match=rf"trial\.json holds {next(iter(wrong))} of another kind"):
            read_run(run)
    (folder / "trial.json").write_text("[1]")
    with pytest.raises(RunError, match=r"trial\.json is damaged or was edited"):
        read_run(run)
    (run / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json is damaged.* Restore it from a copy, or repeat the run from"):
        read_run(run)


def test_a_run_killed_at_once_reads_as_one_without_cells(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert read_run(run).trials == ()
    (run / "trials" / "fedavg-seed0").mkdir(parents=True)
    assert read_run(run).trials == ()
    (run / "recipe.toml").write_text("cut [")
    with pytest.raises(RunError, match=r"recipe\.toml is no TOML"):
        read_run(run)


def test_the_demo_has_an_unfinished_cell(demo: Run) -> None:
    assert [(c.label, c.seed, c.rounds_done) for c in demo.trials if not c.finished] == [("SFedKD", 2, 20)]
    assert demo.labels == ("FedAvg", "FedSeq", "SFedKD")
    assert demo.title == "Digits: what is kept"


def test_a_tuning_reads_the_first_evaluation_model_of_the_recipe(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    counts = {"correct": [1, 1], "test_loss": 0.5}
    rows = {number: {"evaluation_models": {"last": counts}} for number in (1, 2)}
    write_trial(run, "FedSeq", 0, [[9, 9], [9, 9]], total=[10, 10], rows=rows, evaluation_models=["moving", "last"])
    assert len(read_run(run).trials) == 2
    (point,) = _read_points(run, [Method("FedSeq", FedSeq())], metric_of("last"))
    assert point.values == (0.9,)


def test_what_a_method_logged_is_a_metric(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rows = {number: {"log": {"norm": number / 10, "teachers": ["3", "7"]}} for number in range(1, 5)}
    write_trial(run, "FedAvg", 0, [[5, 5]] * 4, rows=rows)
    (trial,) = read_run(run).trials
    metric = metric_of("log.norm")
    assert metric.by_round(trial) == {3: 0.3, 4: 0.4}, "in the window"
    assert metric.of(trial) == pytest.approx(0.35)
    assert metric.heading([trial]) == "norm, rounds 3–4"
    assert math.isnan(metric_of("log.teachers").of(trial))
    with pytest.raises(RunError, match=r"a metric is a name, such as window_mean or log\.NAME"):
        metric_of(lambda trial: 1.0)  # type: ignore[arg-type]
