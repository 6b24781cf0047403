"""Runs on inputs of every kind; the examples of docs/data.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from torch import nn

import fedkeep
from fedkeep.cli.main import main
from fedkeep.errors import ConfigError
from fedkeep.experiment.build import untrained_classes
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import load_recipe, parse_recipe
from fedkeep.models.custom import custom

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.S | re.M)


@pytest.mark.parametrize(("example", "clients", "least"), [(0, 3, 0.9), (1, 8, 0.85)])
def test_the_examples_of_the_page_on_data_learn(tmp_path: Path, example: int, clients: int, least: float) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    exec(compile(blocks("python")[1 + example], "docs/data.md", "exec"), {})  # noqa: S102 - the repository's own text
    (tmp_path / "recipe.toml").write_text(blocks("toml")[example])
    run = fedkeep.run("recipe.toml", out=tmp_path / "run")
    for trial in run.trials:
        assert trial.info["num_clients"] == clients
        assert trial.accuracies[-1] >= least, trial.label
    assert re.search(r"north: \d+" if example == 0 else r"shop 0: \d+", (tmp_path / "run" / "report.html").read_text())


def test_a_recipe_keeps_the_options_of_its_data(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(blocks("toml")[1])
    recipe = load_recipe("recipe.toml")
    assert recipe.data_options.text == "review"
    assert parse_recipe(recipe.to_toml(), "again") == load_recipe("recipe.toml").__class__(
        **{**vars(recipe), "name": "again"}
    )
    with pytest.raises(ConfigError, match=r"no option 'lable'\. Did you mean 'label'"):
        load_recipe("recipe.toml", settings=["data.lable=x"])


def arrays(**changes: np.ndarray) -> None:
    noise = np.random.default_rng(0)
    np.savez("own.npz", **({"x": noise.normal(size=(60, 5)), "y": np.arange(60) % 3} | changes))


BASE = ["data.name=own.npz", "partition.scheme=iid", "partition.num_clients=4"]


@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        (
            "target",
            [],
            "TARGET needs images, which it rotates or generates, and .* own.npz are numbers of 5",
        ),
        ("fedpass", [], "FedPASS needs images"),
        ("fedavg", ["augmentation.horizontal_flip=true"], r"\[augmentation\] changes images"),
        ("fedavg", ["model.name=lenet5"], r"lenet5 needs images.*\[5\]"),
        (
            "fedavg",
            ["model.name=embedding-bag"],
            "embedding-bag reads token ids, and the inputs of",
        ),
    ],
)
def test_what_needs_other_inputs_is_refused_before_anything_runs(
    tmp_path: Path, method: str, settings: list[str], says: str
) -> None:
    arrays()
    path = tiny.write_recipe(tmp_path)
    recipe = load_recipe(path, methods=[method], settings=[*BASE, *settings, "tasks.num_classes=0"])
    with pytest.raises(ConfigError, match=says):
        Experiment(recipe).check()


def test_images_that_are_not_square_are_not_rotated(tmp_path: Path) -> None:
    arrays(x=np.random.default_rng(0).integers(256, size=(60, 1, 8, 9), dtype=np.uint8))
    settings = [*BASE, "tasks.num_classes=0"]
    for methods, more in (["fedpass"], []), (["fedskf"], ["fedskf.level=pass"]):
        recipe = load_recipe(tiny.write_recipe(tmp_path), methods=methods, settings=[*settings, *more])
        with pytest.raises(ConfigError, match=r"rotates images, which must be square, and those of .* 8 x 9"):
            Experiment(recipe).check()


def test_token_ids_need_a_network_with_as_many(tmp_path: Path) -> None:
    arrays(x=np.random.default_rng(0).integers(30, size=(60, 7)))
    path = tiny.write_recipe(tmp_path)
    with pytest.raises(ConfigError, match=r"mlp reads images or numbers.*embedding-bag"):
        Experiment(load_recipe(path, settings=BASE)).check()
    text = ["model.name=embedding-bag", "model.vocabulary=29"]
    with pytest.raises(ConfigError, match=r"token ids up to 29, and model\.vocabulary is 29. Set it to 30"):
        Experiment(load_recipe(path, settings=[*BASE, *text])).check()
    text[1] = "model.vocabulary=30"
    run = fedkeep.run(load_recipe(path, settings=[*BASE, *text]), out=tmp_path / "run")
    assert all(trial.finished for trial in run.trials)


def test_signals_of_any_shape(tmp_path: Path) -> None:
    arrays(x=np.random.default_rng(0).normal(size=(60, 2, 9)))
    run = fedkeep.run(load_recipe(tiny.write_recipe(tmp_path), settings=BASE), out=tmp_path / "run")
    assert run.trials[0].info["input"]["shape"] == [2, 9]


def test_the_demo_in_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    arguments = [
        "run",
        "--set",
        "tasks.num_tasks=5",
        "--methods",
        "fedavg",
        "--rounds",
        "1",
        "--seeds",
        "0",
        "--workers",
        "1",
    ]
    assert main([*arguments, "--quiet", "--out", out]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "in each of 5 tasks (each client's shares of the new classes repeat in every task)" in output
    assert "repeat in every task" in (tmp_path / "run" / "report.html").read_text()


def test_classes_that_no_client_has_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    y, client = np.arange(60) % 3, np.arange(60) % 3
    arrays(x_test=np.zeros((3, 5)), y_test=np.arange(3), client=client, y=y)
    settings = ["data.name=own.npz", "partition.scheme=column", "partition.num_groups=2", "partition.num_clients=2"]
    experiment = Experiment(load_recipe(tiny.write_recipe(tmp_path), settings=settings))
    experiment.check()
    (missing,) = untrained_classes(experiment.federation(0))
    assert f"No client has an example of '{missing}'" in caplog.text


def test_clients_with_one_example_are_told_of_batch_norm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrays(x_test=np.zeros((3, 5)), y_test=np.arange(3), client=np.minimum(np.arange(60), 2), y=np.arange(60) % 3)
    network = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    settings = ["data.name=own.npz", "partition.scheme=column"]
    recipe = load_recipe(tiny.write_recipe(tmp_path), settings=settings)
    Experiment(recipe).check()
    assert "Batch norm" not in caplog.text
    Experiment(replace(recipe, model=custom(network))).check()
    assert "2 of 3 clients have a single example. Batch norm cannot learn from one" in caplog.text


def test_tasks_of_a_single_class_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny.write_recipe(tmp_path)
    for sizes, named in (
        ("[5, 5]", ""),
        ("[1, 9]", ""),
        ("[7, 1, 2]", "Task 2 has a"),
        ("[8, 1, 1]", "Each of the tasks 2, 3 has a"),
    ):
        caplog.clear()
        settings = [
            f"tasks.num_tasks={sizes.count(',') + 1}",
            f"tasks.classes_per_task={sizes}",
            "partition.scheme=iid",
        ]
        Experiment(load_recipe(path, methods=["fedlwf"], settings=settings)).check()
        assert (named in caplog.text) if named else ("single" not in caplog.text)
