"""Own tensors, an own module and an own partition, given to `fedkeep.run` in Python."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from nets import Net
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils import data as torch_data

import fedkeep
from fedkeep.cli.main import parser
from fedkeep.cli.run import recipe_of
from fedkeep.data.partition import IID
from fedkeep.data.python_data import dataset_of
from fedkeep.errors import ConfigError, DataError, FedKeepError, PartitionError, RunError
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.python_recipe import for_workers, make_recipe
from fedkeep.reporting.summary import differences, summary
from fedkeep.results import RunResult

HERE = Path(__file__).parent
X, Y = load_digits(return_X_y=True)
DATA = (X[:1400], Y[:1400], X[1400:], Y[1400:])
ROWS = {"north": range(0, 500), "south": np.arange(500, 900), "west": [*range(900, 1390)]}
GIVEN: dict[str, Any] = {"data": DATA, "model": Net, "partition": ROWS, "methods": ["fedavg"], "rounds": 2}


class Local(Net):
    """In a module that is imported, but whose instances are not."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    out = tmp_path_factory.mktemp("python") / "run"
    methods = ["fedavg", fedkeep.MOON(mu=0.5)]
    training = fedkeep.Training(lr=0.3, epochs=2)
    return fedkeep.run(**GIVEN | {"methods": methods, "rounds": 4}, training=training, seeds=2, title="Mine", out=out)


def test_tensors_a_module_and_rows_become_a_run(run: RunResult) -> None:
    assert run.labels == ("FedAvg", "FedAvg, moving average", "MOON", "MOON, moving average")
    assert {trial.seed for trial in run.trials} == {0, 1}
    trial = run["fedavg", 1]
    assert trial.last > 0.5
    assert (trial.info["num_clients"], trial.info["cohort_size"]) == (3, 3), (
        "all clients, where there are fewer than ten"
    )
    assert [sum(client) for client in trial.partition["counts"]] == [500, 400, 490]
    assert "10 of 1400 training rows belong to no client" in trial.info["dataset_note"]
    assert trial.options != run["moon", 1].options == {"mu": 0.5, "tau": 0.5, "aggregation": "num_examples"}
    assert run.title == "Mine"


def test_a_run_is_short_in_a_console_and_whole_in_a_notebook(run: RunResult) -> None:
    assert repr(run) == f"<Run {str(run.path)!r}: FedAvg, MOON; 2 seeds>"
    assert repr(run["moon", 0]) == "<TrainedTrial MOON, seed 0: 4 rounds, finished>"
    page = run._repr_html_()
    assert page.count("<tr>") == 5
    assert page.count("<svg") == 2
    assert "Mine" in page


def test_a_trial_and_its_model(run: RunResult) -> None:
    trial = run["MOON", 1]
    assert list(trial.class_accuracy) == [str(digit) for digit in range(10)]
    model = trial.model()
    assert isinstance(model, nn.Module)
    predicted = model(torch.tensor(DATA[2], dtype=torch.float32)).argmax(-1).numpy()
    assert np.mean(predicted == DATA[3]) == pytest.approx(trial.last)
    with pytest.raises(RunError, match=r"run with the seeds 0, 1. Name one of them, as in run\['FedAvg', 0\]"):
        run["fedavg"]
    with pytest.raises(RunError, match=r"no method 'fedav'\. Did you mean 'FedAvg'"):
        run["fedav", 0]


def test_a_run_that_is_read_again_needs_the_network_that_it_cannot_import(run: RunResult) -> None:
    trial = fedkeep.read_run(run.path)["fedavg", 0]
    with pytest.raises(ConfigError, match="allow"):
        trial.model()
    inputs = torch.tensor(DATA[2], dtype=torch.float32)
    assert torch.equal(trial.model(Net)(inputs), run["fedavg", 0].model()(inputs))


