"""Windows, paired differences and what may be called better, on runs whose numbers are worked out by hand."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from synthetic_run import RECIPE, read_run, write_json, write_run, write_trial

import fedkeep
from fedkeep.cli import main
from fedkeep.errors import RunError
from fedkeep.reporting.html import render
from fedkeep.reporting.metric import METRICS, rounds_covered
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import difference, differences, leaders, show_difference, summary
from fedkeep.reporting.table import caption, markdown
from fedkeep.reporting.trial import TrialResult

T1 = 12.706204736432095  # Student's t for 95 % with one degree of freedom


def write_twenty(run: Path, label: str, seed: int, corrects: list[int]) -> None:
    """Write a trial with these correct predictions, of twenty, round by round: of ten classes with two examples each.

    Guessing gives two of twenty, and up to four cannot be told from it.
    """
    by_class = [[min(2, max(0, correct - 2 * c)) for c in range(10)] for correct in corrects]
    write_trial(run, label, seed, by_class, total=[2] * 10, counts=[[1] * 10] * 2)


def seeds(path: Path, **methods: list[int]) -> Run:
    """Write a run whose methods have these correct predictions, of twenty, in their only round, by seed."""
    run = write_run(path, recipe=RECIPE.replace("rounds = 4", "rounds = 1"))
    for label, values in methods.items():
        for seed, value in enumerate(values):
            write_twenty(run, label, seed, [value])
    return read_run(run)


def series(path: Path, **methods: list[int]) -> Run:
    """Write a run of one seed whose methods have these correct predictions, of twenty, round by round."""
    run = write_run(path)
    for label, values in methods.items():
        write_twenty(run, label, 0, values)
    return read_run(run)


def test_a_reference_is_the_method_with_its_very_name(tmp_path: Path) -> None:
    row, *_ = summary(seeds(tmp_path / "run", FedAvg=[10, 12]))
    rows = [replace(row, label=label) for label in ("Fed_Avg", "fed_avg")]
    for reference, other in (("Fed_Avg", "fed_avg"), ("fed_avg", "Fed_Avg")):
        assert [found.label for found in differences(rows, reference)] == [other]
    assert differences(rows[:1], "FED_AVG") == []


def test_an_accuracy_that_is_the_target_reaches_it() -> None:
    info = {"algorithm": "fedavg", "seed": 0, "test_total": [500, 500], "rounds": 1}
    for k in range(1, 1001):
        record = {"round": 1, "correct": [min(k, 500), max(k - 500, 0)], "test_loss": 1.0}
        trial = TrialResult("A", [record], [], {}, info, True)
        assert trial.rounds_to(k / 10 / 100) == 1
        assert math.isnan(trial.rounds_to((k + 0.1) / 10 / 100))


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    rows = summary(seeds(tmp_path / "run", FedAvg=[10, 12], SFedKD=[14, 15, 18]))
    (found,) = differences(rows, "FedAvg")
    assert (found.label, found.reference, found.seeds) == ("SFedKD", "FedAvg", (0, 1))
    assert found.values == pytest.approx((0.2, 0.15))
    half = T1 * 0.05 / math.sqrt(2) / math.sqrt(2)
    assert (found.interval.low, found.interval.high) == pytest.approx((0.175 - half, 0.175 + half))
    assert show_difference(found) == "+17.50 [-14.27, +49.27], not separated"
    assert differences(rows, "fedavg") == [found], "case does not matter"
    with pytest.raises(RunError, match="Did you mean 'FedAvg'"):
        differences(rows, "fedagv")
    with pytest.raises(RunError, match="no metric 'window_meen'"):
        differences(rows, "FedAvg", "window_meen")


def test_the_best_mean_leads_only_where_an_interval_separates_it(tmp_path: Path) -> None:
    apart = summary(seeds(tmp_path / "a", FedAvg=[8, 10], FedSeq=[9, 11], SFedKD=[13, 15]))
    assert leaders(apart, "window_mean") == {2}
    assert "**70.00 ±7.07**" in markdown(apart)
    assert "Bold: better than every other method by the 95 % interval" in caption(apart)
    near = summary(seeds(tmp_path / "b", FedAvg=[8, 10], FedSeq=[12, 15], SFedKD=[13, 15]))
    assert leaders(near, "window_mean") == set(), "SFedKD is above FedAvg, and not separated from FedSeq"
    assert "**" not in markdown(near)
    assert leaders(near, "train_seconds") == set(), "what is not ranked has no best"


def test_what_has_not_learned_stands_in_no_table_of_differences(tmp_path: Path) -> None:
    """It forgets nothing, by an interval that leaves out 0."""
    run = seeds(tmp_path / "run", FedAvg=[2, 2], FedSeq=[10, 11], SFedKD=[15, 17])
    rows = summary(run)
    text = markdown(rows)
    assert "| minus FedSeq | accuracy, round 1 |" in text, "the first that can be compared"
    assert "| FedAvg | at chance | at chance | – |" in text
    assert "| SFedKD | reference at chance | reference at chance | – |" in markdown(rows, "FedAvg")
    assert render(run).count("<td>reference at chance</td>") == 2


def test_a_window_with_rounds_rolled_back_wins_no_comparison(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for seed in range(2):
        write_trial(run, "FedAvg", seed, [[8, 8]] * 4)
        write_trial(run, "FedSeq", seed, [[7, 7]] * 4)
        write_trial(run, "SFedKD", seed, [[9, 9]] * 4, rows={4: {"rolled_back": True}})
    rows = summary(read_run(run))
    assert leaders(rows, "window_mean") == {0}
    assert "| SFedKD | rolled back | rolled back | – |" in markdown(rows)
    assert "A method of whose window rounds were rolled back is compared with no other." in caption(rows)


def test_one_seed_without_a_series_leads_nothing(tmp_path: Path) -> None:
    rows = summary(seeds(tmp_path / "run", FedAvg=[2], SFedKD=[20]))
    assert leaders(rows, "window_mean") == leaders(rows, "last") == set()
    assert show_difference(difference(rows[1], rows[0], "window_mean")) == "+90.00, no interval"


def test_forgetting_is_better_low(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for seed in range(2):
        write_trial(run, "FedAvg", seed, [[10, 10], [4, 10]])
        write_trial(run, "FedSeq", seed, [[7, 7], [7, 7]])
    rows = summary(read_run(run))
    assert leaders(rows, "window_forgetting") == {1}


def test_within_one_seed_blocks_of_the_window_stand_for_seeds_and_say_so(tmp_path: Path) -> None:
    # The last ten of twenty rounds count; differences there: 1, 1, 2, 2, 1, 1, 2, 2, 1, 1 of twenty, in five blocks.
    gains = [9] * 10 + [1, 1, 2, 2, 1, 1, 2, 2, 1, 1]
    run = series(tmp_path / "run", FedAvg=[5] * 20, SFedKD=[5 + gain for gain in gains])
    rows = summary(run)
    found = difference(rows[1], rows[0], "window_mean")
    half = 2.7764451051977987 * math.sqrt(0.3) / math.sqrt(5) / 20
    assert found.interval.blocks
    assert found.interval.mean == pytest.approx(1.4 / 20)
    assert (found.interval.low, found.interval.high) == pytest.approx((1.4 / 20 - half, 1.4 / 20 + half))
    assert show_difference(found) == "+7.00 [+3.60, +10.40]*"
    assert leaders(rows, "window_mean") == {1}
    assert leaders(rows, "last") == set(), "a single number of one seed has no interval"
    page = " ".join(render(run).split())
    assert "+7.00 [+3.60, +10.40]*" in page
    assert "marked *" in page
    assert "(of one seed, from blocks of its evaluations)" in page


def test_blocks_of_a_moving_average_are_as_long_as_its_memory(tmp_path: Path) -> None:
    """Neighbouring averages have most models in common: in short blocks they would look like many results."""
    run = write_run(tmp_path / "run", recipe=RECIPE.replace("rounds = 4", "rounds = 160\nema_decay = 0.8"))
    for label, lead in (("FedAvg", 0), ("FedSeq", 1)):
        last = [[2] * 5 + [0] * 4 + [lead * (number % 2)] for number in range(160)]
        averages = {n + 1: {"evaluation_models": {"moving": {"correct": row}}} for n, row in enumerate(last)}
        write_trial(
            run, label, 0, last, total=[2] * 10, counts=[[1] * 10] * 2, rows=averages,
            evaluation_models=["last", "moving"],
        )  # fmt: skip
    rows = {row.label: row for row in summary(read_run(run))}
    pairs = [("FedSeq", "FedAvg"), ("FedSeq, moving average", "FedAvg, moving average")]
    blocks = [difference(rows[one], rows[other], "window_mean").interval.n for one, other in pairs]
    assert blocks == [10, 5], "of 80 evaluations: eight each, and fifteen, three times 1 / (1 - 0.8)"
    assert rows["FedSeq, moving average"].interval("window_mean").n == 5


def test_a_report_says_that_nothing_is_separated(tmp_path: Path) -> None:
    page = " ".join(render(seeds(tmp_path / "run", FedAvg=[8, 10], SFedKD=[9, 15])).split())
    assert "Accuracy, round 1: SFedKD (60.0 %) and FedAvg (45.0 %) are not separated with 2 seeds." in page
    assert "not separated" in page


def test_the_window_is_the_recipes(tmp_path: Path) -> None:
    for window, first in (("0.25", 4), ("3", 2), ("1", 4)):
        recipe = RECIPE.replace("rounds = 4", f"rounds = 4\nevaluation_window = {window}")
        run = write_run(tmp_path / window, recipe=recipe)
        write_trial(run, "FedAvg", 0, [[0, 0], [1, 1], [2, 2], [6, 6]])
        (trial,) = read_run(run).trials
        assert trial.window_rounds == (first, 4)
        assert trial.window_mean == pytest.approx({4: 0.6, 2: 0.3}[first])
        heading = "accuracy, round 4" if first == 4 else "accuracy, rounds 2–4"
        assert METRICS["window_mean"].heading([trial]) == heading
        assert f"| {heading} |" in markdown(summary(read_run(run)))


def test_a_part_of_a_window_is_not_shown_by_its_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[1, 1], [2, 2], [3, 3]], finished=False, planned=4)
    (trial,) = read_run(run).trials
    assert trial.window_rounds == (3, 4)
    assert math.isnan(trial.window_mean)
    assert trial.last == pytest.approx(0.3)


def test_windows_of_different_lengths_go_by_no_common_name_and_are_not_compared(tmp_path: Path) -> None:
    long, short = write_run(tmp_path / "long"), write_run(tmp_path / "short", recipe=RECIPE.replace("= 4", "= 2"))
    for seed in range(2):
        write_trial(long, "FedAvg", seed, [[1, 1], [2, 2], [3, 3], [4, 4]])
        write_trial(short, "SFedKD", seed, [[8, 8], [9, 9]])
    rows = summary([read_run(long), read_run(short)])
    text = markdown(rows)
    assert "| accuracy, rounds as named |" in text
    assert "| 35.00 ±0.00 (rounds 3–4) [35.00, 35.00] |" in text
    assert "| 90.00 ±0.00 (round 2) [" in text
    found = difference(rows[1], rows[0], "window_mean")
    assert found.seeds == ()
    assert show_difference(found) == "not comparable: windows differ"
    assert leaders(rows, "window_mean") == set()
    assert difference(rows[1], rows[0], "last").seeds == (0, 1), "a last accuracy is one of each"


def test_runs_of_one_method_with_different_windows_stay_apart(tmp_path: Path) -> None:
    runs = []
    for name, window in (("a", 0.5), ("b", 0.25)):
        run = write_run(
            tmp_path / name, recipe=RECIPE.replace("rounds = 4", f"rounds = 4\nevaluation_window = {window}")
        )
        write_trial(run, "FedAvg", len(runs), [[1, 1]] * 4)
        runs.append(read_run(run))
    assert [row.label for row in summary(runs)] == ["FedAvg (window=3-4)", "FedAvg (window=4-4)"]


def test_a_method_that_takes_turns_gives_all_methods_of_the_run_whole_turns(tmp_path: Path) -> None:
    """Three clients, all in every round: ten rounds' second half would cut a turn."""
    counts = [[8, 2], [0, 10], [5, 5]]
    run = write_run(tmp_path / "run")
    for label, algorithm in (("FedProx", "fedprox"), ("FedSKF", "fedskf")):
        info = {"algorithm": algorithm, "cohort_size": 3}
        write_trial(run, label, 0, [[r % 3, 0] for r in range(10)], counts=counts, **info)
    trials = read_run(run).trials
    assert [trial.window_rounds for trial in trials] == [(8, 10), (8, 10)]
    other = write_run(tmp_path / "other")
    write_trial(other, "FedSKF", 0, [[1, 1]] * 10, counts=counts, algorithm="fedskf", cohort_size=2)
    assert read_run(other).trials[0].window_rounds == (6, 10), "of a cohort that is drawn there is no turn"


