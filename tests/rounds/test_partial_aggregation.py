"""Models are added up where they are trained, with the bits that the server makes of single replies."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

from fedkeep.aggregation import aggregate, weighted_mean
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.executors.process_executor import ProcessExecutor, step_handlers
from fedkeep.executors.workers import Worker, serve
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.rounds import partial_aggregation, reply_store
from fedkeep.rounds.partial_aggregation import mean_of_groups
from fedkeep.rounds.round import RoundState
from fedkeep.trials.simulation import Simulation

ALL = len(tiny.SIZES)


class Loud(FedAvg):
    """Two clients are refused from round 2 on: the numbers of one are not finite, and one moves too far."""

    title = "loud"

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        fit = client.fit(model, CrossEntropy())
        factor = {"1": float("nan"), "2": 1e4}.get(client.id, 1.0) if client.round > 1 else 1.0
        return replace(fit, model={name: factor * tensor for name, tensor in fit.model.items()})


class LoudReplies(Loud):
    """The same, but the server sees single replies."""

    title = "loud replies"
    only_averages = False


class FedAvgReplies(FedAvg):
    """FedAvg whose server sees single replies."""

    title = "listed replies"
    only_averages = False


def with_threads(simulation: Simulation, make: Any, workers: int = 2) -> ProcessExecutor:
    connections = []
    for _ in range(workers):
        near, far = multiprocessing.Pipe()
        threading.Thread(target=serve, args=(far, step_handlers(make())), daemon=True).start()
        connections.append(Worker(near))
    simulation.executor = executor = ProcessExecutor(connections, simulation)
    return executor


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return, for each mean that a method asked for, whether models were added up where they were trained."""
    monkeypatch.setattr(reply_store, "IN_MEMORY", 0)  # so that one process adds models up too
    found: list[bool] = []
    aggregate_groups = RoundState.aggregate_groups

    def watched(self: RoundState, *args: Any) -> Any:
        result = aggregate_groups(self, *args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(RoundState, "aggregate_groups", watched)
    return found


@pytest.mark.parametrize("groups", [2, 16])
@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize(
    ("method", "looking"),
    [(FedAvg(), FedAvgReplies()), (FedAvg(aggregation="uniform"), FedAvgReplies(aggregation="uniform"))],
    ids=["examples", "uniform"],
)
def test_sums_in_workers_are_those_of_single_replies(
    method: Any, looking: Any, stack: int, groups: int, summed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_aggregation, "MAX_GROUPS", groups)
    settings: dict[str, Any] = {"cohort_size": ALL, "stack": stack, "training": tiny.SHORT, "rounds": 2}
    settings["client_dropout"] = 0.2
    replies, alone, pooled = (tiny.simulation(one, **settings) for one in (looking, method, method))
    expected = tiny.run_rounds(replies)
    assert not summed
    assert tiny.run_rounds(alone) == expected
    executor = with_threads(pooled, lambda: tiny.simulation(method, training=tiny.SHORT))
    try:
        assert tiny.run_rounds(pooled) == expected
    finally:
        executor.stop()
    assert summed == [True] * 4
    assert tiny.equal(alone.server.model, replies.server.model)
    assert tiny.equal(pooled.server.model, replies.server.model)


def test_a_refused_client_is_not_in_the_sum(summed: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_aggregation, "MAX_GROUPS", 2)
    settings: dict[str, Any] = {"cohort_size": ALL, "training": tiny.SHORT, "rounds": 3}
    replies, alone, pooled = (tiny.simulation(one, **settings) for one in (LoudReplies(), Loud(), Loud()))
    expected = tiny.run_rounds(replies)
    assert set(expected[1]["refused"]) == {"1", "2"}
    assert tiny.run_rounds(alone) == expected
    executor = with_threads(pooled, lambda: tiny.simulation(Loud(), training=tiny.SHORT))
    try:
        assert tiny.run_rounds(pooled) == expected
    finally:
        executor.stop()
    assert summed == [True, False, False] * 2, "which client moved too far is known when all have answered"
    assert tiny.equal(alone.server.model, replies.server.model)
    assert tiny.equal(pooled.server.model, replies.server.model)


class LooksLater(Algorithm):
    """Takes the mean, and then looks at single models all the same."""

    def round(self, server: Server, cohort: Cohort) -> None:
        replies = cohort.ask(self.train, server.model)
        mean = weighted_mean(replies)
        server.log("examples", sum(fit.num_examples for fit in replies.values()))
        server.log("sums", [float(sum(t.sum() for t in fit.model.values())) for fit in replies.values()])
        server.model = mean

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        return client.fit(model, CrossEntropy())


class LooksFirst(LooksLater):
    """Says so before."""

    title = "looks first"
    only_averages = False


class AsksTwice(LooksLater):
    """Asks again before it looks at the first replies."""

    def round(self, server: Server, cohort: Cohort) -> None:
        first = cohort.ask(self.train, server.model)
        second = cohort.ask(self.train, server.model)
        server.model = aggregate({**first, **{f"{c} again": fit for c, fit in second.items()}}, "num_examples")


@pytest.mark.parametrize("stack", [1, 3])
def test_a_model_that_was_added_up_is_trained_again_if_somebody_looks(
    stack: int, summed: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"training": tiny.SHORT, "cohort_size": ALL, "stack": stack, "rounds": 2}
    expected = tiny.run_rounds(tiny.simulation(LooksFirst(), **settings))
    assert not summed
    assert not caplog.messages
    assert tiny.run_rounds(tiny.simulation(LooksLater(), **settings)) == expected
    assert summed == [True, True]
    assert "Clients train twice: looks" in caplog.messages[0]


def test_replies_that_nobody_looked_at_are_carried_out_before_clients_are_asked_again(summed: list[bool]) -> None:
    simulation = tiny.simulation(AsksTwice(), training=tiny.SHORT)
    record = simulation.run_round().record
    assert record["examples"] == 2 * sum(simulation.federation.num_examples(client) for client in record["cohort"])


@pytest.mark.parametrize("how", ["num_examples", "uniform"])
@pytest.mark.parametrize("weights", [(0, 0, 0, 0), (0, 3, 0, 0), (2, 0, 1, 5)])
def test_the_mean_of_groups_is_the_mean(how: Any, weights: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(3)
    models = [{"w": torch.randn(3, generator=rng, dtype=torch.float64), "n": torch.tensor(k)} for k in range(4)]
    replies = {str(k): Fit(m, n, n, 0.0) for k, (m, n) in enumerate(zip(models, weights, strict=True))}
    expected = aggregate(replies, how)
    for groups in (["0", "1", "2", "3"],), (["0", "1"], ["2", "3"]), (["0"], ["1"], ["2"], ["3"]):
        found = mean_of_groups(groups, replies, how)
        torch.testing.assert_close(found["w"], expected["w"], rtol=1e-14, atol=1e-14)
        assert found["n"] == expected["n"]


@pytest.mark.parametrize("method", [FedSeq(), SFedKD(teachers=2)], ids=["FedSeq", "SFedKD"])
def test_a_sequence_sends_its_models_without_a_file(
    method: Algorithm[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_store, "IN_MEMORY", 0)  # where replies wait for each other, no model stays in memory
    settings: dict[str, Any] = {"cohort_size": ALL, "training": tiny.SHORT, "rounds": 2}
    alone, pooled = (tiny.simulation(method, **settings) for _ in range(2))
    executor = with_threads(pooled, lambda: tiny.simulation(method, training=tiny.SHORT))
    try:
        assert tiny.run_rounds(pooled) == tiny.run_rounds(alone)
    finally:
        executor.stop()
    assert any(worker.heard for worker in executor.workers)
    assert pooled.weights_file.largest == alone.weights_file.largest == 0