def test_a_network_of_ones_own_is_exported_and_takes_its_weights_back(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 10))
    run = fedkeep.run(**GIVEN | {"model": net}, seeds=1, out=tmp_path / "run")
    folder = fedkeep.export_model(run, onnx=False)
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == net.state_dict().keys()
    net.load_state_dict(weights)
    inputs = torch.tensor(DATA[2], dtype=torch.float32)
    with torch.no_grad():
        scores = net.eval()(inputs)
    assert torch.allclose(torch.export.load(folder / "model.pt2").module()(inputs), scores, atol=1e-5)
    np.savez(tmp_path / "new.npz", x=inputs.numpy())
    found = list(fedkeep.predict(folder, [tmp_path / "new.npz"], network=net))
    assert [each.label for each in found] == list(map(str, scores.argmax(-1).tolist()))
    card = (folder / "README.md").read_text()
    assert "a module like `torch.nn.modules.container:Sequential()`. With FedKeep: `fedkeep predict FOLDER" in card
    with pytest.raises(ConfigError, match=r"An exported model gets its network as in fedkeep\.predict"):
        list(fedkeep.predict(folder, [tmp_path / "new.npz"], allow_code=True))
    again = fedkeep.export_model(fedkeep.read_run(run.path), tmp_path / "again", network=net, onnx=False)
    assert weights.keys() == load_file(again / "model.safetensors").keys()


class Untraceable(Net):
    """Does something that PyTorch cannot export: it looks at values."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs if float(inputs.sum()) > 0 else -inputs)


def test_the_weights_of_a_network_that_cannot_be_exported_load_into_its_class(tmp_path: Path) -> None:
    run = fedkeep.run(**GIVEN | {"model": Untraceable}, seeds=1, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot export the network") as error:
        fedkeep.export_model(run)
    found = re.search(r"Its weights are in (.*), and load into the same class", str(error.value))
    assert found is not None
    Untraceable().load_state_dict(load_file(found[1]))


def test_a_table_and_a_comparison(run: RunResult) -> None:
    table = run.table()
    assert list(table.index) == ["FedAvg", "FedAvg, moving average", "MOON", "MOON, moving average"]
    assert table.loc["MOON", "last"] == pytest.approx(np.mean([run["MOON", seed].last for seed in (0, 1)]))
    gain = run.compare("moon", "FedAvg")
    assert gain.seeds == (0, 1)
    assert gain.interval.low <= gain.interval.mean <= gain.interval.high
    expected = [run["MOON", seed].window_forgetting - run["FedAvg", seed].window_forgetting for seed in (0, 1)]
    assert run.compare("MOON", "FedAvg", "forgetting").values == pytest.approx(expected)
    with pytest.raises(RunError, match="no finished method 'sfedkd'"):
        run.compare("sfedkd", "FedAvg")
    unmeasured = run.compare("MOON", "FedAvg", "f1")
    assert not unmeasured.values
    assert unmeasured.reason == 'f1 was not measured of both; evaluations measure it with metric="f1" (run.metric)'
    scored = replace(run, trials=[replace(trial, info=trial.info | {"metric": "f1"}) for trial in run.trials])
    assert scored.compare("MOON", "FedAvg").reason == "f1 was not measured of both"
    with pytest.raises(RunError, match="There are no curves of 'los'"):
        run.plot("los")  # type: ignore[arg-type]


def test_a_plot_is_a_picture_where_a_notebook_shows_it(run: RunResult) -> None:
    """Notebooks ask an object for `_repr_svg_`; pyplot's inline backend, which draws figures otherwise, is not used."""
    shown = run.plot()._repr_svg_()  # type: ignore[attr-defined]
    assert shown.startswith("<svg")
    assert "MOON" in shown


def test_a_label_is_one_row_and_a_name_that_several_rows_have_is_none(run: RunResult) -> None:
    slow = "FedAvg, lr 0.01"
    trials = [
        replace(t, label=t.label.replace("MOON", slow), info=t.info | {"algorithm": "fedavg"})
        for t in reversed(run.trials)
    ]
    two = replace(run, trials=tuple(trials))
    assert two.compare("FedAvg", slow).label == "FedAvg"
    assert two.compare("fedavg", slow).values == tuple(-value for value in two.compare(slow, "FedAvg").values)
    named = replace(two, trials=tuple(replace(t, label=t.label.replace("FedAvg", "Mean")) for t in trials))
    with pytest.raises(RunError, match=r"several rows of 'fedavg'.*label: Mean, lr 0\.01; Mean\."):
        named.compare("fedavg", "Mean")
    one = replace(run, trials=tuple(t for t in named.trials if not t.label.startswith("Mean, lr")))
    assert one.compare("fedavg", "Mean, moving average").label == "Mean"
    assert {found.reference for found in differences(summary(one), "FEDAVG")} == {"Mean"}
    with pytest.raises(RunError, match=r"different settings\. Name one: "):
        differences(summary(named), "fedavg")