def test_a_method_that_takes_turns_gives_them_to_the_methods_of_other_runs(tmp_path: Path) -> None:
    """Otherwise a benchmark against a run with FedSKF would train for nothing."""
    counts = [[8, 2], [0, 10], [5, 5]]
    runs = []
    for name, algorithm in (("records", "fedskf"), ("benchmark", "fedprox")):
        run = write_run(tmp_path / name)
        for seed in (0, 1):
            rounds = [[8, 5 + r % 3] for r in range(10)]
            write_trial(run, algorithm, seed, rounds, counts=counts, algorithm=algorithm, cohort_size=3)
        runs.append(read_run(run))
    rows = summary(runs)
    assert {trial.window_rounds for row in rows for trial in row.trials} == {(8, 10)}
    assert difference(rows[1], rows[0], "window_mean").seeds == (0, 1)


def other(tmp_path: Path, change: str) -> Run:
    """Write a run of FedSeq in the setting of the run below but for one change."""
    run = write_run(tmp_path / change.replace(" ", "-"))
    for seed in range(2):
        corrects: list[list[int] | None] = [[9, 9], [8, 9], [9, 9], [9, 9]]
        if change == "rounds":
            corrects[1] = None
        more: dict[str, Any] = {"total": [10, 11]} if change == "test examples" else {}
        folder = write_trial(
            run, "FedSeq", seed, corrects, **more, dataset="fashion-mnist" if change == "data" else "digits"
        )
        if change == "partition":
            partition = json.loads((folder / "partition.json").read_text())
            write_json(folder / "partition.json", partition | {"hash": f"other{seed}", "settings": {"C": 1}})
    return read_run(run)


