"""The rows of the result table: what merges, what stays apart, and every rendering of it."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import RECIPE, read_run, write_run, write_trial

from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.options import as_table
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import Spread, summary
from fedkeep.reporting.table import human_bytes, markdown, print_table, show, trials_csv


@pytest.fixture
def two_methods(tmp_path: Path) -> Run:
    """FedAvg 50, 60 % and SFedKD 70, 65, 90 % in their only evaluation, seeds 0 to 2; FedAvg's third is unfinished."""
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [None, [5, 5]])
    write_trial(run, "FedAvg", 1, [None, [6, 6]])
    write_trial(run, "FedAvg", 2, [[1, 1]], finished=False, planned=2)
    for seed, (one, two) in enumerate([(7, 7), (7, 6), (9, 9)]):
        write_trial(run, "SFedKD", seed, [None, [one, two]])
    return read_run(run)


def test_means_and_deviations_over_seeds(two_methods: Run) -> None:
    fedavg, unfinished, sfedkd = summary(two_methods)
    assert fedavg.value("last").mean == pytest.approx(0.55)
    assert fedavg.value("last").std == pytest.approx(0.1 / math.sqrt(2))
    assert (fedavg.value("last").n, fedavg.seeds) == (2, (0, 1))
    assert sfedkd.value("last").mean == pytest.approx(0.75)
    assert sfedkd.value("last").std == pytest.approx(math.sqrt((0.05**2 + 0.1**2 + 0.15**2) / 2))
    assert not unfinished.finished
    assert unfinished.name == "FedAvg (seed 2, 1 of 2 rounds)"
    assert unfinished.value("last").mean == pytest.approx(0.1)


def test_seeds_of_several_runs_merge_and_a_repeated_seed_counts_once(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, recipe=RECIPE.replace("[0, 1]", seeds)) for name, seeds in
             (("a", "[0, 1]"), ("b", "[1, 2]"))]  # fmt: skip
    for path, seeds in zip(paths, ((0, 1), (1, 2)), strict=True):
        for seed in seeds:
            write_trial(path, "FedAvg", seed, [[seed, seed]])
    (row,) = summary(map(read_run, paths))
    assert (row.label, row.seeds) == ("FedAvg", (0, 1, 2))


