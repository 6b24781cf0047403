"""A population of a million: only those who are asked cost anything."""

from __future__ import annotations

import sys

import tiny
import torch

from fedkeep.algorithms.parallel.scaffold import SCAFFOLD
from fedkeep.data import DataSet, Federation
from fedkeep.data.partition import Partition
from fedkeep.experiment.experiment import MAX_LISTED_CLIENTS, describe_partition

MANY = 1_000_000


def populous() -> Federation:
    train = {"input": torch.zeros(MANY, *tiny.SHAPE, dtype=torch.uint8), "label": torch.arange(MANY) % tiny.CLASSES}
    like = tiny.dataset()
    dataset = DataSet("many", train, like.test, like.label_names, like.mean, like.std)
    return Federation(dataset, Partition("by hand", {}, 0, 1, torch.arange(MANY), torch.arange(MANY + 1)))


def test_of_a_million_clients_only_the_asked_exist() -> None:
    simulation = tiny.simulation(SCAFFOLD(), federation=populous(), rounds=3)
    tiny.run_rounds(simulation, 1)
    before = sys.getallocatedblocks()
    records = tiny.run_rounds(simulation)
    assert sys.getallocatedblocks() - before < 10_000, "nothing was made for each client"
    assert set(simulation.client_states) == set(simulation.sample_cohort(1)) | {
        c for record in records for c in record["cohort"]
    }
    assert len(simulation.client_states) == 9


def test_who_holds_what_is_told_of_a_population_that_can_be_read() -> None:
    described = describe_partition(populous())
    assert described["clients"] == MANY
    assert "counts" not in described
    assert len(describe_partition(tiny.federation())["counts"]) == len(tiny.SIZES) <= MAX_LISTED_CLIENTS
