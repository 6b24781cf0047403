"""What FedDCL and DDDR share: forward passes of a client's training, and whose generator draws which classes."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from fedkeep.algorithms.dddr import DDDR
from fedkeep.algorithms.drawing import Drawing, Found
from fedkeep.algorithms.drawn import WithDrawn
from fedkeep.algorithms.feddcl import FedDCL
from fedkeep.algorithms.kd_on_made_images import LwFKDOnMadeImages
from fedkeep.models import Weights, architecture
from fedkeep.objectives import NOTHING
from fedkeep.simulation.simulation import Simulation
from fedkeep.training.party import LocalClient

METHODS = [FedDCL, DDDR]


def played(cls: type[WithDrawn[Any, Any]], joint: bool, **changes: Any) -> Simulation:
    """Return an engine after two tasks of one round each."""
    fed = cls(**tiny.TOYS[cls.name()], bn_joint=joint, w_scl=0.5)
    engine = tiny.engine_with_tasks(fed, tiny.stream((2, 1), absent=0), rounds=1, cohort=5, **changes)
    tiny.played(engine)
    return engine


def learned(engine: Simulation) -> Weights:
    """Return what a client trained: its own model, or everybody's."""
    model: Weights = getattr(engine.client_states["2"], "model", engine.server.model)
    return model


def furthest(one: Simulation, other: Simulation) -> float:
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
    data, state = engine.federation.data("2"), engine.client_states["2"]
    start = engine.context.runner.initial
    seen = {}
    for joint in (False, True):
        client = LocalClient(engine.context, "2", data, state, task=2, round=9, uses={})
        fed = cls(**tiny.TOYS[cls.name()], bn_joint=joint)
        fit = fed.practised(client, start, state.pool, NOTHING)
        (counter,) = {int(tensor) for name, tensor in fit.model.items() if "num_batches" in name}
        seen[joint] = counter - int(next(tensor for name, tensor in start.items() if "num_batches" in name)), fit.steps
    assert seen == {False: (2 * fit.steps, fit.steps), True: (fit.steps, fit.steps)}, "forward passes, and steps"


class Painter(tiny.ToyGenerator):
    """The generator of one task: its prototypes are of a size of their own, and its images all of one brightness."""

    def __init__(self, task: int) -> None:
        super().__init__()
        self.task = task
        self.prototype_sizes = ((task,),)

    def start(self, classes: int) -> Tensor:
        return torch.zeros(classes, self.task)

    def conditions(self, prototypes: Tensor, rng: torch.Generator | None = None) -> Tensor:
        return prototypes.sum(1)[:, None, None].expand(-1, 1, 16)

    def decode(self, drawn: Tensor) -> Tensor:
        return torch.full_like(drawn, 40 * self.task, dtype=torch.uint8)

    def hash(self) -> str:
        return f"painter {self.task}"


BY_TASK = [(FedDCL, {}), (FedDCL, {"regen": "per_round"}), (DDDR, {}), (LwFKDOnMadeImages, {})]


@pytest.mark.parametrize(("cls", "options"), BY_TASK)
def test_each_task_is_drawn_by_its_own_generator(cls: type[Drawing[Any, Any]], options: dict[str, Any]) -> None:
    fed = cls(**{**tiny.TOYS[cls.name()], **options})
    sent: list[tuple[int, Found]] = []
    engine = tiny.engine_with_tasks(fed, tiny.stream((2, 1), absent=0), rounds=2, cohort=5, load_generator=Painter)
    fault = fed.fault

    def noted(server: Any, reply: Any, examples: int) -> str | None:
        sent.extend([(server.task, reply)] if isinstance(reply, Found) else [])
        return fault(server, reply, examples)

    object.__setattr__(fed, "fault", noted)
    records = tiny.played(engine)
    assert not any(record["lost"] for record in records)
    assert {(task, one.generator, one.prototypes.shape) for task, one in sent} == {
        (1, "painter 1", (2, 1)),
        (2, "painter 2", (1, 2)),
    }
    kept = engine.server.state
    drawn = kept.drawn if cls is LwFKDOnMadeImages else kept.pool
    brightness = {c: drawn["image"][drawn["label"] == c].unique().tolist() for c in drawn["label"].unique().tolist()}
    assert brightness == ({2: [80]} if cls is LwFKDOnMadeImages else {0: [40], 1: [40], 2: [80]})
    old = Found(sent[0][1].prototypes, sent[0][1].counts, "painter 1")
    engine.server.begin_round(2, 1)
    assert "prototypes of shape [2, 1]" in str(fault(engine.server, old, 1))
    other = Found(torch.zeros(1, 2), torch.tensor([1]), "painter 1")
    assert "for another generator than the server's" in str(fault(engine.server, other, 1))
