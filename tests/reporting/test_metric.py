"""The list of metrics: one of a user's own stands wherever a built-in one does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from synthetic_run import read_run, write_run, write_trial

import fedkeep
from fedkeep.cli import main
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.reporting.figures import history
from fedkeep.reporting.html import render
from fedkeep.reporting.metric import METRICS, Metric, add_metric, check_main, columns_for, metric_of
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import difference, summary
from fedkeep.reporting.table import markdown, trials_csv
from fedkeep.reporting.trial import TrialResult


def best_class(trial: TrialResult) -> float:
    """Return the highest class-wise accuracy at the last evaluation."""
    return float(np.nanmax(trial.class_history[-1]))


BEST_CLASS = Metric("best_class", "best class", "%", best_class, better=1)


@pytest.fixture
def own() -> Iterator[Metric]:
    fedkeep.add_metric(BEST_CLASS)
    yield BEST_CLASS
    del METRICS["best_class"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = write_run(tmp_path / "run")
    for seed in (0, 1):
        write_trial(folder, "FedAvg", seed, [[6, 7]] * 4, total=[10, 10])
        write_trial(folder, "FedSeq", seed, [[8, 9 - seed]] * 4, total=[10, 10])
    return read_run(folder)


def test_a_metric_of_ones_own_is_in_all_that_is_written(own: Metric, run: Run) -> None:
    rows = summary(run)
    assert [metric.name for metric in columns_for(run.trials)][-1] == "best_class"
    head, _, fedavg, fedseq, *_ = markdown(rows).splitlines()
    assert head.endswith("| best class |")
    assert fedavg.endswith("| 70.00 ±0.00 |")
    assert fedseq.endswith("| 85.00 ±7.07 |")
    assert ",best_class," in trials_csv(rows).splitlines()[0]
    assert '<th scope="col">best class, %</th>' in render(run)
    gain = difference(rows[1], rows[0], "best_class")
    assert gain.values == pytest.approx((0.2, 0.1))


def test_with_tasks_a_table_has_no_metric_of_a_run_without_and_the_other_way_round(own: Metric, tmp_path: Path) -> None:
    names = {}
    for name, tasks in (("plain", []), ("tasks", [1, 1])):
        folder = write_run(tmp_path / name)
        write_trial(folder, "FedAvg", 0, [[5, 4]] * 4, total=[10, 10], tasks=tasks)
        names[name] = [metric.name for metric in columns_for(read_run(folder).trials)]
    common = ["train_seconds", "down", "up", "best_class"]
    assert names["plain"] == ["window_mean", "last", "best", "window_forgetting", *common]
    assert names["tasks"][-4:] == common
    assert names["tasks"][:-4] == [name for name, metric in METRICS.items() if metric.shown == "with tasks"]


def test_a_metric_that_cannot_be_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"unit is 'points', not one of .*; better is 2, .*; shown is 'everywhere'"):
        Metric("x", "x", "points", best_class, 2, "everywhere")  # type: ignore[arg-type]
    for name in ("last", "log.x", "two words"):
        with pytest.raises(ConfigError, match="cannot be named"):
            fedkeep.add_metric(Metric(name, "x", "", best_class))
    with pytest.raises(ConfigError, match="needs compute="):
        fedkeep.add_metric(Metric("x", "x"))
    fails = Metric("x", "x", "", lambda trial: trial.rounds[99]["loss"])
    with pytest.raises(RunError, match=r"the metric 'x' raised IndexError for FedAvg, seed 0: .*return NaN"):
        fails.of(run.trials[0])


@pytest.mark.parametrize("name", ["class_history", "accuracies", "forgetting_history", "test_losses"])
def test_a_metric_that_changes_what_others_read_is_an_error(name: str, run: Run) -> None:
    def changing(trial: TrialResult) -> float:
        values = getattr(trial, name)
        values.sort(axis=0)
        return float(values[0].mean())

    with pytest.raises(RunError, match=r"the metric 'sorted' raised ValueError .*read-only"):
        Metric("sorted", "sorted", "%", changing, better=1).of(run.trials[0])


def test_report_and_compare_take_a_metric_from_a_file(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    file = run.path.parent / "own_metric.py"
    file.write_text(
        "import fedkeep\n\ndef evaluations(trial):\n    return len(trial.evaluated)\n\n"
        "fedkeep.add_metric(fedkeep.Metric('evaluations', 'evaluated', compute=evaluations))\n"
    )
    try:
        assert main(["report", str(run.path), "--use", str(file)]) == 0
        assert main(["compare", str(run.path), "--use", str(file), "--format", "markdown"]) == 0
    finally:
        METRICS.pop("evaluations", None)
    assert "| evaluated |" in (run.path / "table.md").read_text()
    assert "| evaluated |" in capsys.readouterr().out


def test_early_stopping_looks_a_metric_up(own: Metric, tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg"], rounds=6, settings=["training.lr=0.0"])
    with pytest.raises(RunError, match="There is no metric 'best_clas'"):
        fedkeep.EarlyStopping(metric="best_clas")
    for name in ("up", "train_seconds"):
        with pytest.raises(ConfigError, match=f"ranks methods, and {name} does not"):
            fedkeep.EarlyStopping(metric=name)
    stopping: Any = fedkeep.EarlyStopping(2, "best_class")
    run = fedkeep.run(recipe, out=tmp_path / "run", callbacks=[stopping])
    (trial,) = run.trials
    assert trial.rounds_done == 3, "a model that does not move does not become better"
    assert "ended after 3 of 6 rounds" in (run.path / "table.md").read_text()
    assert stopping.best == metric_of("best_class").of(trial)


class Measures(fedkeep.Callback):
    """Measures what NumPy and PyTorch compute."""

    def on_round_end(self, state: Any, result: Any) -> tuple[bool, dict[str, Any]]:
        return False, {"single": np.float32(0.5), "whole": np.int64(3), "tensor": torch.tensor(2.0)}


def test_a_callback_may_measure_numbers_of_numpy_and_pytorch(tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg"], rounds=1)
    (trial,) = fedkeep.run(recipe, out=tmp_path / "run", callbacks=[Measures()]).trials
    assert trial.rounds[0]["measured"] == {"single": 0.5, "whole": 3.0, "tensor": 2.0}


def test_accuracy_is_no_name_of_a_metric_and_the_error_says_what_is() -> None:
    with pytest.raises(RunError, match=r"'accuracy'.*its names: window_mean"):
        fedkeep.EarlyStopping(metric="accuracy")
    with pytest.raises(ConfigError, match=r"'accuracy'.*by accuracy if no metric is named"):
        check_main("accuracy")


def test_curves_of_a_run_with_tasks_have_a_point_wherever_there_is_a_value(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rounds = [[2], [8], [1, 9], [2, 8], [0, 8, 10], [0, 8, 4]]
    rows = {number: {"measured": {"mine": float(number)}} for number in range(1, 7)}
    write_trial(folder, "FedLwF", 0, rounds, total=(10, 10, 10), tasks=[1, 1, 1], rows=rows)
    (trial,) = read_run(folder).trials
    assert history([trial], "log.mine")[1].tolist() == [[1, 2, 3, 4, 5, 6]]
    numbers, values = history([trial], "task_accuracy")
    assert numbers.tolist() == [2, 4, 6]
    np.testing.assert_allclose(values, [[80.0, 50.0, 40.0]])
    assert history([trial], "incremental")[0].tolist() == [2, 4, 6]
    assert METRICS["train_seconds"].by_evaluation(trial) == {number: 2.5 * number for number in range(1, 7)}


def test_a_metric_of_a_series_is_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Metric("late", "late", "%", better=1, series=lambda trial: {1: 0.25, 2: 0.75})
    monkeypatch.setitem(METRICS, "late", late)  # which is taken away after the test
    add_metric(late)
    assert metric_of("late").of(None) == 0.5
    broken = Metric("broken", "broken", series=lambda trial: 1 / 0)
    with pytest.raises(RunError, match="the metric 'broken' raised ZeroDivisionError for"):
        broken.of(SimpleNamespace(label="FedAvg", seed=0))
