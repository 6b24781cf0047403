"""Steps that are captured and replayed: equal to those that are not, with a capture that this machine can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from fedkeep.algorithms.incremental.fedlwf import FedLwF
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedcad import FedCAD
from fedkeep.algorithms.parallel.fedprox import FedProx
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.interface import Algorithm, Training
from fedkeep.losses import Batch, CrossEntropy, Distillation, FullKL, Loss, ModelView, WeightRule
from fedkeep.losses.classification import LabelLoss
from fedkeep.models import Weights
from fedkeep.training import local_training
from fedkeep.training.cuda_graph import CapturedSteps, CudaGraphCapture, can_capture

TRAINING = replace(tiny.SHORT, epochs=6, batch_size=2)
CAPTURED = [tiny.configured(cls) for cls in (FedAvg, FedProx, FedCAD, SFedKD)]


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


def run(
    method: Algorithm[Any, Any], capture: Any, device: str = "cpu", training: Training = TRAINING, rounds: int = 2
) -> tuple[list[dict[str, Any]], Weights]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_training, "capture_on", lambda device: capture)
        simulation = tiny.simulation(method, rounds=rounds, training=training, device=torch.device(device))
        return tiny.run_rounds(simulation), simulation.server.model


@pytest.mark.parametrize("method", [FedAvg(), SFedKD()], ids=["fedavg", "sfedkd"])
@pytest.mark.parametrize("capture", [Counted(), refuse], ids=["captured", "refused"])
def test_captured_steps_train_the_same_model(method: Algorithm[Any, Any], capture: Any) -> None:
    records, model = run(method, None)
    again, other = run(method, capture)
    assert again == records
    assert all(torch.equal(model[name], other[name]) for name in model)
    assert capture is refuse or capture.captured, "steps were captured"


@pytest.mark.parametrize("method", CAPTURED, ids=lambda method: method.name())
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_one_client_captured_is_replayed_for_the_next(method: Algorithm[Any, Any], momentum: float) -> None:
    """Clients of one to many examples, two learning rates: each must read its own numbers and nobody else's."""
    training = replace(TRAINING, momentum=momentum, lr_decay=0.5, lr_schedule="step", lr_step_size=2)
    capture = Counted()
    records, model = run(method, None, training=training, rounds=4)
    again, other = run(method, capture, training=training, rounds=4)
    assert again == records
    assert all(torch.equal(model[name], other[name]) for name in model)
    assert 0 < capture.captured < 4 * len(tiny.SIZES), "most clients' steps were captured for others"


class Recorded:
    """A stepper that notes which images and which rows of a loss it was given."""

    def __init__(self) -> None:
        self.taken: list[tuple[list[float], list[float]]] = []
        self.restarts = 0

    def restart(self) -> None:
        self.restarts += 1

    def step(self, loss: Loss, batches: list[Batch]) -> None:
        assert isinstance(loss, Rows)
        self.taken.append((batches[0].data["input"][:, 0].tolist(), loss.rows[batches[0].index].tolist()))


@dataclass(frozen=True, eq=False)
class Rows(Loss):
    """A loss with a number for each example."""

    per_example_fields = ("rows",)
    rows: Tensor

    def __call__(self, model: ModelView, batches: list[Batch]) -> Tensor:
        raise AssertionError


def test_each_shape_of_a_batch_has_its_own_capture_which_reads_that_batch_and_that_clients_rows() -> None:
    recorded, capture = Recorded(), Counted()
    steps = CapturedSteps(recorded, capture)
    for client, count in enumerate([2, 2, 4, 5, 3]):  # twice as many rows as the first has fit, five do not
        rows = 100.0 * client + torch.arange(count)
        steps.restart(Rows(rows))
        for start in (0, 1, 0, 1):
            index = torch.arange(start, 2)
            images = rows[index].unsqueeze(1).expand(-1, 3)
            steps([Batch({"input": images}, index)])
            assert recorded.taken[-1] == (rows[index].tolist(), rows[index].tolist())
    assert recorded.restarts == 5
    assert capture.captured == 4, "two shapes, once for the first clients and once from the one with five rows on"


def test_a_captured_step_reads_weights_that_are_trained_now() -> None:
    """A new task brings new rows of the classifier, and with them other tensors."""
    capture = Counted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_training, "capture_on", lambda device: capture)
        simulation = tiny.simulation_with_tasks(tiny.configured(FedLwF), rounds=2, training=TRAINING)
        again = tiny.run_rounds(simulation)
    plain = tiny.simulation_with_tasks(tiny.configured(FedLwF), rounds=2, training=TRAINING)
    assert again == tiny.run_rounds(plain)
    assert capture.captured
    assert all(torch.equal(plain.server.model[name], weight) for name, weight in simulation.server.model.items())


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