@pytest.mark.parametrize(
    ("change", "accuracy", "forgetting"),
    [
        ("none", "+10.00 [+10.00, +10.00]", "+0.00 [+0.00, +0.00], not separated"),
        ("data", "not comparable: other data", "not comparable: other data"),
        ("test examples", "not comparable: other test examples", "not comparable: other test examples"),
        ("partition", "not comparable: other partition", "not comparable: other partition"),
        ("rounds", "+10.00 [+10.00, +10.00]", "not comparable: evaluated in other rounds"),
    ],
)
def test_what_differs_in_what_was_measured_is_not_compared(
    tmp_path: Path, change: str, accuracy: str, forgetting: str
) -> None:
    """Of other data, an interval would separate the data; of fewer evaluations, forgetting is less."""
    run = write_run(tmp_path / "run")
    for seed in range(2):
        write_trial(run, "FedAvg", seed, [[8, 8]] * 4)
    runs = [read_run(run), other(tmp_path, change)]
    rows = summary(runs)
    found = [show_difference(difference(rows[1], rows[0], name)) for name in ("window_mean", "window_forgetting")]
    assert found == [accuracy, forgetting]
    assert all(text in markdown(rows) for text in found)
    assert found[0] in render(runs)
    assert leaders(rows, "window_mean") == ({1} if change in ("none", "rounds") else set())


