"""What FedDCL and DDDR share in a client's training: examples and made images in one forward pass, or in two."""

from __future__ import annotations

from typing import Any

import pytest
import tiny

from fedkeep.algorithms.dddr import DDDR
from fedkeep.algorithms.drawn import WithDrawn
from fedkeep.algorithms.feddcl import FedDCL
from fedkeep.engine.embedded import Embedded
from fedkeep.engine.toolbox import LocalClient
from fedkeep.models import Weights, architecture
from fedkeep.objectives import NOTHING

METHODS = [FedDCL, DDDR]


def played(cls: type[WithDrawn[Any, Any]], joint: bool, **changes: Any) -> Embedded:
    """Return an engine after two tasks of one round each."""
    fed = cls(**tiny.TOYS[cls.name()], bn_joint=joint, w_scl=0.5)
    engine = tiny.engine_with_tasks(fed, tiny.stream((2, 1), absent=0), rounds=1, cohort=5, **changes)
    tiny.played(engine)
    return engine


def learned(engine: Embedded) -> Weights:
    """Return what a client trained: its own model, or everybody's."""
    model: Weights = getattr(engine.states["2"], "model", engine.server.model)
    return model


def furthest(one: Embedded, other: Embedded) -> float:
    a, b = learned(one), learned(other)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.mark.parametrize("cls", METHODS)
@pytest.mark.parametrize("stack", [1, 5])
def test_without_batch_norm_one_pass_is_two(cls: type[WithDrawn[Any, Any]], stack: int) -> None:
    apart, at_once = played(cls, False), played(cls, True, stack=stack)
    assert furthest(apart, at_once) < 1e-5


def normed() -> Any:
    return architecture("mean-cnn")(maps=(4, 4)).build(tiny.SHAPE, 2)  # type: ignore[call-arg]


@pytest.mark.parametrize("cls", METHODS)
def test_batch_norm_sees_examples_and_made_images_of_old_classes_at_once(cls: type[WithDrawn[Any, Any]]) -> None:
    engine = played(cls, False, factory=normed)
    assert furthest(engine, played(cls, True, factory=normed)) > 1e-4
    data, state = engine.federation.data("2"), engine.states["2"]
    start = engine.place.networks.initial
    seen = {}
    for joint in (False, True):
        client = LocalClient(engine.place, "2", data, state, task=2, round=9, uses={})
        fed = cls(**tiny.TOYS[cls.name()], bn_joint=joint)
        fit = fed.practised(client, start, state.pool, NOTHING)
        (counter,) = {int(tensor) for name, tensor in fit.model.items() if "num_batches" in name}
        seen[joint] = counter - int(next(tensor for name, tensor in start.items() if "num_batches" in name)), fit.steps
    assert seen == {False: (2 * fit.steps, fit.steps), True: (fit.steps, fit.steps)}, "forward passes, and steps"