def test_different_options_under_one_label_stay_apart_and_say_so(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    write_trial(one, "SFedKD", 0, [[1, 1]], options={"teachers": 3, "temperature": 4.0})
    write_trial(two, "SFedKD", 0, [[2, 2]], options={"teachers": 5, "temperature": 4.0})
    write_trial(two, "FedAvg", 0, [[2, 2]])
    rows = summary([read_run(one), read_run(two)])
    assert [row.label for row in rows] == ["SFedKD (teachers=3)", "SFedKD (teachers=5)", "FedAvg"]
    assert [trial.label for row in rows for trial in row.trials] == [row.label for row in rows]


def test_an_option_that_came_later_was_at_its_default_before(tmp_path: Path) -> None:
    """A method gets new options, and trials of an older version do not name them."""
    run = write_run(tmp_path / "run")
    old = {"algorithm": "sfedkd", "options": {"teachers": 5}}
    now = {"algorithm": "sfedkd", "options": as_table(SFedKD())}
    other = {"algorithm": "sfedkd", "options": as_table(SFedKD(tau=4.0))}
    for seed, trial in enumerate((old, now, other)):
        write_trial(run, "SFedKD", seed, [[5, 5]], **trial)
    assert [(row.label, row.seeds) for row in summary(read_run(run))] == [
        ("SFedKD (tau=1.0)", (0, 1)),
        ("SFedKD (tau=4.0)", (2,)),
    ]


def test_an_option_of_a_recipe_that_came_later_was_at_its_default_before(tmp_path: Path) -> None:
    """So were those of a check that is off, whose defaults have changed since, and options that are no more."""
    old = (
        RECIPE.replace("lr = 0.1", "lr = 0.1\neps = 1e-08\nlr_step_size = 1")
        + '\n[defense]\nloss_check = "off"\nloss_examples = 4\nloss_slack = 0.1\nlogit_deviations = 3.0\n'
    )
    older = RECIPE
    now = (
        RECIPE.replace("lr = 0.1", 'lr = 0.1\nprecision = "float32"') + '\n[defense]\nloss_check = "off"\nbackoff = 8\n'
    )
    other = now.replace("float32", "bfloat16")
    runs = [
        write_run(tmp_path / name, recipe=text) for name, text in (("a", old), ("b", now), ("c", other), ("d", older))
    ]
    for seed, run in enumerate(runs):
        write_trial(run, "FedAvg", seed, [[5, 5]])
    assert [(row.label, row.seeds) for row in summary(map(read_run, runs))] == [
        ("FedAvg (precision=float32)", (0, 1, 3)),
        ("FedAvg (precision=bfloat16)", (2,)),
    ]


def test_a_learning_rate_of_a_method_itself_is_a_setting(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    write_trial(one, "FedAvg", 0, [[1, 1]])
    write_trial(two, "FedAvg", 1, [[2, 2]], training={"lr": 0.3})
    assert [row.label for row in summary([read_run(one), read_run(two)])] == ["FedAvg (lr=0.1)", "FedAvg (lr=0.3)"]


def test_different_recipes_rounds_and_partitions_stay_apart(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a"), write_run(tmp_path / "b", recipe=RECIPE.replace("= 0.1", "= 0.5"))
    write_trial(one, "FedAvg", 0, [[1, 1]])
    write_trial(two, "FedAvg", 1, [[2, 2]])
    labels = [row.label for row in summary([read_run(one), read_run(two)])]
    assert labels == ["FedAvg (lr=0.1)", "FedAvg (lr=0.5)"]
    other = RECIPE.replace('"mlp"', '"lenet5"').replace("evaluate_local_models = false", "evaluate_local_models = true")
    four = write_run(tmp_path / "d", recipe=other)
    write_trial(four, "FedAvg", 3, [[1, 1]])
    labels = [row.label for row in summary([read_run(one), read_run(four)])]
    assert labels == ["FedAvg (model=mlp)", "FedAvg (model=lenet5)"]
    three = write_run(tmp_path / "c", recipe=RECIPE.replace("rounds = 4", "rounds = 2"))
    write_trial(three, "FedAvg", 2, [[1, 1], [1, 1]])
    labels = [row.label for row in summary([read_run(one), read_run(three)])]
    assert labels == ["FedAvg (rounds=1)", "FedAvg (rounds=2)"]


@pytest.mark.parametrize(
    ("line", "labels"),
    [
        ("validation = 0.1", ["FedAvg (validation=0.0)", "FedAvg (validation=0.1)"]),
        ('scaling = "none"', ["FedAvg (scaling=standard)", "FedAvg (scaling=none)"]),
        ("size = [8, 8]", ["FedAvg (size=[])", "FedAvg (size=[8, 8])"]),
        ('scaling = "standard"\nlength = 64', ["FedAvg"]),
    ],
)
def test_results_on_other_data_stay_apart(tmp_path: Path, line: str, labels: list[str]) -> None:
    """Held-out images are no test images; an option at its default is as good as left out, and a path is no setting."""
    one = write_run(tmp_path / "a")
    two = write_run(tmp_path / "b", recipe=RECIPE.replace('name = "digits"', f'name = "/home/me/digits"\n{line}'))
    write_trial(one, "FedAvg", 0, [[1, 1]])
    write_trial(two, "FedAvg", 1, [[2, 2]])
    assert [row.label for row in summary([read_run(one), read_run(two)])] == labels


def test_a_window_that_does_not_follow_from_the_rounds_is_named(tmp_path: Path) -> None:
    runs = []
    for seed, (rounds, window) in enumerate([(4, 0.5), (8, 0.5), (4, 1)]):
        recipe = RECIPE.replace("rounds = 4", f"rounds = {rounds}\nevaluation_window = {window}")
        run = write_run(tmp_path / f"run{seed}", recipe=recipe)
        write_trial(run, "FedAvg", seed, [[5, 5]] * rounds)
        runs.append(read_run(run))
    assert [(row.label, row.seeds) for row in summary(runs)] == [
        ("FedAvg (rounds=4, window=3-4)", (0,)),
        ("FedAvg (rounds=8)", (1,)),
        ("FedAvg (rounds=4, window=4-4)", (2,)),
    ]


def test_options_of_a_method_and_of_a_recipe_with_one_name_are_both_named(tmp_path: Path) -> None:
    runs = []
    for seed, (own, local) in enumerate([(0.9, 0.0), (0.5, 0.0), (0.9, 0.5)]):
        run = write_run(tmp_path / f"run{seed}", recipe=RECIPE.replace("lr = 0.1", f"lr = 0.1\nmomentum = {local}"))
        write_trial(run, "FedAvgM", seed, [[5, 5]], options={"momentum": own})
        runs.append(read_run(run))
    assert [(row.label, row.seeds) for row in summary(runs)] == [
        ("FedAvgM (momentum=0.9, training.momentum=0.0)", (0,)),
        ("FedAvgM (momentum=0.5)", (1,)),
        ("FedAvgM (momentum=0.9, training.momentum=0.5)", (2,)),
    ]


def test_two_results_of_one_seed_are_told_apart_by_run(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "monday"), write_run(tmp_path / "tuesday")
    write_trial(one, "FedAvg", 0, [[1, 1]])
    write_trial(two, "FedAvg", 0, [[2, 2]])
    labels = [row.label for row in summary([read_run(one), read_run(two)])]
    assert labels == ["FedAvg (run monday)", "FedAvg (run tuesday)"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9996, "10.0 kB"), (99960, "100 kB"), (244_000, "244 kB"),
     (999_600, "1.00 MB"), (1_240_000, "1.24 MB"), (3.2e9, "3.20 GB"), (5e15, "5000 TB"), (float("nan"), "–")],
)  # fmt: skip
def test_bytes_in_units_that_read_at_a_glance(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_values_are_shown_in_the_unit_of_their_column() -> None:
    assert show(Spread(0.83664, 0.0142, 3), "%") == "83.66 ±1.42"
    assert show(Spread(0.83664, float("nan"), 1), "%") == "83.66"
    assert show(Spread(1234.56, 7.0, 2), "s") == "1,234.6 ±7.0"
    assert show(Spread(float("nan"), float("nan"), 0), "%") == "–"


def test_terminal_table_has_every_number_and_prints_nothing(
    two_methods: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    table = print_table(summary(two_methods), width=140)
    assert capsys.readouterr().out == ""
    console = Console(width=140, file=io.StringIO(), color_system=None)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "55.00 ±7.07",
        "75.00 ±13.23",
        "1 of 2 rounds",
        "accu-",
        "Unfinished seeds",
        "1.00 kB",
        "500 B",
    ):
        assert part in text
    narrow = Console(width=70, file=io.StringIO(), color_system=None)
    narrow.print(table)
    assert max(map(len, narrow.file.getvalue().splitlines())) <= 70  # type: ignore[attr-defined]
    usual = Console(width=80, file=io.StringIO(), color_system=None)
    usual.print(print_table(summary(two_methods), width=80))
    lines = {line.strip() for line in usual.file.getvalue().splitlines()}  # type: ignore[attr-defined]
    assert {"at chance in 2 of 2 seeds", "at chance in 1 of 3 seeds"} <= lines, "notes are whole"


def test_labels_are_not_read_as_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "[bold]a|b*<b>", 0, [[9, 9]])
    rows = summary(read_run(run))
    console = Console(width=140, file=io.StringIO(), color_system=None)
    console.print(print_table(rows))
    assert "[bold]a|b*<b>" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "| \\[bold\\]a\\|b\\*&lt;b> | 1 |" in markdown(rows)


def test_markdown_marks_the_best(two_methods: Run) -> None:
    text = markdown(summary(two_methods))
    lines = text.splitlines()
    assert lines[0].startswith("| method | seeds | accuracy, round 2 | last | best | forgetting, round 2 | train s |")
    assert {line.count("|") for line in lines[:5]} == {10}
    assert "| FedAvg (at chance in 2 of 2 seeds) | 2 | 55.00 ±7.07 [-8.53, 118.53] |" in text
    assert "| SFedKD (at chance in 1 of 3 seeds) | 3 | 75.00 ±13.23 [" in text
    assert "| FedAvg (seed 2, 1 of 2 rounds) | – | – | 10.00 |" in text


def test_csv_keeps_full_precision(two_methods: Run) -> None:
    trials = list(csv.DictReader(io.StringIO(trials_csv(summary(two_methods)))))
    assert [(row["method"], row["seed"], row["last"]) for row in trials][:2] == [
        ("FedAvg", "0", "0.5"),
        ("FedAvg", "1", "0.6"),
    ]
    assert trials[2]["finished"] == "no"
    assert trials[2]["forgetting"] == ""
    assert (trials[2]["rounds"], trials[2]["rounds_planned"]) == ("1", "2")
