"""Copies are told from images that are only alike, and a run that generates images says so."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import tiny
import torch

from fedkeep.algorithms.heterogeneous.feddcl import FedDCL
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.data.partition import Partition
from fedkeep.flower.views import ServerView
from fedkeep.metrics import near_copies
from fedkeep.metrics.memorisation import nearest_distances
from fedkeep.trials.callbacks import Evaluation


def images(count: int, seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 1, 4, 4), generator=rng, dtype=torch.uint8)
    return {"input": pixels, "label": torch.arange(count) % 2}


def test_the_distance_is_the_mean_square_of_pixels() -> None:
    black, grey = torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.full((1, 1, 2, 2), 51, dtype=torch.uint8)
    white = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)
    assert nearest_distances(grey, torch.cat([black, white])).tolist() == pytest.approx([0.2])


def test_copies_are_nearer_than_unseen_images() -> None:
    train, test = images(300, 0), images(200, 1)
    fresh, copied = near_copies(images(200, 2), train, test), near_copies(train, train, test)
    assert fresh is not None
    assert copied is not None
    assert 0.0 < fresh["near_copies"] < 0.15, "about the 5 % of unseen images"
    assert fresh["generated"] == pytest.approx(fresh["test"], rel=0.1)
    assert (copied["generated"], copied["near_copies"]) == (0.0, 1.0)
    other_class = {**train, "label": 1 - train["label"]}
    assert near_copies(other_class, train, test) == pytest.approx(fresh, abs=0.1), "only images of the class count"


def test_nothing_is_said_without_images_to_compare() -> None:
    train = images(10, 0)
    assert near_copies({**train, "label": train["label"] + 9}, train, train) is None
    assert near_copies({**train, "input": train["input"][..., :2]}, train, train) is None


def test_a_run_with_generated_images_tells_at_the_end_of_each_task() -> None:
    pytest.importorskip("diffusers", reason="the extra diffusion is not installed")
    simulation = tiny.simulation_with_tasks(FedDCL(**tiny.TOYS["feddcl"]))
    records = [simulation.run_round().record for _ in range(simulation.rounds)]
    told = ["nearest_real" in record for record in records]
    assert told == [number % simulation.settings.run.rounds == 0 for number in range(1, len(records) + 1)]
    assert records[-1]["nearest_real"]["generated"] > 0


def test_the_server_of_real_sites_compares_with_nothing() -> None:
    pytest.importorskip("diffusers", reason="the extra diffusion is not installed")
    simulation = tiny.simulation_with_tasks(FedDCL(**tiny.TOYS["feddcl"]))
    simulation.callbacks = []
    last = [simulation.run_round() for _ in range(simulation.settings.run.rounds)][-1]
    dataset, label = simulation.federation.dataset, simulation.server.state.pool["label"][0]
    row = {name: column[dataset.train["label"] == label][:1] for name, column in dataset.train.items()}
    simulation.federation = ServerView(replace(dataset, train=row), Partition.empty(), sizes={"a": [1, 1]})
    Evaluation().on_round_end(simulation, last)
    assert "correct" in last.record
    assert "nearest_real" not in last.record, "one training row says nothing about copies"


@dataclass
class Pool:
    """A user's state with a field of the same name as FedDCL's."""

    pool: tuple[str, ...] = ("0", "1")


def test_a_field_of_the_servers_state_is_not_taken_for_images() -> None:
    simulation = tiny.simulation(FedAvg(), rounds=1)
    simulation.callbacks = []
    result = simulation.run_round()
    simulation.server.state = Pool()
    Evaluation().on_round_end(simulation, result)
    assert "nearest_real" not in result.record
