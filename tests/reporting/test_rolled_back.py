"""A run in which clients were lost or rounds rolled back says so wherever its numbers stand."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

import fedkeep
from fedkeep.reporting.html import _costs, _lost
from fedkeep.reporting.reproduction import ColumnResult, column_table
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import deduplicate, summary, trials_of
from fedkeep.reporting.table import caption, markdown


@pytest.fixture
def rolled_back_run(tmp_path: Path) -> Run:
    """A run whose every reply is refused, with an average served beside the model."""
    recipe = tmp_path / "tiny.toml"
    paper = '\n[paper]\ntable = "toy"\naccuracy = { FedAvg = [50.0], FedSeq = [60.0] }\n'
    recipe.write_text(tiny.RECIPE + paper)
    settings = ["training.lr=1e30", 'run.evaluation_models=["last", "moving"]']
    return fedkeep.run(
        str(recipe), methods=[fedkeep.FedAvg(), fedkeep.FedSeq()], settings=settings, out=tmp_path / "run", rounds=3
    )


def test_a_table_says_what_was_rolled_back(rolled_back_run: Run) -> None:
    rows = summary(rolled_back_run)
    for row in rows:
        assert row.finished
        assert row.broken
        assert row.note == f"at chance, {len(row.trials[0].rolled_back)} of 3 rounds rolled back"
    trials = deduplicate(trials_of(rows))
    lost, asked = (
        sum(len(trial.lost) for trial in trials),
        sum(len(r["cohort"]) for trial in trials for r in trial.rounds),
    )
    assert lost >= sum(len(trial.rolled_back) for trial in trials) >= 4, "the first round may end with finite weights"
    refused = sum(len(trial.refused) for trial in trials)
    assert refused == lost
    assert f"{lost} of {asked} clients asked were lost, {refused} of them since their reply was" in caption(rows)
    assert "of 3 rounds rolled back)" in markdown(rows)


def test_what_was_run_once_counts_once(rolled_back_run: Run) -> None:
    rows = summary(rolled_back_run)
    assert [trial.label for trial in deduplicate(trials_of(rows))] == ["FedAvg", "FedSeq"]
    assert len(rows) == 4
    assert [line[0].split("\n")[0] for line in _costs(rows).lines] == ["FedAvg", "FedSeq"]
    output = _lost(rows)
    assert output["rolled_back"] == sum(len(set(row.trials[0].rolled_back)) for row in rows) / 2, (
        "not once for each average"
    )
    assert output["refused"][0].startswith("client ")
    assert output["clients"] == sum(len(row.trials[0].lost) for row in rows) / 2


def test_the_report_names_clients_that_are_set_aside(tmp_path: Path) -> None:
    settings = [
        "attack.kind=false_counts",
        "attack.share=0.2",
        "run.cohort_size=8",
        "defense.refusals=2",
        "defense.backoff=0",
    ]
    recipe = tiny.write_recipe(tmp_path)
    run = fedkeep.run(recipe, methods=[fedkeep.FedAvg()], settings=settings, out=tmp_path / "run", rounds=3)
    (trial,) = run.trials
    aside = trial.rounds[-1]["set_aside"]
    assert len(aside) == 2
    assert f"{', '.join(aside)} of FedAvg, seed 0" in _lost(summary(run))["set_aside"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(f"client {client} in 2 rounds of FedAvg, seed 0" in page for client in aside)
    assert "set aside" in page


def test_what_was_rolled_back_agrees_with_no_paper(rolled_back_run: Run) -> None:
    column = ColumnResult("toy", rolled_back_run)
    assert column.agreement == (0, 0, 0, 0)
    line = column.line("FedAvg")
    assert line.row is not None
    assert column_table(column).lines[0][0] == f"FedAvg ({line.row.note})"
