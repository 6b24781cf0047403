"""No method's honest replies are refused by the checks that compare models with those that were sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
from torch import nn

from fedkeep.interface import Algorithm, algorithms
from fedkeep.models.networks import MLP
from fedkeep.rounds.run_settings import Defense

WITHOUT_TOY_TASKS = ("fedgems",)  # its public images are of all classes from the start
QUICK = (*tiny.FAMILIES, "seqkeep", "scaffold")


def wide(classes: int = tiny.CLASSES) -> nn.Module:
    """Return a network whose tensors are large enough for their similarity to be measured."""
    return MLP(hidden=(300, 8)).build(tiny.SHAPE, classes)


METHODS = [
    pytest.param(cls, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, cls in algorithms().items()
]


@pytest.mark.parametrize("cls", METHODS)
def test_honest_models_pass_all_checks(cls: type[Algorithm[Any, Any]]) -> None:
    algorithm, training = tiny.configured(cls), replace(tiny.TRAINING, lr=0.01)
    defense = Defense(loss_check="server")
    simulation = tiny.simulation(algorithm, rounds=3, factory=wide, training=training, defense=defense)
    assert not any(record["lost"] for record in tiny.run_rounds(simulation))
    if cls.handles_tasks and cls.name() not in WITHOUT_TOY_TASKS:
        simulation = tiny.simulation_with_tasks(algorithm, factory=lambda: wide(1), training=training)
        assert not any(record["lost"] for record in tiny.run_rounds(simulation))
