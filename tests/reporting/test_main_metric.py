"""The metric that a recipe names decides in tables, figures, early stopping and tuning; without one nothing changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from synthetic_run import read_run, write_run, write_trial

import fedkeep
from fedkeep.errors import ConfigError, RunError
from fedkeep.reporting.figures import history
from fedkeep.reporting.findings import findings
from fedkeep.reporting.html import render
from fedkeep.reporting.metric import METRICS, Metric, check_main, columns_for, headline
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import Spread, summary
from fedkeep.reporting.table import latex, markdown, print_table, show, trials_csv
from fedkeep.reporting.trial import TrialResult
from fedkeep.rounds.run_settings import RunSettings

RANKED = {"FedAvg": [0.6, 0.7, 0.7, 0.7], "FedSeq": [0.5, 0.8, 0.9, 0.9]}


def scored_run(folder: Path, metric: str = "auroc") -> Run:
    """Return a run of two methods with equal accuracy, of which FedSeq ranks better."""
    write_run(folder)
    for label, values in RANKED.items():
        for seed in (0, 1):
            trial = write_trial(folder, label, seed, [[90, 1]] * 4, total=[90, 10])
            info = json.loads((trial / "trial.json").read_text())
            (trial / "trial.json").write_text(json.dumps(info | {"metric": metric}))
            rows = [json.loads(line) for line in (trial / "rounds.jsonl").read_text().splitlines()]
            for row, auroc in zip(rows, values, strict=True):
                row["scores"] = {"auroc": auroc + seed / 100, "f1": 0.5, "ece": None, "specificity": [0.1, 1.0]}
            (trial / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(folder)


def test_it_comes_first_in_tables_and_in_the_report(tmp_path: Path) -> None:
    run = scored_run(tmp_path / "run")
    rows = summary(run)
    names = [metric.name for metric in columns_for(run.trials)]
    assert names[:3] == ["auroc", "window_mean", "window_forgetting"]
    assert names[3:7] == ["balanced_accuracy", "f1", "ece", "specificity"]
    assert [metric.name for metric in headline(run.trials)] == ["auroc", "window_forgetting"]
    assert markdown(rows).splitlines()[0].startswith("| method | seeds | AUROC, rounds 3–4 | accuracy, rounds 3–4 |")
    assert ",auroc," in trials_csv(rows).splitlines()[0]
    page = render(run)
    assert "AUROC, rounds 3–4: FedSeq (" in page
    assert '<h3 id="chart-auroc">AUROC over rounds, %</h3>' in page
    assert '<span class="note">specificity</span>' in page
    assert "AUROC" in str(print_table(rows).columns[1].header)
    assert len(print_table(rows, width=60).columns) == 4, "labels have room; the report has the other scores"
    assert "in the report" in str(print_table(rows, width=60).caption)
    assert "in the report" not in str(print_table(rows, width=200).caption)
    rounds, values = history([trial for trial in run.trials if trial.label == "FedSeq"][:1], "auroc")
    assert rounds.tolist() == [1, 2, 3, 4]
    assert values == pytest.approx(100 * np.asarray([RANKED["FedSeq"]]))
    first = run.trials[0]
    assert list(first.class_specificity.values()) == [0.1, 1.0]
    assert METRICS["specificity"].of(first) == pytest.approx(0.55)
    assert np.isnan(METRICS["ece"].of(first))
    assert first.learned  # AUROC is above chance, and the majority's share of accuracy is not
    assert not read_run(plain(tmp_path / "plain")).trials[0].learned


def spread_out(trial: TrialResult) -> float:
    """Return a small number that is no percentage."""
    return (0.0242 if trial.algorithm == "fedavg" else 0.01) + trial.seed / 1000


def test_a_metric_of_ones_own_has_its_own_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Metric("spread_out", "divergence", "", spread_out, better=-1)
    monkeypatch.setitem(METRICS, own.name, own)
    run = scored_run(tmp_path / "run", own.name)
    rows = summary(run)
    assert [metric.name for metric in columns_for(run.trials)].count(own.name) == 1
    shown = markdown(rows)
    assert "all but costs and divergence in %." in shown
    assert "| 0.0247 ±0.0007071 [0.01835, 0.03105] |" in shown
    assert "| FedSeq | -0.0142 [-0.0142, -0.0142] |" in shown
    assert "in percentage points, divergence in its own numbers." in shown
    assert str(print_table(rows, width=60).columns[1].header).startswith("diverge"), "methods are compared by it"
    assert "divergence" in latex(rows)
    (said, *_) = findings(rows)
    assert said.startswith("Divergence: FedSeq (0.0105) is 0.0142 below FedAvg (0.0247; 95 % interval 0.0142 to 0.0142")
    page = render(run)
    assert "row minus column: the mean" in page
    assert "+0.0142" not in page
    assert show(Spread.of([0.024]), "") == "0.0", "epsilon and the like are as they were"


def plain(folder: Path) -> Path:
    """Write a run that names no metric."""
    write_run(folder)
    write_trial(folder, "FedAvg", 0, [[90, 1]] * 4, total=[90, 10])
    return folder


def test_without_it_nothing_is_measured_or_shown(tmp_path: Path) -> None:
    run = read_run(plain(tmp_path / "run"))
    assert not {metric.name for metric in columns_for(run.trials)} & {"auroc", "balanced_accuracy"}
    assert "auroc" not in trials_csv(summary(run)).splitlines()[0]
    assert "scores" not in tiny.simulation(fedkeep.FedAvg(), rounds=1).run_round().record


def test_evaluations_record_it_and_early_stopping_waits_for_it() -> None:
    simulation = tiny.simulation(fedkeep.FedAvg(), rounds=2, metric="auroc")
    stopping = fedkeep.EarlyStopping(patience=1)
    stopping.on_trial_begin(simulation)
    result = simulation.run_round()
    found = result.record["scores"]
    assert set(found) == {"f1", "auroc", "ece", "specificity"}
    stopping.on_round_end(simulation, result)
    assert stopping.best == pytest.approx(found["auroc"])
    for gain, stops in ((0.01, False), (0.01, True)):
        scores = {"scores": found | {"auroc": found["auroc"] + gain}}
        assert stopping.on_round_end(simulation, replace(result, record=result.record | scores)) == (stops, {})
    with pytest.raises(ConfigError, match="does not go with tasks"):
        fedkeep.EarlyStopping().on_trial_begin(tiny.simulation_with_tasks(fedkeep.FedLwF(), metric="f1"))


def test_early_stopping_on_what_is_not_measured_is_refused() -> None:
    simulation = tiny.simulation(fedkeep.FedAvg(), rounds=2)
    with pytest.raises(ConfigError, match=r"auroc, which evaluations do not measure. Set metric=\"auroc\""):
        fedkeep.EarlyStopping(metric="auroc").on_trial_begin(simulation)
    stopping = fedkeep.EarlyStopping(patience=1, metric="client_worst")
    stopping.on_trial_begin(simulation)
    assert stopping.on_round_end(simulation, simulation.run_round()) == (False, {})
    with pytest.raises(ConfigError, match="client_worst, which 2 evaluations in a row did not measure"):
        stopping.on_round_end(simulation, simulation.run_round())


def test_seeds_that_end_early_are_one_row(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    for seed, rounds in ((0, 4), (1, 6)):
        write_trial(tmp_path / "run", "FedAvg", seed, [[90, 1]] * rounds, total=[90, 10], rounds=12)
    (row,) = summary(read_run(tmp_path / "run"))
    assert row.label == "FedAvg"
    assert row.note.startswith("ended after 4 to 6 of 12 rounds in 2 of 2 seeds")
    write_run(tmp_path / "other")
    write_trial(tmp_path / "other", "FedAvg", 2, [[90, 1]] * 12, total=[90, 10])
    rows = summary([read_run(tmp_path / name) for name in ("run", "other")])
    assert [row.label for row in rows] == ["FedAvg (window=7-12, may end early)", "FedAvg (window=7-12)"]
    assert [len(row.trials) for row in rows] == [2, 1], "a run without the callback is no seed of it"
    write_run(tmp_path / "more")
    write_trial(tmp_path / "more", "FedAvg", 3, [[90, 1]] * 5, total=[90, 10], rounds=12)
    (row,) = summary([read_run(tmp_path / name) for name in ("run", "more")])
    assert row.label == "FedAvg"
    assert len(row.trials) == 3


def test_a_name_that_ranks_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'aurok'. Did you mean 'auroc'"):
        check_main("aurok")
    with pytest.raises(ConfigError, match="no metric that ranks methods: 'up'"):
        check_main("up")
    check_main("")
    for metric in METRICS.values():
        assert metric.meaning
    with pytest.raises(RunError, match="There are no curves of 'aurok'"):
        history([], "aurok")
    assert RunSettings().metric == ""


def test_accuracy_is_accuracy_whatever_the_run_is_ranked_by(tmp_path: Path) -> None:
    run = fedkeep.run(
        tiny.write_recipe(tmp_path), methods=["fedavg", "fedseq"], seeds=2, metric="ece", out=tmp_path / "run"
    )
    by = {name: run.compare("FedSeq", "FedAvg", name).values for name in (None, "ece", "accuracy", "window_mean")}
    assert by[None] == by["ece"] != by["accuracy"] == by["window_mean"]


def test_early_stopping_watches_local_models_and_refuses_no_patience(tmp_path: Path) -> None:
    settings = ["run.evaluate_local_models=true"]
    run = fedkeep.run(
        tiny.write_recipe(tmp_path), methods=["fedavg"], rounds=8, settings=settings, out=tmp_path / "run",
        callbacks=[fedkeep.EarlyStopping(1, "kold_out")],
    )  # fmt: skip
    assert 2 <= run["FedAvg"].rounds_done <= 8
    for patience in (0, -1, "3", None, 2.5):
        with pytest.raises(ConfigError, match=f"at least 1 evaluation: patience is {patience!r}"):
            fedkeep.EarlyStopping(patience)
