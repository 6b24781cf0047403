"""What a trial is expected to take, beside what it takes; a second stands for an image that was trained on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from torch import nn

import fedkeep
from fedkeep.cli.dry_run import NotEstimated, estimate
from fedkeep.errors import ConfigError
from fedkeep.experiment.build import build_federation, build_simulation
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.runtime import Machine
from fedkeep.interface import Fit, Training
from fedkeep.models.custom import custom
from fedkeep.training import party
from fedkeep.training.context import ClientContext
from fedkeep.training.local_training import TrainJob
from fedkeep.training.model_runner import ModelRunner


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = party.fit

    def counting(runner: ModelRunner, job: TrainJob, training: Training) -> Fit:
        found = fit(runner, job, training)
        trained.append(found.num_examples * job.epochs)
        return found

    @contextmanager
    def training_time(self: ClientContext) -> Iterator[None]:
        trained.clear()
        yield
        self.timer.train += sum(trained)

    trained: list[int] = []
    monkeypatch.setattr(party, "fit", counting)
    monkeypatch.setattr(ClientContext, "training_time", training_time)


def recipe(folder: Path, *settings: str) -> Recipe:
    text = tiny.RECIPE.replace(
        'scheme = "exdir"\nnum_clients = 8\nclasses_per_client = 2\nalpha = 0.5', "num_clients = 4"
    )
    text += '\n[[methods]]\nalgorithm = "ft-kd"\n\n[public]\nname = "digits"\nnum_images = 700\n'
    changes = ("run.cohort_size=4", "training.batch_size=16", *settings)
    return load_recipe(tiny.write_recipe(folder, text), settings=changes, rounds=3)


def taken(recipe: Recipe, method: Any) -> float:
    """Return what its rounds take, the first of each task as the second."""
    simulation = build_simulation(recipe, method, 0, build_federation(recipe, 0))
    timings = [simulation.run_round().timings["train"] for _ in range(recipe.rounds)]
    return float(sum(timings))


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    "settings", [(), pytest.param(("tasks.num_tasks=2", "tasks.classes_per_task=[8,2]"), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["fedavg", "fedseq", "ft-kd"])
def test_it_grows_with_the_clients_data_and_with_the_public_set(
    name: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    agree(recipe(tmp_path, *settings), name)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", ["training.epochs=4"]),
        ("fedavg", ["training.epochs=3", "fedavg.training.epochs=2"]),
        *(pytest.param(name, ["training.epochs=4"], marks=pytest.mark.slow) for name in ("fedseq", "ft-kd")),
    ],
)
def test_it_grows_with_the_epochs(name: str, settings: list[str], tmp_path: Path) -> None:
    agree(recipe(tmp_path, *settings), name)


def agree(whole: Recipe, name: str) -> None:
    method = next(method for method in whole.methods if method.algorithm.name() == name)
    expected = estimate(whole, method, Machine(threads=1))
    assert expected.seconds == pytest.approx(taken(whole, method), rel=0.1)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", ["run.cohort_size=8", "run.min_clients=6"]),
        ("finetune", ["tasks.num_tasks=2"]),
    ],
)
def test_what_holds_of_a_whole_run_need_not_hold_of_the_trial(method: str, settings: list[str], tmp_path: Path) -> None:
    whole = load_recipe(tiny.write_recipe(tmp_path), methods=[method], settings=settings)
    assert estimate(whole, whole.methods[0], Machine()).seconds > 0


class TenClasses(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


def test_what_is_refused_of_a_few_clients_is_asked_of_all(tmp_path: Path) -> None:
    changes = ["attack.kind=sign_flip", "attack.share=0.1", "partition.num_clients=20", "run.cohort_size=5"]
    path = tiny.write_recipe(tmp_path)
    whole = load_recipe(path, methods=["fedavg"], settings=changes)
    assert estimate(whole, whole.methods[0], Machine()).seconds > 0
    small = load_recipe(path, methods=["fedavg"], settings=[*changes, "attack.share=0.01"])
    with pytest.raises(ConfigError, match=r"0.01 of 20 clients is less than one"):
        estimate(small, small.methods[0], Machine())
    fixed = replace(whole, model=custom(TenClasses, "ten"))
    assert estimate(fixed, fixed.methods[0], Machine()).seconds > 0


def test_a_method_that_draws_images_is_not_estimated(tmp_path: Path) -> None:
    whole = load_recipe(tiny.write_recipe(tmp_path), methods=["feddcl"], settings=["generator.name=somewhere"])
    with pytest.raises(NotEstimated, match="FedDCL is not estimated: most of its time"):
        estimate(whole, whole.methods[0], Machine())


def test_bytes_of_predictions_are_those_of_the_whole_public_set(tmp_path: Path) -> None:
    whole = recipe(tmp_path)
    method = next(method for method in whole.methods if method.algorithm.name() == "ft-kd")
    run = fedkeep.run(replace(whole, methods=(method,)), out=tmp_path / "run")
    sent = [row["up"] + row["down"] for row in run.trials[0].rounds]
    assert estimate(whole, method, Machine()).sent == pytest.approx(sent[-1] * whole.rounds, rel=0.3)
