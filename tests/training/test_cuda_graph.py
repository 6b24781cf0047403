"""Steps that are recorded and replayed: equal to those that are not, with a recorder that this machine can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.interface import Algorithm
from fedkeep.losses import Batch, CrossEntropy, Loss, ModelView
from fedkeep.models import Weights
from fedkeep.training import local_training
from fedkeep.training.cuda_graph import CudaRecorder, GraphSteps, can_record

TRAINING = replace(tiny.SHORT, epochs=6, batch_size=2)


class Again:
    """What a recorded step is here: the function, called again."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.replay = function


class Counted:
    """Records with `Again`, and counts."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, function: Callable[[], None]) -> Again:
        self.recorded += 1
        return Again(function)


def refuse(function: Callable[[], None]) -> Again:
    raise RuntimeError("operation not permitted when stream is capturing")


def run(method: Algorithm[Any, Any], recorder: Any, device: str = "cpu") -> tuple[list[dict[str, Any]], Weights]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_training, "recorder_of", lambda device: recorder)
        simulation = tiny.simulation(method, rounds=2, training=TRAINING, device=torch.device(device))
        return tiny.run_rounds(simulation), simulation.server.model


@pytest.mark.parametrize("method", [FedAvg(), SFedKD()], ids=["fedavg", "sfedkd"])
@pytest.mark.parametrize("recorder", [Counted(), refuse], ids=["recorded", "refused"])
def test_recorded_steps_train_the_same_model(method: Algorithm[Any, Any], recorder: Any) -> None:
    records, model = run(method, None)
    again, other = run(method, recorder)
    assert again == records
    assert all(torch.equal(model[name], other[name]) for name in model)
    assert recorder is refuse or recorder.recorded, "steps were recorded"


def test_each_shape_of_a_batch_has_its_own_recording_which_reads_that_batch() -> None:
    taken: list[Tensor] = []
    recorder = Counted()
    steps = GraphSteps(lambda batches: taken.append(batches[0].data["input"].clone()), recorder)
    sizes = [2, 2, 1, 2, 1, 1, 2]
    batches = [torch.full((size, 3), float(number)) for number, size in enumerate(sizes)]
    for images in batches:
        steps([Batch({"input": images}, torch.arange(len(images)))])
    assert [part.tolist() for part in taken] == [part.tolist() for part in batches]
    assert recorder.recorded == 2


class Own(Loss):
    """A loss of the user's, which may do something else in each step."""

    def __call__(self, model: ModelView, batches: list[Batch]) -> Tensor:
        return model.logits(batches[0]).square().mean()


def test_only_what_does_the_same_in_every_step_is_recorded() -> None:
    network = tiny.simulation(FedAvg()).context.runner.train_network
    assert can_record(network, CrossEntropy())
    assert not can_record(network, CrossEntropy() + Own())
    assert not can_record(nn.Linear(2, 2), CrossEntropy())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("method", [FedAvg(), SFedKD()], ids=["fedavg", "sfedkd"])
def test_a_gpu_replays_the_same_steps(method: Algorithm[Any, Any]) -> None:
    models = [run(method, recorder, "cuda")[1] for recorder in (None, CudaRecorder(torch.device("cuda")))]
    for name, weight in models[0].items():
        torch.testing.assert_close(models[1][name], weight, rtol=0, atol=0)
