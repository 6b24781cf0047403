"""Recipes with tasks: what is refused, what a run folder holds, and what the tables show."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tiny

import fedkeep
from fedkeep.cli.main import main
from fedkeep.data import Tasks
from fedkeep.errors import ConfigError
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import Machine
from fedkeep.experiment.runtime import Progress
from fedkeep.reporting.metric import METRICS
from fedkeep.reporting.reproduction import read_reproduction
from fedkeep.reporting.summary import summary
from fedkeep.reporting.table import markdown, trials_csv

RECIPE = tiny.RECIPE.replace(
    'scheme = "exdir"\nnum_clients = 8\nclasses_per_client = 2\nalpha = 0.5', 'scheme = "iid"\nnum_clients = 4'
)
RECIPE = RECIPE + "\n[tasks]\nnum_tasks = 3\nnum_classes = 6\n"


def recipe(folder: Path, text: str = RECIPE) -> str:
    return tiny.write_recipe(folder, text)


def test_a_run_says_what_arrived_when_and_its_tables_what_was_kept(tmp_path: Path) -> None:
    seen: list[Progress] = []
    run = fedkeep.run(
        recipe(tmp_path), methods=[fedkeep.FedAvg()], out=tmp_path / "run", on_progress=seen.append, rounds=2
    )
    (trial,) = run.trials
    assert trial.task_sizes == [2, 2, 2]
    assert trial.rounds_planned == 6
    assert [(row["task"], row["round"]) for row in trial.rounds] == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6)]
    assert trial.task_matrix.shape == (3, 3)
    assert bool((np.triu(trial.task_matrix, 1) == 0).all()), "a task before it is learned"
    correct = np.asarray(trial.rounds[-1]["correct"]).reshape(3, 2).sum(1)
    total = np.asarray(trial.info["test_total"]).reshape(3, 2).sum(1)
    np.testing.assert_allclose(trial.task_matrix[-1], correct / total)
    assert trial.task_accuracy == pytest.approx(float(np.mean(correct / total)))
    after = [trial.task_matrix[t, : t + 1].mean() for t in range(3)]
    assert METRICS["incremental"].of(trial) == pytest.approx(float(np.mean(after)))
    assert trial.accuracies[1] == pytest.approx(trial.task_matrix[0, 0]), "among the images of the classes seen"
    assert bool(np.isnan(trial.class_history[0, 2:]).all())
    partition = json.loads((tmp_path / "run/trials/fedavg-seed0/partition.json").read_text())
    assert [len(task["classes"]) for task in partition["tasks"]] == [2, 2, 2]
    assert np.asarray(partition["counts"]).shape == (4, 6)
    assert [step.done for step in seen] == [1, 2, 3, 4, 5, 6]
    assert [step.rounds for step in seen] == [6] * 6
    assert seen[1].test_total < seen[-1].test_total == sum(trial.info["test_total"])
    text = markdown(summary(run))
    heads = ("mean over tasks, round 2 of each task", "mean over tasks, after each", "after the last task")
    assert f"| {' | '.join(heads)} | forgetting from the best | forgetting a task |" in text
    (line,) = csv.DictReader(trials_csv(summary(run)).splitlines())
    assert float(line["incremental"]) == pytest.approx(METRICS["incremental"].of(trial))
    a = trial.task_matrix
    assert float(line["backward"]) == pytest.approx((a[2, 0] - a[0, 0] + a[2, 1] - a[1, 1]) / 2)
    page = (run.path / "report.html").read_text()
    section = page[page.index('<h2 id="tasks">Accuracy by task</h2>') :].split("</section>")[0]
    shown = re.findall(r">([0-9]+\.[0-9])</td>", section)
    assert shown == [f"{100 * v:.1f}" for t in range(3) for v in (*a[t, : t + 1], after[t])]


def test_workers_and_resume_know_the_tasks(tmp_path: Path) -> None:
    whole = fedkeep.run(recipe(tmp_path), methods=[fedkeep.MOON()], out=tmp_path / "whole")

    def stop(progress: Progress) -> None:
        if progress.done == 3:  # in the middle of task 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(recipe(tmp_path), methods=[fedkeep.MOON()], out=tmp_path / "cut", on_progress=stop)
    again = fedkeep.resume(tmp_path / "cut", machine=Machine(workers=1))
    assert again.trials[0].rounds == whole.trials[0].rounds


def test_tasks_are_written_out_and_read_again(tmp_path: Path) -> None:
    one = load_recipe(recipe(tmp_path))
    assert one.tasks == Tasks(num_tasks=3, num_classes=6)
    assert one.rounds == 6
    again = load_recipe(tiny.write_recipe(tmp_path, one.to_toml(), "again.toml"))
    assert again.tasks == one.tasks
    assert "[tasks]" not in load_recipe("demo").to_toml()
    assert load_recipe("demo", settings=["tasks.num_tasks=5"]).tasks.num_tasks == 5


def test_an_auxiliary_set_would_know_the_future(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="before they arrive"):
        load_recipe(recipe(tmp_path, RECIPE + "\n[auxiliary]\nimages_per_class = 2\n"))


def test_an_impossible_stream_is_refused_before_any_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be cut into 4 tasks"):
        fedkeep.run(recipe(tmp_path, RECIPE.replace("num_tasks = 3", "num_tasks = 4")), out=tmp_path / "run")


def test_a_table_of_a_paper_is_compared_by_what_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    text = RECIPE.replace("rounds = 2", "rounds = 1").replace('title = "tiny"', 'title = "Paper, table 9: tiny"')
    printed = '\n[paper]\ntable = "Paper, table 9"\nmeasured = ["incremental", "forgetting_fedskf"]\n'
    numbers = "[paper.accuracy]\nFedAvg = [30.0]\nPASS = [20.0]\n[paper.forgetting]\nFedAvg = [12.0]\n"
    tiny.write_recipe(folder, text + printed + numbers, "column.toml")
    root = tmp_path / "out"
    assert main(["reproduce", str(folder), "--methods", "fedavg", "--out", str(root), "--data-dir", str(tmp_path)]) == 0
    (column,) = read_reproduction(root / "table").columns
    line = column.line("FedAvg")
    assert line.row is not None
    assert line.difference == pytest.approx(100 * line.row.value("incremental").mean - 30)
    page = (root / "table" / "table.md").read_text()
    assert "ours, mean over tasks" in page
    assert "measured after each task" in page
    assert "tasks" in capsys.readouterr().out


def test_methods_are_compared_over_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fedkeep.run(recipe(tmp_path), methods=[fedkeep.FedAvg(), fedkeep.FedLwF()], out=tmp_path / "run")
    assert main(["compare", str(run.path), "--against", "FedAvg"]) == 0
    assert "forgetting from the best" in " ".join(capsys.readouterr().out.split())
    report = (run.path / "report.html").read_text()
    assert "Mean over tasks, round 2 of each task, row minus column" in report
