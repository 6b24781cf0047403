"""Clients that test models on examples of their own: in a simulation, in workers, after a resume, and what is shown."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import fedkeep
from fedkeep.data import DataOptions, Federation
from fedkeep.data.dataset import DataSet
from fedkeep.data.federation import hold_out_client_test, with_client_test
from fedkeep.data.partition import ByColumn
from fedkeep.data.schema import CLIENT, GROUP
from fedkeep.errors import ConfigError, DataError
from fedkeep.experiment.build import build_federation
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import algorithms
from fedkeep.reporting.html import render
from fedkeep.reporting.metric import METRICS
from fedkeep.reporting.run_folder import read_run
from fedkeep.reporting.summary import summary
from fedkeep.reporting.table import markdown, trials_csv
from fedkeep.rounds.state import RoundResult
from fedkeep.training.client_test import ClientTestResult, pooled
from fedkeep.training.evaluation import count_correct

SHARE = 0.25


def held_back(share: float = SHARE) -> Federation:
    return with_client_test(tiny.federation(), share)


def rows_of(federation: Federation, client: str) -> set[bytes]:
    return {row.numpy().tobytes() for row in federation.data(client)["input"]}


def test_a_share_is_held_back_from_each_client_and_class() -> None:
    before, after = tiny.federation(), held_back()
    for client in before.clients:
        tests = after.test_data(client)
        size = before.num_examples(client)
        assert len(tests["label"]) == int(size * SHARE)
        assert after.num_examples(client) == size - int(size * SHARE)
        held = before.partition.counts(before.dataset.train["label"], tiny.CLASSES)[int(client)].double()
        taken = tests["label"].bincount(minlength=tiny.CLASSES)
        assert bool(((taken - SHARE * held).abs() < 1).all()), "spread over the classes"
        assert not rows_of(after, client) & {row.numpy().tobytes() for row in tests["input"]}
    assert len(after.dataset.test["label"]) == sum(len(after.test_data(c)["label"]) for c in after.clients)
    assert torch.equal(held_back().partition.rows, after.partition.rows), "always the same ones"
    with pytest.raises(DataError, match=r"run.client_test=0.01 holds none of a client's examples back"):
        held_back(0.01)


def test_the_test_split_that_nobody_uses_is_told() -> None:
    dataset = table([0, 0, 1, 1], [-1, -1, -1])
    held = with_client_test(Federation(dataset, ByColumn(num_clients=0).split(dataset.train, 2, 0)), 0.5)
    assert "Its 3 test examples are not used: clients test on what they hold back." in held.dataset.note


def test_with_tasks_tests_are_of_the_classes_that_have_arrived() -> None:
    stream = tiny.stream()
    first = with_client_test(Federation.from_stream(stream, 1), 0.5)
    for task in range(1, first.num_tasks + 1):
        now = first.for_task(task)
        tests = [now.test_data(client)["label"] for client in now.clients]
        assert int(torch.cat(tests).max()) < stream.tasks[task - 1].num_classes
        assert sum(map(len, tests)) == len(now.dataset.test["label"])
        for client in now.clients:
            assert now.num_examples(client) == -(-len(stream.tasks[task - 1].partition[int(client)]) // 2)


def table(train: list[int], test: list[int], **columns: list[int]) -> DataSet:
    """Return numbers whose clients are given by number, -1 for nobody's."""

    def half(clients: list[int], further: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        rows = torch.arange(len(clients))
        given = {name: torch.tensor(values) for name, values in further.items()}
        return {"input": rows[:, None].float(), "label": rows % 2, CLIENT: torch.tensor(clients), **given}

    nobody = {name: [-1] * len(test) for name in columns}
    return DataSet("rows", half(train, columns), half(test, nobody), ("a", "b"))


def test_test_rows_belong_to_the_client_that_the_data_name() -> None:
    dataset = table([3, 3, 5, 5, 5, 9], [9, 5, 3, 7, 3, -1])
    federation = Federation(dataset, ByColumn(num_clients=0).split(dataset.train, 2, 0))
    own = with_client_test(federation, "own")
    assert [own.test_data(client)["input"].flatten().tolist() for client in own.clients] == [[2, 4], [1], [0]]
    assert "2 of 6 test examples are of no client that trains" in own.dataset.note
    assert [own.num_examples(client) for client in own.clients] == [2, 3, 1]
    together = Federation(dataset, ByColumn(num_clients=2).split(dataset.train, 2, 0))
    grouped = with_client_test(together, "own")
    for client in grouped.clients:
        assert set(grouped.test_data(client)[CLIENT].tolist()) == set(grouped.data(client)[CLIENT].tolist())
    nobodys = replace(dataset, test={**dataset.test, CLIENT: torch.full((6,), -1)})
    with pytest.raises(DataError, match=r"none of 6 test examples is named as a client's own. Mark rows"):
        with_client_test(replace(federation, dataset=nobodys), "own")
    with pytest.raises(DataError, match=r"with the partition 'by hand' clients have no names"):
        with_client_test(tiny.federation(), "own")


def test_what_belongs_together_is_held_back_together() -> None:
    groups = [0, 0, 0, 1, 2, 3, 3, 4, 5, 5]
    part = hold_out_client_test(table([0] * 10, [0] * 2, **{GROUP: groups}), 0.5)
    taken, kept = (set(half[GROUP].tolist()) for half in (part.test, part.train))
    assert len(taken) == 3
    assert not taken & kept


@pytest.mark.parametrize("num_tasks", [1, 2])
def test_a_group_of_several_clients_or_tasks_is_held_back_at_all_of_them(num_tasks: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{rng.normal():.3f},{'abcd'[n % 4]},p{n // 8},h{n % 3}" for n in range(240)]
    (tmp_path / "visits.csv").write_text("\n".join(["x,outcome,patient,hospital", *rows]))
    settings = [
        f"data.name={tmp_path / 'visits.csv'}", "data.label=outcome", "data.group=patient", "run.client_test=0.2",
        "run.cohort_size=3", f"tasks.num_tasks={num_tasks}",
        *(["data.client=hospital", "partition.scheme=column"] if num_tasks == 1 else
          ["data.exclude=[\"hospital\"]", "partition.scheme=iid", "partition.num_clients=3"]),
    ]  # fmt: skip
    first = build_federation(load_recipe("demo", settings=settings, methods=["fedavg"]), 0)
    tested, trained = set[int](), set[int]()
    for task in range(1, num_tasks + 1):
        federation = first.for_task(task)
        for client in federation.clients:
            tested |= set(federation.test_data(client)[GROUP].tolist())
            trained |= set(federation.data(client)[GROUP].tolist())
    assert len(tested) > 3
    assert not tested & trained
    assert len(tested | trained) == 30, "no row is held out for a test that nobody makes"
    assert "No test split in the source" not in first.dataset.note


def simulate(**changes: Any) -> Any:
    given = {"rounds": 2, "federation": held_back(), "client_test": SHARE} | changes
    return tiny.simulation(given.pop("method", fedkeep.FedAvg()), **given)


def test_records_hold_what_all_clients_told() -> None:
    """Sums over clients are what one evaluation of all their test examples gives."""
    simulation, stopping = simulate(evaluation_models=("last", "moving")), fedkeep.EarlyStopping(metric="client_worst")
    stopping.on_trial_begin(simulation)
    first, record = (simulation.run_round().record for _ in range(2))
    stopping.on_round_end(simulation, RoundResult(record, {}))
    assert stopping.best == min(right / of for right, of in record["clients"].values())
    for model, found in (("last", record), ("moving", record["evaluation_models"]["moving"])):
        counts = count_correct(
            simulation.context, simulation.evaluation_model(model), simulation.federation.dataset.test
        )
        assert (found["correct"], found["total"]) == (counts.correct, counts.total)
        assert found["test_loss"] == pytest.approx(counts.loss)
    assert list(record["clients"]) == [
        c for c in simulation.federation.clients if len(simulation.federation.test_data(c)["label"])
    ]
    assert sum(right for right, _ in record["clients"].values()) == sum(record["correct"])
    plain = tiny.run_rounds(tiny.simulation(fedkeep.FedAvg(), rounds=2, federation=held_back()))[1]
    for key in ("down", "up", "lost", "cohort", "loss", "examples"):
        assert record[key] == plain[key], "a test costs a round nothing that is counted"
    assert first["clients"].keys() == record["clients"].keys()


def test_what_is_lost_in_a_test_is_named_and_not_counted_as_lost() -> None:
    def fail(round: int, client: str, step: str) -> str | None:
        return "hangs" if step == "client_test" and client == "1" else None

    (record,) = tiny.run_rounds(simulate(rounds=1, fault_injector=fail))
    assert record["untested"] == {"1": "hangs"}
    assert "1" not in record["clients"]
    assert record["lost"] == {}
    everybody = simulate(
        rounds=1, fault_injector=lambda round, client, step: "hangs" if step == "client_test" else None
    )
    (record,) = tiny.run_rounds(everybody)
    assert "correct" not in record


@pytest.mark.parametrize(
    "change",
    [
        {"correct": [9, 9, 9]},
        {"total": [1, 1]},
        {"correct": [-1, 0, 0]},
        {"total": [10**9] * 3},
        {"scores": {"f1": [2.0], "auroc": [0.5], "ece": [0.5], "specificity": [1.0] * 3}},
        {"scores": {"f1": [0.5]}},
        {"scores": {}},
        {"loss": -1.0},
    ],
)
def test_results_that_cannot_be_true_are_refused(change: dict[str, Any]) -> None:
    simulation = simulate(rounds=1)
    simulation.settings.run = replace(simulation.settings.run, metric="f1")
    lie = lambda client, reply: {which: replace(one, **change) for which, one in reply.items()}  # noqa: E731
    tiny.change_replies(
        simulation, "client_test", lambda client, reply: lie(client, reply) if client.id == "1" else reply
    )
    (record,) = tiny.run_rounds(simulation)
    assert record["untested"] == {"1": "answered with test results that cannot be true"}
    assert "refused" not in record


def test_means_weigh_examples_and_leave_out_what_is_not_known() -> None:
    def one(right: int, of: int, loss: float | None, auroc: float | None) -> ClientTestResult:
        return ClientTestResult([right, 0], [of, 0], loss, {"auroc": [auroc], "specificity": [None, auroc]})

    found = pooled(
        {"a": one(1, 2, 1.0, 0.5), "b": one(6, 6, 2.0, 1.0), "c": one(1, 8, 3.0, None), "d": one(0, 0, None, None)}
    )
    assert (found["correct"], found["total"], found["clients"]) == (
        [8, 0],
        [16, 0],
        {"a": [1, 2], "b": [6, 6], "c": [1, 8]},
    )
    assert found["test_loss"] == (2 + 12 + 24) / 16
    assert found["scores"] == {"auroc": (0.5 * 2 + 6) / 8, "specificity": [None, (0.5 * 2 + 6) / 8]}
    assert pooled({"a": one(1, 2, None, 0.5)})["test_loss"] is None
    assert pooled({"d": one(0, 0, None, None)}) == {}


def test_methods_that_their_clients_cannot_test_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"clients test the server's model, and fedweit predicts with what only its s"
    ):
        simulate(method=fedkeep.FedWeIT())


RECIPE_SETTINGS = ("run.client_test=0.25", "run.rounds=3", "run.evaluation_models=['last','moving']")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedkeep.Run:
    folder = tmp_path_factory.mktemp("own")
    recipe = tiny.write_recipe(folder)
    return fedkeep.run(recipe, settings=RECIPE_SETTINGS, methods=["fedavg", "fedseq"], out=folder / "run")


def test_tables_and_the_report_have_single_clients(run: fedkeep.Run) -> None:
    found = read_run(run.path)
    rows = summary(found)
    trial = found.trials[0]
    told = np.asarray([right / of for right, of in trial.rounds[-1]["clients"].values()])
    assert list(trial.client_accuracy.values()) == pytest.approx(told.tolist())
    (line, *_) = csv.DictReader(io.StringIO(trials_csv(rows)))
    assert float(line["client_worst"]) <= float(line["client_median"]) <= float(line["client_best"])
    window = [row["clients"] for row in trial.rounds[trial.window_rounds[0] - 1 :]]
    means = [[right / of for right, of in of_round.values()] for of_round in window]
    assert METRICS["client_mean"].of(trial) == pytest.approx(np.mean([np.mean(each) for each in means]))
    assert METRICS["client_worst"].of(trial) == pytest.approx(np.mean([min(each) for each in means]))
    assert METRICS["clients_tested"].of(trial) == len(told)
    text = markdown(rows)
    for title in ("mean over clients", "worst client", "median client", "best client"):
        assert title in text.splitlines()[0]
    assert "Accuracy is over the test examples of all clients together" in text
    assert "its accuracy on the client's own test examples" in render(found)
    assert len(run.compare("FedSeq", "FedAvg", metric="client_worst").values) == 1


def test_workers_and_a_resume_give_the_same_records(run: fedkeep.Run, tmp_path: Path) -> None:
    recipe, out = tiny.write_recipe(tmp_path), tmp_path / "run"
    whole = [(folder / "rounds.jsonl").read_text() for folder in sorted((run.path / "trials").iterdir())]

    class Stop(fedkeep.Callback):
        def on_round_end(self, state: Any, result: Any) -> None:
            if state.finished == 1:
                raise KeyboardInterrupt

    given: dict[str, Any] = {"settings": RECIPE_SETTINGS, "methods": ["fedavg", "fedseq"], "out": out}
    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(recipe, **given, callbacks=[Stop()])
    fedkeep.resume(out, machine=fedkeep.Machine(workers=2), callbacks=[fedkeep.Callback()])
    assert [(folder / "rounds.jsonl").read_text() for folder in sorted((out / "trials").iterdir())] == whole


def test_a_split_column_names_test_rows_and_clients_test_on_their_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    lines = ["age,sex,hospital,part,outcome"]
    for number in range(90):
        sick = number % 2
        part = "Test" if number % 5 == 0 else "train"
        lines.append(f"{draw.normal(3 * sick):.3f},{'fm'[sick]},{'abc'[number % 3]},{part},{['no', 'yes'][sick]}")
    file = tmp_path / "clean.csv"
    file.write_text("\n".join(lines))
    run = fedkeep.run(
        data=file, label="outcome", partition="hospital", split="part", client_test="own", model="mlp", metric="auroc",
        methods=["fedavg"], rounds=2, seeds=1, out=tmp_path / "run",
    )  # fmt: skip
    (trial, *_) = run.trials
    assert set(trial.client_accuracy) == {"a", "b", "c"}
    assert trial.client_scores("auroc").keys() == {"a", "b", "c"}
    trial.evaluations[-1]["client_scores"]["0"] = {"specificity": [0.5, None]}  # all its examples are of one class
    assert trial.client_scores("specificity")["a"] == 0.5
    assert trial.rounds[-1]["clients"]["0"][1] == 6
    assert trial.info["input"]["features"] == ["age", "sex=f", "sex=m"]
    assert sum(map(sum, trial.partition["counts"])) == 72
    page = (run.path / "report.html").read_text()
    assert "AUROC" in page
    assert "Each client's accuracy at the end" in page
    file.write_text("\n".join(lines).replace("Test", "perhaps"))
    with pytest.raises(
        DataError, match=r"\(data.split\) must say train or test, validation, valid, val, not 'perhaps'"
    ):
        fedkeep.load(str(file), options=DataOptions(label="outcome", split="part"))


def test_it_is_refused_where_options_would_be_chosen_on_test_examples(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data.validation=0.1 would choose options on examples that clients hold back"
    ):
        fedkeep.load_recipe(tiny.write_recipe(tmp_path), settings=["run.client_test=0.2", "data.validation=0.1"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sorted(name for name, cls in algorithms().items() if cls.__module__.startswith("fedkeep.") and name != "fedweit"),
)
def test_every_other_method_is_tested(name: str) -> None:
    method = tiny.configured(algorithms()[name])
    stream = Federation.from_stream(tiny.stream(), 1, tiny.dataset(6, seed=3).train)
    with_tasks = method.handles_tasks and name != "fedgems"  # whose server has images of all classes
    make, whole = (tiny.simulation_with_tasks, stream) if with_tasks else (tiny.simulation, tiny.federation())
    simulation = make(method, federation=with_client_test(whole, 0.4), client_test=0.4, rounds=1)
    assert all(record.get("clients") and "untested" not in record for record in tiny.run_rounds(simulation))
