"""Every method on a device that is not the CPU, pretended: nothing meets that may not, and no step waits for it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from fake_device import DEVICE, There, fake_device
from torch import nn

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.data import Augmentation
from fedkeep.interface import Algorithm, algorithms
from fedkeep.models import Network
from fedkeep.trials.simulation import Simulation

METHODS = [tiny.configured(cls) for cls in algorithms().values() if cls.__module__.startswith("fedkeep.")]
MOVING = Augmentation(crop_padding=1, horizontal_flip=True, rotation=10.0, brightness=0.2, cutout=2)
CASES: dict[str, dict[str, Any]] = {"plain": {}, "augmented": {"augmentation": MOVING}, "stacked": {"stack": 2}}


def simulation(method: Algorithm[Any, Any], **changes: Any) -> Simulation:
    in_tasks = method.handles_tasks and "auxiliary" not in method.needs
    if in_tasks:
        return tiny.simulation_with_tasks(method, rounds=1, training=tiny.SHORT, **changes)
    return tiny.simulation(method, rounds=2, training=tiny.SHORT, **changes)


def cases() -> Iterator[Any]:
    """Yield every method with every case; of one method of each family one case is quick, of two all are."""
    for method in METHODS:
        for case in CASES:
            of_family = method.name() in tiny.FAMILIES and (case == "plain" or method.name() in ("fedcad", "fedskf"))
            marks = () if of_family else pytest.mark.slow
            yield pytest.param(method, case, id=f"{method.name()}-{case}", marks=marks)


@pytest.mark.parametrize(("method", "case"), list(cases()))
def test_a_method_runs_on_another_device_and_its_steps_do_not_wait(method: Algorithm[Any, Any], case: str) -> None:
    here = simulation(method, **CASES[case])
    records = tiny.run_rounds(here)
    with fake_device() as rules:
        other = simulation(method, device=DEVICE, load_generator=lambda: tiny.ToyGenerator(DEVICE), **CASES[case])
        assert tiny.run_rounds(other) == records
    assert all(isinstance(tensor, There) for tensor in other.server.model.values())
    assert rules.trainings, "trainings were watched"
    assert not rules.waits, Counter(rules.waits)


def test_what_a_gpu_does_is_timed_where_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says at once that it was told; what it then does would be counted as what next waits for it."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    context, gpu = tiny.simulation(FedAvg()).context, torch.device("cuda")
    for clock in (context.inference_time, context.training_time):
        with clock():
            pass
    assert not waited, "a CPU has done it by then"
    context.runner.device = gpu
    for number, clock in enumerate((context.inference_time, context.training_time)):
        with clock():
            assert waited == [gpu] * number
    assert waited == [gpu, gpu]


CONVOLVED: tuple[nn.Module, ...] = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())


def test_convolutions_batch_norm_dropout_and_clipping_do_not_wait() -> None:
    training = replace(tiny.SHORT, max_grad_norm=0.5)
    with fake_device() as rules:
        simulation = tiny.simulation(
            FedAvg(), factory=convolved, training=training, device=DEVICE, evaluate_local_models=True
        )
        (record,) = tiny.run_rounds(simulation, 1)
    assert 0 < record["loss"] < 10
    assert rules.trainings == 3
    assert not rules.waits, Counter(rules.waits)


def convolved() -> nn.Module:
    return Network(nn.Sequential(*copy.deepcopy(CONVOLVED)), 8, tiny.CLASSES)