def test_with_tasks_the_window_is_of_each(tmp_path: Path) -> None:
    # Two tasks of four rounds, a class each; rounds 3 and 4 of each count.
    rounds = [[2], [4], [6], [8], [1, 9], [1, 9], [2, 8], [4, 8]]
    run = write_run(tmp_path / "run")
    write_trial(run, "FedLwF", 0, rounds, tasks=[1, 1])
    (trial,) = read_run(run).trials
    assert rounds_covered(trial) == "rounds 3–4 of each task"
    # After task 1: 0.6 and 0.8; after task 2: (0.2 + 0.8) / 2 and (0.4 + 0.8) / 2.
    assert trial.window_incrementals == pytest.approx({3: 0.55, 4: 0.7})
    assert METRICS["window_incremental"].of(trial) == pytest.approx(0.625)
    assert METRICS["incremental"].of(trial) == pytest.approx(0.7)
    text = markdown(summary(read_run(run)))
    assert "| mean over tasks, rounds 3–4 of each task | mean over tasks, after each |" in text


def test_what_nobody_tested_counts_in_no_mean_over_tasks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "no class of task 2", 0, [[2], [8], [1, 0], [4, 0]], tasks=[1, 1], total=(10, 0))
    # Of clients that test: after task 2 nobody came who has class 0.
    told = {n: {"total": total} for n, total in enumerate(([10], [8], [10, 10], [0, 5]), start=1)}
    write_trial(run, "nobody came", 0, [[2], [8], [1, 9], [0, 4]], tasks=[1, 1], rows=told)
    absent, lost = read_run(run).trials
    assert absent.window_incrementals == pytest.approx({2: (0.8 + 0.4) / 2})
    assert METRICS["incremental"].of(absent) == pytest.approx((0.8 + 0.4) / 2)
    np.testing.assert_allclose(lost.task_matrix, [[1, 0], [math.nan, 0.8]])
    assert lost.window_incrementals == pytest.approx({2: (1 + 0.8) / 2})
    assert METRICS["incremental"].of(lost) == pytest.approx((1 + 0.8) / 2)


