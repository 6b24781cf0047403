"""The report's table of what local training did to each class (FedCAD, figure 1)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from synthetic_run import read_run, write_run, write_trial

from fedkeep.reporting.html import local_training, render
from fedkeep.reporting.summary import summary


def local_models(*corrects: list[int]) -> dict[str, Any]:
    return {
        "local_models": [
            {"client": str(number), "correct": correct, "own": [1, 2], "previous": None}
            for number, correct in enumerate(corrects)
        ]
    }


def write(path: Path, label: str, rounds: list[list[int] | None], last: dict[str, Any], **info: Any) -> None:
    write_trial(path, label, 0, rounds, rows={1: local_models([1, 1], [1, 1]), 2: last}, **info)


def test_each_client_with_its_examples_and_every_methods_model(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write(run, "FedAvg", [[5, 2], [6, 3]], local_models([9, 0], [0, 10]))
    write(run, "FedCAD", [[5, 2], [7, 4]], local_models([8, 2], [2, 9]))
    found = local_training(summary(read_run(run)))
    assert found["round"] == 2
    assert found["names"] == ["0", "1"]
    first, second = found["clients"]
    assert (first["client"], first["examples"]) == ("0", [8, 2])
    assert (second["client"], second["examples"]) == ("1", [0, 10])
    # Both began with the model of round 1, so it stands there once.
    assert [(line["label"], line["values"]) for line in first["lines"]] == [
        ("model received", [50.0, 20.0]),
        ("FedAvg", [90.0, 0.0]),
        ("FedCAD", [80.0, 20.0]),
    ]
    assert [line["values"] for line in second["lines"]] == [[50.0, 20.0], [0.0, 100.0], [20.0, 90.0]]


def test_models_received_that_differ_stand_each_before_what_came_of_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write(run, "FedAvg", [[5, 2], [6, 3]], local_models([9, 0], [0, 10]))
    write(run, "FedCAD", [[4, 4], [7, 4]], local_models([8, 2], [2, 9]))
    lines = local_training(summary(read_run(run)))["clients"][0]["lines"]
    assert [line["label"] for line in lines] == ["FedAvg, received", "FedAvg", "FedCAD, received", "FedCAD"]
    assert [line["values"] for line in lines] == [[50.0, 20.0], [90.0, 0.0], [40.0, 40.0], [80.0, 20.0]]


def test_what_was_not_evaluated_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write(run, "FedAvg", [None, [6, 3]], local_models([9, 0], [0, 10]))
    lines = local_training(summary(read_run(run)))["clients"][0]["lines"]
    assert [line["label"] for line in lines] == ["FedAvg"]


def test_the_last_round_that_all_methods_have(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write(run, "FedAvg", [[5, 2], [6, 3]], local_models([9, 0], [0, 10]))
    write_trial(run, "FedCAD", 0, [[5, 2]], rows={1: local_models([3, 3], [4, 4])}, finished=False, planned=2)
    found = local_training(summary(read_run(run)))
    assert found["round"] == 1
    assert [line["values"] for line in found["clients"][0]["lines"]] == [[10.0, 10.0], [30.0, 30.0]]


def test_an_average_that_was_served_is_no_second_training_and_was_not_received(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    averages = {n: {"evaluation_models": {"moving": {"correct": [1, 1], "test_loss": 1.0}}} for n in (1, 2)}
    rows = {1: local_models([1, 1], [1, 1]) | averages[1], 2: local_models([9, 0], [0, 10]) | averages[2]}
    write_trial(run, "FedAvg", 0, [[5, 2], [6, 3]], rows=rows, evaluation_models=["last", "moving"])
    lines = local_training(summary(read_run(run)))["clients"][0]["lines"]
    assert [line["label"] for line in lines] == ["model received", "FedAvg"]
    write_trial(
        run, "FedAvg", 0, [[5, 2], [6, 3]], rows={n: local_models([9, 0]) for n in (1, 2)}, evaluation_models=["moving"]
    )
    lines = local_training(summary(read_run(run)))["clients"][0]["lines"]
    assert [line["label"] for line in lines] == ["FedAvg, moving average"]


def test_few_clients_and_classes_of_one_seed_and_no_sequences(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    everyone = {1: local_models(*[[1, 1]] * 5)}
    counts = [[8, 2]] * 5
    write_trial(run, "FedAvg", 0, [[5, 2]], rows=everyone, counts=counts)
    write_trial(run, "FedAvg", 1, [[5, 2]], rows=everyone, counts=[[1, 1]] * 5)
    write_trial(run, "FedSeq", 0, [[5, 2]], rows=everyone, counts=counts, sequential=True)
    found = local_training(summary(read_run(run)))
    assert [client["client"] for client in found["clients"]] == ["0", "1", "2"]
    assert found["more"] == 2
    assert [len(client["lines"]) for client in found["clients"]] == [1, 1, 1]
    assert found["clients"][0]["examples"] == [8, 2]
    many = write_run(tmp_path / "many")
    write_trial(many, "FedAvg", 0, [[1] * 30], total=[2] * 30, rows={1: local_models([1] * 30)}, counts=[[1] * 30] * 2)
    assert local_training(summary(read_run(many))) == {}
    assert local_training([]) == {}


def test_it_stands_in_the_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[5, 2]], counts=[[8, 2], [0, 10]])
    assert "class by class" not in render(read_run(run))
    write(run, "FedAvg", [[5, 2], [6, 3]], local_models([9, 0], [0, 10]))
    text = " ".join(re.sub(r"<[^>]*>", " ", render(read_run(run))).split())
    assert "After local training, class by class" in text
    assert re.search(r"client 0, examples 8 2 model received 50\.0 20\.0 FedAvg 90\.0 0\.0", text)
