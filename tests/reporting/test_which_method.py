"""The table that decides: what it says of curves that are known."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from synthetic_run import read_run, write_run, write_trial

from fedkeep.reporting.summary import Row, summary

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "which_method.py"))


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Row]:
    """FedAvg and FedProx over four rounds, two seeds; 10 test examples of one class and 30 of another."""
    run = write_run(tmp_path / "run")
    for seed in (0, 1):
        write_trial(run, "FedAvg", seed, [[0, 0], [4, 12], [4, 13], [6, 15]], total=(10, 30))
    write_trial(run, "FedProx", 0, [[0, 0], [4, 15], [4, 12], [4, 12]], total=(10, 30))
    write_trial(run, "FedProx", 1, [[0, 0], [4, 12], [4, 12], [10, 30]], total=(10, 30))
    write_trial(run, "Late", 0, [[0, 0], [4, 12], [4, 12], [10, 30]], total=(10, 30))
    write_trial(run, "Late", 1, [[0, 0], [4, 12], [4, 12], [4, 12]], total=(10, 30))
    return {row.label: row for row in summary(read_run(run))}


def test_the_target_is_fedavgs_mean_over_the_window_rounded_down(rows: dict[str, Row]) -> None:
    # Rounds 3 and 4: 17 / 40 and 21 / 40.
    assert TOOL["target"](list(rows.values())) == 47
    assert TOOL["target"]([rows["FedProx"]]) is None


def test_a_cost_is_counted_to_the_first_evaluation_at_the_target(rows: dict[str, Row]) -> None:
    def cost(row: Row) -> float:
        return 400.0  # of the whole run, which has four rounds

    assert TOOL["cost_to_reach"](rows["FedAvg"], 47, cost) == "400"
    assert TOOL["cost_to_reach"](rows["FedProx"], 47, cost) == "300", "rounds 2, which did not last, and 4"
    assert TOOL["cost_to_reach"](rows["Late"], 47, cost) == "never by 1 of 2 seeds"
    assert TOOL["cost_to_reach"](rows["FedAvg"], 60, cost) == "never"


def test_classes_count_alike_however_many_examples_they_have(rows: dict[str, Row]) -> None:
    # FedAvg, rounds 3 and 4: (4 / 10 + 13 / 30) / 2 and (6 / 10 + 15 / 30) / 2.
    assert TOOL["mean_over_classes"](rows["FedAvg"]) == pytest.approx(100 * (0.41666667 + 0.55) / 2)
    head = TOOL["table"](list(rows.values()))[0]
    assert "| mean over classes |" in head
    assert "MB to" not in head, "always answering the largest class has an accuracy too"


def test_what_averages_gain_is_paired_by_seed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for label, last, average in (("FedSeq", (2, 3), (5, 6)), ("FedAvg", (3, 3), (4, 6))):
        for seed in (0, 1):
            moving = ({"evaluation_models": {"moving": {"correct": [right] * 2}}} for right in (0, average[seed]))
            both = dict(enumerate(moving, start=1))
            curve = [[0, 0], [last[seed]] * 2]
            write_trial(run, label, seed, curve, total=(10, 10), rows=both, evaluation_models=["last", "moving"])
    rows = summary(read_run(run))
    line = TOOL["gains"]({"Here": rows})[2]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        "Here",
        "25.0",
        "55.0",
        "+30.00 [+30.00, +30.00]",
        "30.0",
        "50.0",
        "+20.00 [-107.06, +147.06], not separated",
        "+5.00 [-58.53, +68.53], not separated",
        "2",
    ]
    shown = [TOOL["shown_label"](row, rows) for row in rows]
    assert "FedSeq, last model" in shown
    assert "FedSeq, moving average" in shown


def test_a_row_without_an_average_is_not_said_to_be_of_last_models(rows: dict[str, Row]) -> None:
    assert TOOL["shown_label"](rows["Late"], list(rows.values())) == "Late"


def test_a_row_says_what_went_wrong_in_its_seeds(rows: dict[str, Row]) -> None:
    lines = TOOL["table"]([rows["FedAvg"], rows["Late"]], pooled=[rows["FedProx"]])
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "Late (at chance in 1 of 2 seeds)",
        "FedProx (at chance in 1 of 2 seeds)",
        "FedAvg (at chance in 2 of 2 seeds)",
    ]


def test_settings_of_a_method_have_its_colour() -> None:
    family = TOOL["_family"]
    labels = "FedSeq", "FedSeq, lr 0.03", "SFedKD tau 1 target 0", "CWC (reconstructed)"
    assert [family(Row(label, ())) for label in labels] == ["FedSeq", "FedSeq", "SFedKD", "CWC"]
