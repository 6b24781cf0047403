"""A server whose extractor is frozen: nothing of it is trained, sent or saved, and no image goes through it twice."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_extractor
import tiny
import torch
from torch import nn

from fedkeep.algorithms.heterogeneous.ewc_kd import EWCKD
from fedkeep.algorithms.heterogeneous.feddcl import FedDCL
from fedkeep.algorithms.heterogeneous.ft_kd import FTKD
from fedkeep.algorithms.heterogeneous.lwf_kd import LwFKD
from fedkeep.algorithms.incremental.fedlwf import FedLwF
from fedkeep.algorithms.incremental.fedpass import FedPASS
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.data import Augmentation, Federation
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, get_algorithm
from fedkeep.models import get_architecture
from fedkeep.models.pretrained import Extractor, FrozenNetwork, load_extractor
from fedkeep.trials.checkpoint import Checkpoint
from fedkeep.trials.simulation import Simulation

HEAD = {"classifier.weight", "classifier.bias"}


@pytest.fixture
def extractor(tmp_path: Path) -> Extractor:
    return load_extractor(small_extractor.save(tmp_path / "extractor"))


def plain(classes: int) -> nn.Module:
    return get_architecture("mlp")(hidden=(8,)).build(tiny.SHAPE, classes)  # type: ignore[call-arg]


def feddcl(extractor: Extractor, method: Algorithm[Any, Any] | None = None, **changes: Any) -> Simulation:
    """Return FedDCL, or another, with a frozen server and clients of another network, two tasks of two rounds."""
    tasks = tiny.stream((2, 1), absent=0)
    own = dict.fromkeys(Federation.from_stream(tasks, 1).clients, partial(plain, 2))
    method = method or FedDCL(**tiny.TOYS["feddcl"])
    return tiny.simulation_with_tasks(
        method, tasks, cohort_size=5, factory=partial(FrozenNetwork, extractor, 2), client_factories=own, **changes
    )


def test_feddcl_trains_the_servers_classifier_and_nothing_else(extractor: Extractor, tmp_path: Path) -> None:
    simulation, before = feddcl(extractor), extractor.hash()
    first = simulation.server.model
    tiny.run_rounds(simulation)
    assert extractor.hash() == before
    assert simulation.server.model.keys() == HEAD
    assert simulation.server.model["classifier.weight"].shape == (3, 8), "it grew with its classes"
    assert not torch.equal(simulation.server.model["classifier.weight"][:2], first["classifier.weight"])
    assert simulation.client_states["0"].model.keys() != HEAD, "clients have networks of their own"
    Checkpoint(tmp_path / "saved").save(simulation, {})
    saved = tmp_path / "saved" / f"server-{simulation.finished}.safetensors"
    assert saved.stat().st_size < 2000 < (tmp_path / "extractor" / "model.safetensors").stat().st_size


def test_features_are_computed_once_a_task_and_change_nothing(
    extractor: Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = feddcl(extractor, evaluate_every=2)
    tiny.run_rounds(simulation)
    method = simulation.algorithm
    assert isinstance(method, FedDCL)
    tests = [len(simulation.federation.for_task(task).dataset.test["label"]) for task in (1, 2)]
    result = (2 + 1) * method.server_images_per_class  # those of old classes were read in the task before
    assert extractor.read == sum(tests) + result, "test images, and the server's made ones, in each task"

    monkeypatch.setattr("fedkeep.models.pretrained.MEMORY", 0)
    forgetful = Extractor(extractor.network, extractor.reading)
    again = feddcl(forgetful, evaluate_every=2)
    tiny.run_rounds(again)
    assert forgetful.read > extractor.read
    assert tiny.equal(again.server.model, simulation.server.model)


def test_a_resume_ends_in_the_same_bits(extractor: Extractor, tmp_path: Path) -> None:
    whole, stopped, resumed = (feddcl(extractor) for _ in range(3))
    tiny.run_rounds(whole)
    tiny.run_rounds(stopped, 3)
    Checkpoint(tmp_path / "saved").save(stopped, {})
    Checkpoint(tmp_path / "saved").restore(resumed)
    tiny.run_rounds(resumed)
    assert tiny.equal(resumed.server.model, whole.server.model)


@pytest.mark.parametrize("changes", [{}, {"stack": 3}, {"through_codec": True}])
def test_clients_may_share_one_too_and_send_their_classifiers(extractor: Extractor, changes: dict[str, Any]) -> None:
    simulation = tiny.simulation(FedAvg(), factory=partial(FrozenNetwork, extractor, tiny.CLASSES), rounds=8, **changes)
    records = tiny.run_rounds(simulation)
    assert records[-1]["down"] == 3 * 4 * (8 * 3 + 3)
    assert records[-1]["up"] == records[-1]["down"] + 3 * 3 * 8, "and what the training took"
    assert not tiny.equal(simulation.server.model, simulation.context.runner.initial)
    assert extractor.read <= sum(tiny.SIZES) + 31


def test_it_reads_images_as_they_are_while_other_networks_augment_them(extractor: Extractor) -> None:
    simulation = feddcl(extractor, augmentation=Augmentation(horizontal_flip=True))
    assert simulation.context.augmentation == Augmentation()
    assert {location.augmentation for location in simulation.own_contexts.values()} == {
        Augmentation(horizontal_flip=True)
    }
    assert all(context.timer is simulation.context.timer for context in simulation.own_contexts.values())
    tiny.run_rounds(simulation)
    same = feddcl(extractor)
    with torch.no_grad():
        images = same.federation.dataset.test["input"]
        assert torch.equal(simulation.context.normalise(images), extractor(images))


def test_old_models_teach_about_features(extractor: Extractor) -> None:
    tasks = tiny.stream((2, 1), absent=0)
    simulation = tiny.simulation_with_tasks(
        FedLwF(), tasks, cohort_size=5, factory=partial(FrozenNetwork, extractor, 2)
    )
    tiny.run_rounds(simulation)
    assert simulation.server.model["classifier.weight"].shape == (3, 8)


@pytest.mark.parametrize("method", [FTKD(), EWCKD(), LwFKD()], ids=lambda method: str(method.name()))
def test_the_other_rows_of_its_table(extractor: Extractor, method: Algorithm[Any, Any]) -> None:
    simulation, before = feddcl(extractor, method), extractor.hash()
    first = simulation.server.model
    tiny.run_rounds(simulation)
    assert extractor.hash() == before
    assert simulation.server.model.keys() == HEAD
    assert not torch.equal(simulation.server.model["classifier.weight"][:2], first["classifier.weight"])
    tests = sum(len(simulation.federation.for_task(task).dataset.test["label"]) for task in (1, 2))
    assert extractor.read == len(simulation.federation.server_data["label"]) + tests, (
        "public images, and test images, once"
    )


@pytest.mark.parametrize("name", ["target", "lander"])
def test_methods_that_look_for_images_are_told(extractor: Extractor, name: str) -> None:
    tasks = tiny.stream((2, 1), absent=0)
    method = tiny.configured(get_algorithm(name))
    simulation = tiny.simulation_with_tasks(method, tasks, cohort_size=5, factory=partial(FrozenNetwork, extractor, 2))
    with pytest.raises(ConfigError):
        tiny.run_rounds(simulation)


def test_methods_that_turn_images_are_refused(extractor: Extractor) -> None:
    with pytest.raises(ConfigError, match="rotates images cannot learn from a frozen extractor"):
        tiny.simulation(FedPASS(), factory=partial(FrozenNetwork, extractor, tiny.CLASSES))
