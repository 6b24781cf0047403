"""No method's honest replies are refused by the checks that compare models with those that were sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
from torch import nn

from fedkeep.interface import Algorithm, algorithms
from fedkeep.models.networks import MLP
from fedkeep.rounds.defense import Defense
from fedkeep.trials.simulation import Simulation
from fedkeep.trust.loss_check import LossCheck

WITHOUT_TOY_TASKS = ("fedgems",)  # its public images are of all classes from the start
TRAIN_WHAT_THE_SERVER_HAS_NOT = (  # models of other networks, parts of them, or prototypes
    *("feddcl", "fedgems", "fedmd", "fedweit", "ft-kd", "ewc-kd", "lwf-kd"),
)
WITHOUT_REPLAY = ("dddr",)  # a client trains on images that it generated in an earlier round
QUICK = (*tiny.FAMILIES, "seqkeep", "scaffold")


def wide(classes: int = tiny.CLASSES) -> nn.Module:
    """Return a network whose tensors are large enough for their similarity to be measured."""
    return MLP(hidden=(300, 8)).build(tiny.SHAPE, classes)


METHODS = [
    pytest.param(cls, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, cls in algorithms().items()
]


@pytest.mark.parametrize("cls", METHODS)
def test_honest_models_are_similar_to_those_that_were_sent(cls: type[Algorithm[Any, Any]]) -> None:
    algorithm, training = tiny.configured(cls), replace(tiny.TRAINING, lr=0.01)
    simulation = tiny.simulation(algorithm, rounds=3, factory=wide, training=training)
    assert not any(record["lost"] for record in tiny.run_rounds(simulation))
    if cls.handles_tasks and cls.name() not in WITHOUT_TOY_TASKS:
        simulation = tiny.simulation_with_tasks(algorithm, factory=lambda: wide(1), training=training)
        assert not any(record["lost"] for record in tiny.run_rounds(simulation))


@pytest.mark.parametrize("cls", METHODS)
def test_trainings_can_be_rerun(cls: type[Algorithm[Any, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a re-run changes neither the server's model nor what clients draw later."""
    rerun, reruns = LossCheck.rerun, list[Any]()

    def run() -> Simulation:
        check = Defense(loss_check="server", loss_slack=99.0, rerun_distance=1e9)
        simulation = tiny.simulation(tiny.configured(cls), rounds=2, defense=check)
        tiny.run_rounds(simulation)
        return simulation

    def keep(*args: Any) -> Any:
        reruns.append(rerun(*args))
        return reruns[-1]

    monkeypatch.setattr(LossCheck, "rerun", keep)
    checked = run()
    monkeypatch.setattr(LossCheck, "rerun", lambda *_: None)
    assert tiny.equal(checked.server.model, run().server.model)
    assert all(model is not None and tiny.finite(model) for model in reruns) or cls.name() in WITHOUT_REPLAY
    assert reruns or cls.name() in TRAIN_WHAT_THE_SERVER_HAS_NOT