def copied(run: RunResult, folder: Path) -> Path:
    """Return the run without the second half of a trial, as after a kill before the first checkpoint."""
    for path in run.path.rglob("*"):
        target = folder / path.relative_to(run.path)
        if path.is_file() and "moon-seed1" not in path.parts:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return folder


def test_it_is_resumed_with_the_same_network_only(run: RunResult, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.layers(inputs / 8)
            return logits

    with pytest.raises(ConfigError, match=r"Or give the model itself in Python: model="):
        fedkeep.resume(folder)
    with pytest.raises(RunError, match="begun with another network"):
        fedkeep.resume(folder, model=Other)
    with pytest.raises(RunError, match=r"begun with arrays:.*these data are arrays:.*, with partition= again if"):
        fedkeep.resume(folder, model=Net, data=DATA)
    with pytest.raises(RunError, match=r"begun with arrays:.*these data are arrays:.*Give the former\."):
        fedkeep.resume(folder, model=Net, data=DATA, partition={**ROWS, "west": range(900, 999)})
    again = fedkeep.resume(folder, model=Net, data=DATA, partition=ROWS)
    assert again["moon", 1].rounds == run["moon", 1].rounds


def test_a_data_frame_is_given_again_with_the_columns_that_the_run_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = pandas.DataFrame({"age": range(60), "outcome": ["ill", "well"] * 30, "hospital": [*"abc"] * 20})
    given = {"model": "mlp", "methods": ["fedavg"], "rounds": 1, "seeds": 1, "out": tmp_path / "run"}
    run = fedkeep.run(data=frame, label="outcome", partition="hospital", columns=["age"], **given)  # type: ignore[arg-type]
    from fedkeep.experiment import build

    build._load.cache_clear()
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    for again in ({}, {"partition": "hospital"}):
        assert fedkeep.resume(run.path, data=frame, **again)["fedavg", 0].rounds == run["fedavg", 0].rounds
    with pytest.raises(RunError, match="was not begun with partition='age'"):
        fedkeep.resume(run.path, data=frame, partition="age")


def test_examples_that_are_gone_are_asked_for(run: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(run, tmp_path / "run")
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    from fedkeep.experiment import build

    build._load.cache_clear()
    with pytest.raises(
        DataError, match=r"given in Python, and are no longer whole in .*fedkeep\.resume\(RUN, data=\.\.\.\)"
    ):
        fedkeep.resume(folder, model=Net)
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Set FEDKEEP_CACHE"):
        fedkeep.run(**GIVEN, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"data": X}, DataError, r"must be \(x, y, x_test, y_test\).*not a ndarray"),
        ({"data": (X, Y[:5])}, DataError, "y must be one integer or text for each of the 1797"),
        ({"data": (X, Y, X, Y[:5])}, DataError, "y_test must be one integer or text"),
        ({"data": (X, Y, X[:, :60], Y)}, DataError, "inputs of train are numbers of 64, but those of test"),
        ({"data": (X.astype(int)[:, 0], Y, X, Y)}, DataError, "token ids"),
        ({"data": (X, np.eye(10)[Y], X, Y)}, DataError, "y must be one integer or text"),
        ({"data": ([["a"], ["b"]], [0, 1], X, Y)}, DataError, "x must hold numbers, not text"),
        ({"data": (X * np.nan, Y, X, Y)}, DataError, "NaN or infinite"),
        ({"data": (X, Y)}, DataError, "such as \\(x, y, x_test, y_test\\)"),
        ({"data": "digitz"}, DataError, "no data set 'digitz'"),
        ({"model": 3}, ConfigError, "model must be a torch.nn.Module, its class"),
        ({"model": "lenet"}, ConfigError, "no model 'lenet'"),
        ({"model": lambda: nn.Linear(5, 5)}, ConfigError, "fails on inputs of 64"),
        ({"model": None}, ConfigError, "given without a model. Give model= too: a torch.nn.Module"),
        ({"partition": None}, ConfigError, "given without a partition"),
        ({"partition": 3}, PartitionError, "partition must be a scheme"),
        ({"partition": "writer"}, PartitionError, "'writer' is neither a column of the data, which have none"),
        ({"partition": {"a": [0, 0]}}, PartitionError, "client 'a' holds a row twice"),
        ({"partition": {"a": [0, 1], "b": [1]}}, PartitionError, "row 1 is held by client 'a' and by client 'b'"),
        ({"partition": {"a": [0, 9999]}}, PartitionError, "there are 1400 training rows"),
        ({"partition": {"a": []}}, PartitionError, "client 'a' holds no rows.*Leave it out"),
        ({"partition": [[0, 1], torch.tensor([])]}, PartitionError, "client '1' holds no rows.*Leave it out"),
        ({"partition": {"a": "rows"}}, PartitionError, "client 'a' must hold a list of row numbers"),
        ({"partition": [0, 1] * 20}, PartitionError, "client '0' must hold a list of row numbers, .* not 0"),
        ({"partition": {"a": 5}}, PartitionError, "client 'a' must hold a list of row numbers, .* not 5"),
        ({"partition": {}}, PartitionError, "names no client"),
        ({"methods": ["fedavgg"]}, ConfigError, "there is no method 'fedavgg'. Did you mean"),
        ({"methods": [3]}, ConfigError, r"methods must be methods such as .* or their names.*, not 3"),
        ({"methods": []}, ConfigError, "no method to run"),
        ({"methods": [fedkeep.get_algorithm]}, ConfigError, "methods must be methods"),
        (
            {"seeds": 0},
            ConfigError,
            "seeds must be a number of seeds or a list of integers, not 0: seeds=3 runs",
        ),
        ({"seeds": [0.5]}, ConfigError, "seeds must be a number of seeds or a list"),
        ({"seeds": "0,1"}, ConfigError, "seeds must be a number of seeds or a list"),
        ({"rounds": 2.5}, ConfigError, "rounds must be an integer"),
        ({"training": 0.1}, ConfigError, r"\[training\] must be a table or a Training, not 0.1"),
        ({"cohort_size": 9}, ConfigError, "a cohort of 9 cannot be drawn from 3 clients"),
        ({"settings": ["model.name=mlp"]}, ConfigError, r"no settings: model.name=mlp\. Give arguments: model="),
        ({"settings": ["data.lenght=3"]}, ConfigError, "Did you mean 'length'"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_written(
    given: dict[str, Any], error: type[FedKeepError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        fedkeep.run(**GIVEN | given, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_are_no_recipe() -> None:
    with pytest.raises(ConfigError, match=r"Tensors, models and partitions have arguments of their own"):
        fedkeep.run((X, Y))  # type: ignore[arg-type]


def test_everything_may_be_given_beside_a_recipe() -> None:
    recipe = make_recipe("demo", model="mlp", partition="iid", seeds=np.int64(2), methods=fedkeep.FedAvg, rounds=5)
    assert (recipe.model.name, recipe.partition.name, recipe.seeds, recipe.rounds) == ("mlp", "iid", (0, 1), 5)
    assert [method.label for method in recipe.methods] == ["FedAvg"]
    (sfedkd,) = make_recipe("demo", methods=["sfedkd"], settings=["sfedkd.teachers=2"]).methods
    assert sfedkd.algorithm.teachers == 2  # type: ignore[attr-defined]
    assert make_recipe(None).name == "demo"


def test_workers_import_what_is_in_files(caplog: pytest.LogCaptureFixture) -> None:
    machine = fedkeep.Machine(workers=2)
    ready = for_workers(make_recipe(None, **GIVEN), machine)
    assert (ready.workers, ready.use, ready.allow_code) == (2, ("nets",), True)
    assert for_workers(make_recipe("demo"), machine) == machine
    for model, why in (
        (Net(), "is an object, not a class or function of a file"),
        (lambda: Net(), "a lambda has no name"),
        (type("Cell", (Net,), {"__module__": "__main__", "__qualname__": "run.<locals>.Cell"}), "inside a function"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            alone = for_workers(make_recipe(None, **GIVEN | {"model": model}), machine)
        assert alone.workers == 1
        (record,) = caplog.records
        assert why in record.getMessage()


def test_what_nodes_of_a_cluster_cannot_import_runs_here(caplog: pytest.LogCaptureFixture) -> None:
    machine = fedkeep.Machine(executor="ray", address="10.0.0.5:6379", workers=1)
    assert for_workers(make_recipe(None, **GIVEN), machine).executor == "ray"
    of_script = type("Own", (Net,), {"__module__": "__main__", "__qualname__": "Own"})
    for model, why in ((of_script, "Own is defined in "), (Net(), "is an object, not a class")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            here = for_workers(make_recipe(None, **GIVEN | {"model": model}), machine)
        assert (here.executor, here.address, here.workers) == ("processes", None, 1)
        assert why in caplog.text


SCRIPT = """
import fedkeep, logging, torch
from torch import nn

WEIGHT = {"of all": 1.0}

class Mine(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        logging.getLogger(__name__).debug("another name in a worker")

def loss(logits, labels):
    return WEIGHT["of all"] * nn.functional.cross_entropy(logits, labels)

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
given = dict(data=(x, (x[:, 0] > 0).long()), model=Mine, partition=fedkeep.IID(num_clients=2), rounds=1, seeds=2)
given["loss"] = loss
"""
CALL = 'run = fedkeep.run(**given, methods=["fedavg"], machine=fedkeep.Machine(workers=2), out="run")\n'


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False])
def test_a_program_with_workers(guarded: bool, tmp_path: Path) -> None:
    guard = 'if __name__ == "__main__":\n    ' if guarded else ""
    (tmp_path / "program.py").write_text(SCRIPT + guard + CALL)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    if guarded:
        assert done.returncode == 0, done.stderr
        assert {trial.seed for trial in fedkeep.read_run(tmp_path / "run").trials} == {0, 1}
    else:
        assert 'put the call under if __name__ == "__main__":' in done.stderr
        assert "RunError: a worker process died" in done.stderr
        assert "bootstrapping" not in done.stderr


def test_progress_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append(data)

    class Module:
        @staticmethod
        def get_ipython() -> Any:
            return type("Shell", (), {"kernel": None})()

        @staticmethod
        def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
            shown.append(data)
            return Handle()

    monkeypatch.setitem(sys.modules, "IPython", Module)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", Module)  # type: ignore[arg-type]
    fedkeep.run(**GIVEN, out=tmp_path / "run")
    lines = dict.fromkeys(data["text/plain"].partition("  ")[0] for data in shown)  # a slow round is shown twice
    assert list(lines) == ["fedavg-seed0: round 1/2", "fedavg-seed0: round 2/2"]
    assert shown[0]["text/html"].startswith("<pre>fedavg-seed0")


def test_the_digest_says_what_a_run_learned_from(run: RunResult) -> None:
    recipe = (run.path / "recipe.toml").read_text()
    assert 'name = "arrays:' in recipe
    assert json.loads((run.path / "run.json").read_text())["network"]["shape"] == [64]
    assert run["fedavg", 0].info["dataset"] == "arrays"


@pytest.mark.parametrize("given", ["file", "data set"])
def test_rows_of_clients_need_test_examples_of_their_own(given: str, tmp_path: Path) -> None:
    """A fifth is held out first, so that row 3 would be another example than the file's row 3."""
    file = tmp_path / "patients.csv"
    file.write_text("age,label\n" + "".join(f"{number % 37},{'ab'[number % 2]}\n" for number in range(60)))
    x = torch.arange(60, dtype=torch.float32).reshape(60, 1)
    data = file if given == "file" else fedkeep.data.from_arrays(x, torch.arange(60) % 2)
    rows = {"north": range(20), "south": range(20, 40)}
    with pytest.raises(DataError, match="held out for the test"):
        fedkeep.run(data=data, partition=rows, model="mlp", methods=["fedavg"], rounds=1, out=tmp_path / "run")


def patients(rows: int = 60) -> str:
    lines = [f"{n % 37},{'fm'[n % 2]},{'ab'[n % 3 > 0]},h{n % 4},ID{n}" for n in range(rows)]
    return "age,sex,outcome,hospital,id\n" + "\n".join(lines) + "\n"


@pytest.mark.parametrize("given", ["file", "data frame"])
def test_columns_of_a_table_are_named_in_python(given: str, tmp_path: Path) -> None:
    file = tmp_path / "patients.csv"
    file.write_text(patients())
    data = str(file) if given == "file" else pytest.importorskip("pandas").read_csv(file)
    recipe = make_recipe(None, data=data, label="outcome", partition="hospital", exclude="id", model="mlp")
    assert recipe.run.cohort_size == 4
    dataset = Experiment(recipe).federation(0).dataset
    assert dataset.features == ("age", "sex=f", "sex=m")
    assert dataset.values["client"] == ("h0", "h1", "h2", "h3")
    named = make_recipe(
        None, data=data, label="outcome", client="hospital", columns=["age"], partition=IID(num_clients=4), model="mlp"
    )
    assert Experiment(named).federation(0).dataset.features == ("age",)
    with pytest.raises(DataError, match=r"no column 'hospitl'\. Did you mean 'hospital'"):
        make_recipe(None, data=data, label="outcome", partition="hospitl", exclude="id", model="mlp")


def test_columns_are_changed_in_a_recipe_too(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(patients())
    base = fedkeep.load_recipe("demo", settings=[f"data.name={tmp_path / 'p.csv'}"])
    recipe = make_recipe(base, label="outcome", exclude=["id"], partition="hospital")
    assert (recipe.data_options.label, recipe.data_options.client) == ("outcome", "hospital")
    with pytest.raises(DataError, match="arrays have no columns"):
        make_recipe(None, data=([[1.0]] * 9, [0, 1, 0] * 3), label="y", partition="iid", model="mlp")


def test_a_column_of_clients_says_how_many_there_are_and_take_part(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(patients())
    options = {"data.name": tmp_path / "p.csv", "data.label": "outcome", "data.client": "hospital"}
    words = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    words += ["--set", 'data.exclude=["id"]', "--set", "partition.scheme=column"]
    shown = recipe_of(parser().parse_args(["run", "demo", *words]))
    assert (shown.partition.num_clients, shown.run.cohort_size) == (0, 4), "not the demo's 20 and 10"
    assert recipe_of(parser().parse_args(["run", "demo", *words, "--set", "run.cohort_size=2"])).run.cohort_size == 2
    columns = {"label": "outcome", "partition": "hospital", "exclude": "id"}
    assert make_recipe("demo", data=tmp_path / "p.csv", **columns).run.cohort_size == 4
    with pytest.raises(ConfigError, match=r"from 4 clients\. Set run.cohort_size=4 or less"):
        Experiment(make_recipe("demo", data=tmp_path / "p.csv", cohort_size=5, **columns)).check()


def test_a_cohort_that_is_given_is_that_of_the_changed_recipe() -> None:
    made = make_recipe("demo", cohort_size=4, settings=["partition.num_clients=6"])
    assert (made.run.cohort_size, made.partition.num_clients) == (4, 6)
    with pytest.raises(ConfigError, match="a cohort of 8 cannot be drawn from 6 clients"):
        make_recipe("demo", cohort_size=8, settings=["partition.num_clients=6"])


def test_a_column_of_texts_is_named_in_python(tmp_path: Path) -> None:
    lines = [f"{['good', 'bad'][n % 2]} word {n} of a review,{n % 2},s{n % 3}" for n in range(60)]
    (tmp_path / "reviews.csv").write_text("review,label,shop\n" + "\n".join(lines))
    given: dict[str, Any] = {"data": tmp_path / "reviews.csv", "partition": "shop"}
    for recipe in (
        make_recipe(None, text="review", model="embedding-bag", **given),
        make_recipe("demo", settings=["data.text=review", "model.name=embedding-bag"], **given),
    ):
        assert Experiment(recipe).federation(0).dataset.kind == "token ids"
    settings = ["data.length=5", "data.vocabulary=50", "data.validation=0.25"]
    short = make_recipe(None, text="review", model="embedding-bag", settings=settings, **given)
    tested = Experiment(short).federation(0).dataset.test["input"]
    assert tested.shape == (12, 5), "a quarter of each class of 48 training examples"
    assert int(tested.max()) < 50
    assert "25% of the training" in short.title


def test_a_machine_names_files_that_nobody_imported(tmp_path: Path) -> None:
    """`Machine(use=...)` is enough in Python too: the file is imported, and its method is known by name."""
    file = tmp_path / "own_method_of_a_machine.py"
    file.write_text(
        "from dataclasses import dataclass\n\nimport fedkeep\n\n\n"
        "@dataclass(frozen=True)\nclass OfTheMachine(fedkeep.FedAvg):\n    pass\n"
    )
    machine = fedkeep.Machine(use=(str(file),))
    result = fedkeep.run(**GIVEN | {"methods": ["ofthemachine"]}, machine=machine, out=tmp_path / "run")
    assert result.labels[0] == "OfTheMachine"


def test_what_runs_it_and_who_is_told_are_checked_before_training(tmp_path: Path) -> None:
    for wrong, message in (({"machine": "cpu"}, r"machine is a fedkeep.Machine.*not 'cpu'"),
                           ({"on_progress": 5}, "on_progress is a function")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            fedkeep.run(**GIVEN, **wrong, out=tmp_path / "run")
        with pytest.raises(ConfigError, match=message):
            fedkeep.tune("demo", {"training.lr": [0.1]}, **wrong)
    assert not (tmp_path / "run").exists()


def test_a_second_thread_is_refused(tmp_path: Path) -> None:
    found: list[BaseException] = []

    before = fedkeep.run(**GIVEN, out=tmp_path / "before")

    def other() -> None:
        for use in (lambda: fedkeep.run(**GIVEN, out=tmp_path / "other"), lambda: before["FedAvg"].model()):
            try:
                use()
            except RunError as error:
                found.append(error)

    def start(progress: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    fedkeep.run(**GIVEN, out=tmp_path / "run", on_progress=start)
    assert len(found) == 4
    assert "another thread of this program is in fedkeep.run" in str(found[0])
    fedkeep.run(**GIVEN, out=tmp_path / "nested", on_progress=lambda p: fedkeep.read_run(tmp_path / "run"))


def test_rows_of_one_method_are_named_by_their_labels(tmp_path: Path) -> None:
    recipe = fedkeep.load_recipe("demo", methods=["sfedkd"], rounds=1, seeds=[0], settings=["training.epochs=1"])
    methods = tuple(
        replace(recipe.methods[0], algorithm=fedkeep.SFedKD(tau=tau), label=f"SFedKD (tau {tau})") for tau in (1.0, 2.0)
    )
    run = fedkeep.run(replace(recipe, methods=methods), out=tmp_path / "run")
    several = re.escape("several rows of 'sfedkd'. Name one by its label: SFedKD (tau 1.0); SFedKD (tau 2.0)")
    with pytest.raises(RunError, match=several):
        run["sfedkd", 0]
    with pytest.raises(RunError, match=several):
        fedkeep.export_model(run, tmp_path / "exported", method="sfedkd")
    with pytest.raises(RunError, match="method is a label or the name of a method, not <class"):
        fedkeep.export_model(run, tmp_path / "exported", method=fedkeep.SFedKD)
    assert run["SFedKD (tau 2.0)", 0].model() is not None


def test_an_unfinished_trial_is_counted_once(tmp_path: Path) -> None:
    def interrupt(progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(**GIVEN, out=tmp_path / "run", on_progress=interrupt)
    assert repr(fedkeep.read_run(tmp_path / "run")).endswith("FedAvg; 1 seed; 1 trial unfinished>")
    with pytest.raises(RunError, match="curves are of a metric, by its name"):
        fedkeep.read_run(tmp_path / "run").plot(None)


def test_what_the_users_format_hides_is_no_input_and_a_transform_is_refused() -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"age": [row / 3 for row in range(40)], "leak": [0.0, 1.0] * 20, "label": [0, 1] * 20}
    table = datasets.Dataset.from_dict(columns)
    shown = dataset_of(table.with_format("torch", columns=["age"]))
    assert [column.name for column in shown.columns] == ["age"]
    whole = dataset_of(table.with_format("torch", columns=["age"], output_all_columns=True))
    assert [column.name for column in whole.columns] == ["age", "leak"]
    with pytest.raises(DataError, match=r"a transform \(set_transform, with_transform\), which would not be applied"):
        dataset_of(table.with_transform(lambda rows: rows))


@pytest.mark.parametrize("kind", ["data sets", "pairs", "loaders"])
def test_clients_data_in_a_list_are_told_what_to_give(kind: str) -> None:
    x, y = torch.randn(30, 8), torch.arange(30) % 2
    parts: dict[str, Any] = {"data sets": torch_data.TensorDataset(x, y), "pairs": (x, y)}
    parts["loaders"] = torch_data.DataLoader(parts["data sets"])
    with pytest.raises(DataError, match=r"data sets or loaders themselves. Of a DataLoader give loader\.dataset"):
        dataset_of([parts[kind], parts[kind]])
