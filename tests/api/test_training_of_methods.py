"""Optimizers and schedules for a run, and for one of its methods."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import fedkeep
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.errors import ConfigError
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import parse_recipe
from fedkeep.interface import Training


@dataclass(frozen=True)
class AvgAdam(FedAvg):
    """FedAvg whose clients train with Adam, whatever the recipe says."""

    title = "AvgAdam"
    training_options = {"optimizer": "adam", "lr": 0.002}  # noqa: RUF012


def test_each_method_trains_with_its_own_optimizer(tmp_path: Path) -> None:
    methods = [
        fedkeep.FedAvg(),
        fedkeep.Method("FedAvg, Adam", fedkeep.FedAvg(), training={"optimizer": "adam", "lr": 0.002}),
        AvgAdam(),
    ]
    training = fedkeep.SGD(lr=0.05, momentum=0.0, epochs=1, lr_schedule="cosine", max_grad_norm=1.0)
    run = fedkeep.run("demo", training=training, methods=methods, rounds=2, seeds=1, out=tmp_path / "run")
    plain, entry, own = (run[label, 0] for label in ("FedAvg", "FedAvg, Adam", "AvgAdam"))
    assert plain.rounds[-1]["correct"] != entry.rounds[-1]["correct"]
    assert entry.rounds == own.rounds
    assert own.info["training"] == {"optimizer": "adam", "lr": 0.002}
    read = parse_recipe(run.recipe, "it")
    assert [read.training_of(method).optimizer for method in read.methods] == ["sgd", "adam", "adam"]
    simulation = Experiment(read).simulation(read.methods[1], 0)
    assert simulation.context.training == Training(**{
        "lr": 0.002, "epochs": 1, "optimizer": "adam", "lr_schedule": "cosine", "lr_rounds": 2, "max_grad_norm": 1.0,
    })  # fmt: skip


def test_settings_of_a_recipe(tmp_path: Path) -> None:
    recipe = fedkeep.load_recipe("demo", settings=["fedseq.training.lr=0.5", "training.epochs=2"])
    rates = {method.label: recipe.training_of(method).lr for method in recipe.methods}
    assert rates["FedSeq"] == 0.5 != rates["FedAvg"]
    with pytest.raises(ConfigError, match=r"training of FedSeq: there is no option 'lrr'\. Did you mean 'lr'"):
        fedkeep.load_recipe("demo", settings=["fedseq.training.lrr=0.5"])


@pytest.mark.parametrize("method", ["scaffold", "fednova", "cwc"])
def test_methods_of_sgd_refuse_another_optimizer(method: str) -> None:
    recipe = fedkeep.load_recipe("demo", methods=[method])
    with pytest.raises(ConfigError, match="is defined for steps of SGD, not of adam"):
        replace(recipe, training=fedkeep.Adam())


def test_names_as_pytorch_has_them() -> None:
    assert fedkeep.SGD() == Training()
    assert (fedkeep.Adam().lr, fedkeep.AdamW().weight_decay) == (0.001, 0.01)
    given: dict[str, Any] = {"learning_rate": 0.1}
    with pytest.raises(ConfigError, match="Adam: there is no option 'learning_rate'"):
        fedkeep.Adam(**given)
