"""Steps that are captured and replayed: equal to those that are not, with a capture that this machine can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.interface import Algorithm
from fedkeep.losses import Batch, CrossEntropy, Distillation, FullKL, Loss, ModelView, WeightRule
from fedkeep.losses.classification import LabelLoss
from fedkeep.models import Weights
from fedkeep.training import local_training
from fedkeep.training.cuda_graph import CapturedSteps, CudaGraphCapture, can_capture

TRAINING = replace(tiny.SHORT, epochs=6, batch_size=2)


class Again:
    """What a captured step is here: the function, called again."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.replay = function


class Counted:
    """Captures with `Again`, and counts."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, function: Callable[[], None]) -> Again:
        self.captured += 1
        return Again(function)


def refuse(function: Callable[[], None]) -> Again:
    raise RuntimeError("operation not permitted when stream is capturing")


def run(method: Algorithm[Any, Any], capture: Any, device: str = "cpu") -> tuple[list[dict[str, Any]], Weights]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_training, "capture_on", lambda device: capture)
        simulation = tiny.simulation(method, rounds=2, training=TRAINING, device=torch.device(device))
        return tiny.run_rounds(simulation), simulation.server.model


@pytest.mark.parametrize("method", [FedAvg(), SFedKD()], ids=["fedavg", "sfedkd"])
@pytest.mark.parametrize("capture", [Counted(), refuse], ids=["captured", "refused"])
def test_captured_steps_train_the_same_model(method: Algorithm[Any, Any], capture: Any) -> None:
    records, model = run(method, None)
    again, other = run(method, capture)
    assert again == records
    assert all(torch.equal(model[name], other[name]) for name in model)
    assert capture is refuse or capture.captured, "steps were captured"


def test_each_shape_of_a_batch_has_its_own_capture_which_reads_that_batch() -> None:
    taken: list[Tensor] = []
    capture = Counted()
    steps = CapturedSteps(lambda batches: taken.append(batches[0].data["input"].clone()), capture)
    sizes = [2, 2, 1, 2, 1, 1, 2]
    batches = [torch.full((size, 3), float(number)) for number, size in enumerate(sizes)]
    for images in batches:
        steps([Batch({"input": images}, torch.arange(len(images)))])
    assert [part.tolist() for part in taken] == [part.tolist() for part in batches]
    assert capture.captured == 2


class Own(Loss):
    """A loss of the user's, which may do something else in each step."""

    def __call__(self, model: ModelView, batches: list[Batch]) -> Tensor:
        return model.logits(batches[0]).square().mean()


class OwnLayer(nn.Linear):
    """A layer of the user's, likewise."""


@dataclass(frozen=True)
class OwnRule(WeightRule):
    """A weight rule of the user's, in a loss of the package."""

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        return FullKL(1.0)(teachers, labels, tau)


@pytest.mark.parametrize(
    ("network", "loss"),
    [
        (nn.Sequential(OwnLayer(2, 2)), CrossEntropy()),
        (nn.Linear(2, 2), CrossEntropy() + Own()),
        (nn.Linear(2, 2), LabelLoss(nn.functional.cross_entropy, None)),
        (nn.Linear(2, 2), LabelLoss(nn.CrossEntropyLoss(), None)),
        (nn.Linear(2, 2), Distillation((), OwnRule(), 1.0, "none")),
    ],
)
def test_code_of_the_users_is_not_captured(network: nn.Module, loss: Loss) -> None:
    assert can_capture(tiny.simulation(FedAvg()).context.runner.train_network, CrossEntropy())
    assert can_capture(nn.Linear(2, 2), LabelLoss(None, torch.ones(3)))
    assert can_capture(nn.Linear(2, 2), Distillation(({"weight": torch.ones(2, 2)},), FullKL(1.0), 1.0, "none"))
    assert not can_capture(network, loss)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("method", [FedAvg(), SFedKD()], ids=["fedavg", "sfedkd"])
def test_a_gpu_replays_the_same_steps(method: Algorithm[Any, Any]) -> None:
    models = [run(method, capture, "cuda")[1] for capture in (None, CudaGraphCapture(torch.device("cuda")))]
    for name, weight in models[0].items():
        torch.testing.assert_close(models[1][name], weight, rtol=0, atol=0)
