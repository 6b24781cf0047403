"""Where the time went."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from rich.console import Console

import fedkeep
from fedkeep.reporting.table import profile_table, shares, step_table


def test_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    recipe = fedkeep.load_recipe(tiny.write_recipe(tmp_path), settings=['run.evaluation_models=["last", "moving"]'])
    run = fedkeep.run(recipe, out=tmp_path / "run")
    for trial in run.trials:
        parts = shares(trial)
        whole = parts.pop("whole")
        assert sum(parts.values()) == pytest.approx(whole)
        assert 0 < parts["training"] < whole
        assert parts["evaluation"] > 0
    console = Console(width=140, record=True, file=(tmp_path / "out").open("w"))
    console.print(profile_table(run))
    output = console.export_text()
    assert output.count("SFedKD") == 1, "an average that was served took no time of its own"
    assert all(
        part in output for part in ("training", "teachers", "server", "evaluation", "saving", "the rest", "whole")
    )


def test_steps_and_the_server_by_task(tmp_path: Path) -> None:
    changes = ["tasks.num_tasks=3", "tasks.num_classes=9", "algorithm.ce_classes=all"]
    text = tiny.RECIPE.replace('algorithm = "fedavg"', 'algorithm = "finetune"')
    recipe = fedkeep.load_recipe(tiny.write_recipe(tmp_path, text), methods=["finetune"], settings=changes)
    run = fedkeep.run(recipe, out=tmp_path / "run")
    (trial,) = run.trials
    assert trial.steps == ["train"]
    by_task = trial.task_seconds("step train")
    assert len(by_task) == 3
    assert sum(by_task) == pytest.approx(trial.seconds("step train"))
    assert trial.seconds("train") + trial.seconds("teachers") <= trial.seconds("step train")
    assert trial.task_seconds("no such part") == [0.0] * 3
    console = Console(width=140, record=True, file=(tmp_path / "out").open("w"))
    console.print(step_table(run))
    output = console.export_text()
    assert all(word in output for word in ("train", "server", "task 1", "task 2", "task 3"))
    assert f"{by_task[1]:.1f}" in output
