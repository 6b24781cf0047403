"""The simulation task after task: heads that grow alike everywhere, workers that follow, and what a record says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
import torch
from thread_worker import with_thread
from torch import Tensor

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.data import Federation
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Client, Cohort, Fit, NoState, Server, on_client
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.models.heads import BIAS, WEIGHT
from fedkeep.rounds.run_settings import RunSettings


@dataclass
class WatchedState:
    """What a client kept of each task's beginning."""

    rows: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    model: Weights = field(default_factory=dict)
    where: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Watching(Algorithm[NoState, WatchedState]):
    """FedAvg whose clients look at what they get as a task begins, and keep its last model."""

    title = "test watching"

    def round(self, server: Server, cohort: Cohort) -> None:
        replies = cohort.ask(self.train, server.model)
        server.model = next(iter(replies.values())).model

    def begin_task(self, server: Server, clients: Cohort) -> None:
        super().begin_task(server, clients)
        clients.ask(self.look, server.model)

    def end_task(self, server: Server, clients: Cohort) -> None:
        clients.ask(self.keep, server.model)

    @on_client
    def train(self, client: Client[WatchedState], model: Weights) -> Fit:
        client.state.where = [
            *client.state.where,
            [client.task, client.round, client.num_old_classes, client.num_classes],
        ]
        return client.fit(model, CrossEntropy())

    @on_client
    def look(self, client: Client[WatchedState], model: Weights) -> None:
        kept = client.state
        kept.rows = [
            *kept.rows,
            model[WEIGHT][client.num_old_classes :],
            client.initial_model[WEIGHT][client.num_old_classes :],
        ]
        if kept.model:
            images = {"input": torch.full((2, *tiny.SHAPE), 100, dtype=torch.uint8)}
            older, grown = kept.model, client.expand_head(kept.model)
            assert client.network(older)(torch.zeros(1, *tiny.SHAPE)).shape == (1, client.num_old_classes)
            kept.logits = [*kept.logits, *(client.predict(m, images) for m in (older, grown, model))]

    @on_client
    def keep(self, client: Client[WatchedState], model: Weights) -> None:
        client.state.model = model


def test_new_rows_are_the_same_everywhere_and_old_logits_stay() -> None:
    simulation = tiny.simulation_with_tasks(Watching(), tiny.stream((1, 2), absent=1))
    tiny.run_rounds(simulation)
    states: list[WatchedState] = list(simulation.client_states.values())
    assert len(states) == 5
    for state in states:
        received, initial = state.rows[-2:]
        assert received.shape == (2, 8)
        assert torch.equal(received, initial), "what the server added is what every party's initial model has"
        assert torch.equal(received, states[0].rows[-2])
        older, grown, model = state.logits
        assert older.shape == (2, 1)
        assert grown.shape == model.shape == (2, 3)
        assert torch.equal(grown[:, :1], model[:, :1])
        torch.testing.assert_close(grown[:, :1], older, rtol=0, atol=1e-6)
    assert bool((simulation.context.runner.initial[BIAS][1:] == 0).all())


def test_rounds_and_classes_are_counted_by_task() -> None:
    simulation = tiny.simulation_with_tasks(Watching(), tiny.stream((2, 1), absent=0), cohort_size=5)
    assert simulation.rounds == 4
    tiny.run_rounds(simulation)
    for state in simulation.client_states.values():
        assert state.where == [[1, 1, 0, 2], [1, 2, 0, 2], [2, 1, 2, 3], [2, 2, 2, 3]]


@pytest.mark.parametrize(("number", "location"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 1)), (9, (3, 3))])
def test_a_round_of_the_run_has_a_task_and_a_round_in_it(number: int, location: tuple[int, int]) -> None:
    assert RunSettings(rounds=3).position(number) == location


def test_the_last_round_of_every_task_is_evaluated() -> None:
    simulation = tiny.simulation_with_tasks(FedAvg(), rounds=3, evaluate_every=2)
    assert [record["round"] for record in tiny.run_rounds(simulation) if "correct" in record] == [2, 3, 5, 6, 8, 9]


@pytest.mark.parametrize("method", [FedAvg(), Watching()], ids=repr)
def test_workers_follow_from_task_to_task(method: Algorithm[Any, Any]) -> None:
    alone, pooled = tiny.simulation_with_tasks(method, rounds=1), tiny.simulation_with_tasks(method, rounds=1)
    records = tiny.run_rounds(alone)
    first = tiny.run_rounds(pooled, 1)
    pool = with_thread(
        pooled, tiny.simulation_with_tasks(method, rounds=1)
    )  # started late: its first task is the second
    try:
        assert first + tiny.run_rounds(pooled) == records
    finally:
        pool.stop()
    assert tiny.equal(alone.server.model, pooled.server.model)


def test_served_averages_grow_too() -> None:
    simulation = tiny.simulation_with_tasks(FedAvg(), evaluation_models=("last", "moving", "round"))
    records = tiny.run_rounds(simulation)
    assert [len(record["evaluation_models"]["moving"]["correct"]) for record in records] == [1, 1, 2, 2, 3, 3]


def test_one_task_is_the_run_without_tasks() -> None:
    plain = tiny.simulation(FedAvg())
    assert plain.federation.num_tasks == 1
    assert plain.server.num_classes == tiny.CLASSES
    assert plain.server.num_old_classes == 0
    before = plain.server.model
    assert plain.server.expand_head(before) is before


def test_a_network_without_a_linear_classifier_is_told_so() -> None:
    simulation = tiny.simulation_with_tasks(
        FedAvg(), factory=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 1))
    )
    with pytest.raises(ConfigError, match=r"needs a torch.nn.Linear named classifier"):
        tiny.run_rounds(simulation)


def test_a_federation_leads_to_every_task() -> None:
    first = Federation.from_stream(tiny.stream((1, 2)), 1)
    assert first.to("cpu") is first
    second = first.for_task(2)
    assert [f.cumulative_classes for f in (first, second, second.for_task(1))] == [(1,), (1, 3), (1,)]
    assert second.dataset.train["input"] is first.dataset.train["input"], "no image is copied"
    assert second.for_task(1).dataset.test["label"].unique().tolist() == [0]
