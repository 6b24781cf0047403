"""Clients whose network is another than the server's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
import torch
from thread_worker import with_thread
from torch import Tensor, nn

from fedkeep.data import Federation
from fedkeep.interface import Algorithm, Client, Cohort, Fit, NoState, Server, on_client
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights, get_architecture
from fedkeep.models.weights import find_mismatch


def wide() -> nn.Module:
    return get_architecture("mlp")(hidden=(11, 5)).build(tiny.SHAPE, tiny.CLASSES)  # type: ignore[call-arg]


OWN = {"1": wide, "4": wide}


@dataclass
class Own:
    model: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class Alone(Algorithm[NoState, Own]):
    """Everybody trains a model of its own and tells the mean of its logits."""

    title = "alone for a test"
    networks = "any"

    def round(self, server: Server, cohort: Cohort) -> None:
        output = cohort.ask(self.learn)
        server.log("said", [float(tensor.sum()) for tensor in output.values()])

    @on_client
    def learn(self, client: Client[Own]) -> Tensor:
        model = client.state.model or client.initial_model
        client.state.model = client.fit(model, CrossEntropy()).model
        return client.predict(client.state.model).mean(0)


@dataclass(frozen=True)
class Careless(Algorithm):
    """Sends the server what a client trained, whatever its form."""

    title = "careless for a test"

    def round(self, server: Server, cohort: Cohort) -> None:
        cohort.ask(self.learn)

    @on_client
    def learn(self, client: Client) -> Fit:
        return client.fit(client.initial_model, CrossEntropy())


def simulation(method: Algorithm[Any, Any] | None = None, **changes: Any) -> Any:
    return tiny.simulation(method or Alone(), cohort_size=6, client_factories=OWN, **changes)


def test_each_trains_its_own_network() -> None:
    run_rounds = simulation()
    tiny.run_rounds(run_rounds)
    theirs = {client: state.model for client, state in run_rounds.client_states.items()}
    for client, model in theirs.items():
        assert find_mismatch(model, run_rounds.context_of(client).runner.initial) is None
    assert find_mismatch(theirs["1"], theirs["0"]) is not None
    assert find_mismatch(theirs["1"], theirs["4"]) is None


def test_clients_of_one_network_begin_alike_whoever_else_has_which() -> None:
    both, alone = simulation(), tiny.simulation(Alone(), client_factories={"1": wide})
    assert both.context_of("1") is both.context_of("4")
    assert tiny.equal(both.context_of("4").runner.initial, alone.context_of("1").runner.initial)
    assert tiny.equal(both.server.model, alone.server.model)


@pytest.mark.parametrize("stack", [1, 4])
def test_workers_codec_and_stacks_change_nothing(stack: int) -> None:
    reference = tiny.run_rounds(simulation())
    records = tiny.run_rounds(simulation(stack=stack))
    for one, other in zip(reference, records, strict=True):
        assert one["log"]["said"] == pytest.approx(other["log"]["said"], rel=1e-4, abs=1e-5)
    assert tiny.run_rounds(simulation(through_codec=True)) == reference
    pooled = simulation()
    pool = with_thread(pooled, simulation())
    assert tiny.run_rounds(pooled) == reference
    pool.stop()


def test_own_networks_grow_with_the_tasks() -> None:
    tasks = tiny.stream()
    first = Federation.from_stream(tasks, 1)

    def own() -> nn.Module:
        return get_architecture("mlp")(hidden=(6,)).build(tiny.SHAPE, first.cumulative_classes[0])  # type: ignore[call-arg]

    run_rounds = tiny.simulation_with_tasks(Alone(), tasks, client_factories={"2": own})
    run_rounds.set_task(3)
    assert [len(context.runner.initial["classifier.weight"]) for context in run_rounds.contexts] == [3, 3]
    assert run_rounds.context_of("2").num_classes == 3


def test_a_model_is_held_to_its_own_clients_form() -> None:
    run_rounds = simulation(Careless(), rounds=1)
    assert tiny.run_rounds(run_rounds)[0]["lost"] == {}
    swapped = {"model": run_rounds.server.model}  # a client of the other network answers with the server's form
    other = simulation(Careless(), rounds=1)
    tiny.change_replies(other, "learn", lambda client, reply: Fit(swapped["model"], 1, 1, 0.0))
    lost = tiny.run_rounds(other)[0]["lost"]
    assert set(lost) == {"1", "4"}
    assert "another model" in lost["1"]


def test_local_trainings_are_evaluated_with_the_clients_network() -> None:
    run_rounds = simulation(Careless(), rounds=1, evaluate_local_models=True)
    (record,) = tiny.run_rounds(run_rounds)
    assert {local_model["client"] for local_model in record["local_models"]} == set("012345")
    assert all(len(local_model["correct"]) == tiny.CLASSES for local_model in record["local_models"])
    assert torch.isfinite(torch.tensor(record["loss"]))