def test_a_seed_that_a_callback_ended_before_its_last_task_has_no_result_of_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for seed, rounds in enumerate([[[2], [8], [1, 9], [4, 8]], [[2], [8]]]):
        write_trial(run, "FedLwF", seed, rounds, tasks=[1, 1], planned=4)
    whole, cut = read_run(run).trials
    for name in ("task_accuracy", "incremental", "forgetting_chaudhry", "forgetting_fedskf"):
        assert math.isnan(METRICS[name].of(cut)), name
    assert METRICS["task_accuracy"].of(whole) == pytest.approx(0.6)
    assert "2 of 4 rounds" in render(read_run(run))


def test_seeds_of_a_run_with_tasks_are_averaged(tmp_path: Path) -> None:
    """The first task's part of min_size depends on its classes, which the seed draws."""
    partition = fedkeep.Dirichlet(0.5, num_clients=4)
    methods = ["fedavg", "fedprox"]
    run = fedkeep.run(
        tiny.write_recipe(tmp_path), methods=methods, seeds=[0, 1], rounds=1, settings=["tasks.num_tasks=2"],
        partition=partition, out=tmp_path / "run",
    )  # fmt: skip
    sizes = {trial.partition["settings"]["min_size"] for trial in run.trials}
    assert len(sizes) == 2
    assert [(row.label, row.seeds) for row in summary(run)] == [("FedAvg", (0, 1)), ("FedProx", (0, 1))]
    assert run.compare("FedProx", "FedAvg").seeds == (0, 1)


def test_one_task_is_only_a_choice_of_classes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[2, 2], [4, 4], [6, 6], [8, 8]], tasks=[2])
    (trial,) = read_run(run).trials
    assert rounds_covered(trial) == "rounds 3–4"
    assert "| accuracy, rounds 3–4 |" in markdown(summary(read_run(run)))


def test_runs_that_differ_in_much_are_called_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        ["training.lr=0.1"],
        ["training.lr=0.2", "training.epochs=2", "training.batch_size=8", "partition.alpha=0.3", "run.cohort_size=3"],
    ]
    recipe = tiny.write_recipe(tmp_path)
    for name, changes in zip(("one", "two"), settings, strict=True):
        fedkeep.run(recipe, methods=["fedavg"], rounds=1, settings=changes, out=tmp_path / name)
    labels = [row.label for row in summary([read_run(tmp_path / name) for name in ("one", "two")])]
    assert labels == ["FedAvg (run one)", "FedAvg (run two)"]
    shutil.copytree(tmp_path / "one", tmp_path / "copy" / "one")
    again = [read_run(tmp_path / name) for name in ("one", "one", "copy/one", "two")]
    assert [(row.label, row.seeds) for row in summary(again)] == [(label, (0,)) for label in labels]
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    told = capsys.readouterr().out
    assert "What differs, one | two:" in told
    for line in ("lr: 0.1 | 0.2", "epochs: 1 | 2", "cohort_size: 2 | 3"):
        assert f"  {line}\n" in told
