"""The simulation: `ask`, `start` and `each`; lost clients, tasks, cohorts and what is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from interception import record_fits
from torch import Tensor

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, each, on_client
from fedkeep.losses import CrossEntropy
from fedkeep.options import NO_OPTION
from fedkeep.rounds.cohort import RoundCohort, _step_requests
from fedkeep.rounds.round import TooFewClients
from fedkeep.trials.trial import run_trial

Weights = dict[str, Tensor]


@dataclass
class Kept:
    began: int = 0
    ended: int = 0
    replies: list[str] = field(default_factory=list)


@dataclass
class Diary:
    entries: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Probe(Algorithm[Kept, Diary]):
    """Does what ``script`` says; its steps write a diary."""

    title = "engine probe"
    script: Callable[[Probe, Server[Kept], Cohort], None] | None = field(default=None, metadata=NO_OPTION)

    def begin_task(self, server: Server[Kept], clients: Cohort) -> None:
        server.state.began += len(clients.ask(self.hello))

    def end_task(self, server: Server[Kept], clients: Cohort) -> None:
        server.state.ended += 1

    def round(self, server: Server[Kept], cohort: Cohort) -> None:
        if self.script:
            self.script(self, server, cohort)

    @on_client
    def hello(self, client: Client[Diary]) -> int:
        return 1

    @on_client
    def write(self, client: Client[Diary], word: str, more: str = "") -> str:
        client.state.entries.append(word + more)
        return client.id + word + more

    @on_client
    def schedule(self, client: Client[Diary]) -> float:
        return client.round / client.num_rounds

    @on_client
    def note(self, client: Client[Diary], word: str) -> None:
        client.state.entries.append(word)

    @on_client
    def poison(self, client: Client[Diary], word: str) -> float:
        client.state.entries.append(word)
        return float("nan")

    @on_client
    def train(self, client: Client[Diary], model: Weights) -> Fit:
        return client.fit(model, CrossEntropy())


def probe(script: Callable[[Probe, Server[Kept], Cohort], None], **changes: Any) -> Any:
    return tiny.simulation(Probe(script=script), **changes)


def diaries(simulation: Any) -> dict[str, list[str]]:
    return {client: state.entries for client, state in simulation.client_states.items() if state.entries}


def test_asking_a_cohort_gives_replies_in_its_order() -> None:
    got: dict[str, str] = {}

    def script(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
        got.update(cohort.ask(method.write, "a", more="b"))
        assert [client.id for client in cohort] == list(got)
        assert len(cohort) == 3

    simulation = probe(script)
    (record,) = tiny.run_rounds(simulation, 1)
    assert list(got) == record["cohort"]
    assert got == {client: f"{client}ab" for client in record["cohort"]}
    assert diaries(simulation) == {client: ["ab"] for client in record["cohort"]}


@pytest.mark.parametrize("through_codec", [False, True])
def test_each_reaches_only_those_it_names(through_codec: bool) -> None:
    def script(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
        a, b, c = (client.id for client in cohort)
        assert cohort.ask(method.write, each({b: "x"})) == {b: f"{b}x"}
        with pytest.raises(ConfigError, match="'nobody', which is not a client"):
            cohort.ask(method.write, each({b: "x", "nobody": "y"}))
        assert cohort.ask(method.write, each({a: "x", b: "y"}), more=each({b: "1", c: "2"})) == {b: f"{b}y1"}
        cohort.start(method.note, each({c: "z"}))
        first, *_ = cohort
        assert first.ask(method.write, each({b: "x"})) is None

    simulation = probe(script, through_codec=through_codec)
    (record,) = tiny.run_rounds(simulation, 1)
    _, b, c = record["cohort"]
    assert diaries(simulation) == {b: ["x", "y1"], c: ["z"]}
    assert record["lost"] == {}, "not to be named is not to be lost"


def test_only_steps_can_be_asked() -> None:
    def script(probe: Probe, server: Server[Kept], cohort: Cohort) -> None:
        cohort.ask(probe.name)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=r"name is not a client step.*@on_client"):
        tiny.simulation(Probe(script=script)).run_round()


def test_what_would_be_lost_is_an_error() -> None:
    def started(probe: Probe, server: Server[Kept], cohort: Cohort) -> None:
        cohort.start(probe.train, server.model)  # type: ignore[arg-type]

    def assigned(probe: Probe, server: Server[Kept], cohort: Cohort) -> None:
        server.count = 1  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match=r"start\(train\) would throw away what train returns: use cohort\.ask"):
        tiny.simulation(Probe(script=started)).run_round()

    def counted(probe: Probe, server: Server[Kept], cohort: Cohort) -> None:
        server.num_clients += 1

    with pytest.raises(ConfigError, match=r"server\.num_clients = \.\.\. would be lost"):
        tiny.simulation(Probe(script=counted)).run_round()
    with pytest.raises(ConfigError, match=r"server\.count = \.\.\. would be lost, since only server\.state is kept"):
        tiny.simulation(Probe(script=assigned)).run_round()


def test_a_cohort_without_some() -> None:
    def script(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
        a, b, c = (client.id for client in cohort)
        assert [client.id for client in cohort.without({b: 1})] == [a, c]
        assert list(cohort.without([a]).without([c]).ask(method.write, "w")) == [b]
        assert cohort.without([a, b, c]).ask(method.write, "w") == {}

    tiny.run_rounds(probe(script), 1)


def test_steps_are_done_in_the_order_asked_and_by_the_rounds_end() -> None:
    def script(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
        cohort.start(method.note, "1")
        cohort.start(method.note, "2")
        first, *_ = cohort
        first.ask(method.write, "3")
        cohort.start(method.note, "4")

    simulation = probe(script)
    (record,) = tiny.run_rounds(simulation, 1)
    a, b, c = record["cohort"]
    assert diaries(simulation) == {a: ["1", "2", "3", "4"], b: ["1", "2", "4"], c: ["1", "2", "4"]}


def test_a_lost_client_is_out_for_the_round_with_its_state_as_before_that_call() -> None:
    def script(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
        victim = next(iter(cohort))
        assert victim.ask(method.write, "kept") is not None
        assert victim.ask(method.poison, "gone") is None
        assert victim.ask(method.write, "ignored") is None
        assert victim.id not in cohort.ask(method.write, "all")
        cohort.start(method.note, "later")

    simulation = probe(script, rounds=1)
    (record,) = tiny.run_rounds(simulation)
    a, b, c = record["cohort"]
    assert record["lost"] == {a: "answered with a the value that is not finite"} or "not finite" in record["lost"][a]
    assert diaries(simulation) == {a: ["kept"], b: ["all", "later"], c: ["all", "later"]}


def test_a_call_that_waits_is_dropped_with_its_client() -> None:
    def script(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
        assert isinstance(cohort, RoundCohort)
        cohort.round.start(_step_requests(method.poison, cohort.round, cohort.clients, ("x",), {}))
        assert cohort.ask(method.write, "y") == {}

    simulation = probe(script, min_clients=1)
    (record,) = tiny.run_rounds(simulation, 1)
    assert record["rolled_back"]
    assert diaries(simulation) == {}


def test_an_rolled_back_round_keeps_the_clients_states() -> None:
    def script(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
        cohort.ask(method.write, str(server.round))
        if server.round == 2:
            cohort.ask(method.poison, "x")

    simulation = probe(script, cohort_size=6, min_clients=6)
    tiny.run_rounds(simulation, 1)
    before = {client: list(entries) for client, entries in diaries(simulation).items()}
    assert tiny.run_rounds(simulation, 1)[0]["rolled_back"]
    assert diaries(simulation) == before
    assert set(before) == set("012345")


def test_a_state_lives_from_round_to_round() -> None:
    def script(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
        cohort.ask(method.write, str(server.round))

    simulation = probe(script, cohort_size=2, rounds=6)
    records = tiny.run_rounds(simulation)
    for client in set().union(*(record["cohort"] for record in records)):
        assert diaries(simulation)[client] == [str(r["round"]) for r in records if client in r["cohort"]]


def test_everyone_knows_how_many_rounds_a_task_has() -> None:
    def script(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
        told = [*cohort.ask(method.schedule).values(), server.round / server.num_rounds]
        server.log("shares", told)

    records = tiny.run_rounds(probe(script, cohort_size=2, rounds=4))
    assert [record["log"]["shares"] for record in records] == [[share] * 3 for share in (0.25, 0.5, 0.75, 1.0)]


def test_what_a_method_logs_is_in_its_rounds_record_only() -> None:
    def script(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
        if server.round == 2:
            server.log("x", 1.5)
            server.log("y", [1.0, 2.0])

    assert [record["log"] for record in tiny.run_rounds(probe(script))] == [{}, {"x": 1.5, "y": [1.0, 2.0]}, {}, {}]


def test_bytes_are_counted_for_every_call_that_reached_a_client() -> None:
    def script(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
        cohort.ask(method.write, "abc")
        cohort.start(method.note, "de")

    simulation = probe(script)
    tiny.run_rounds(simulation, 1)
    (record,) = tiny.run_rounds(simulation, 1)
    assert (record["down"], record["up"]) == (3 * 3 + 3 * 2, 3 * 4)


# Tasks


def nothing(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
    pass


def train(method: Probe, server: Server[Kept], cohort: Cohort) -> None:
    for client in cohort:
        if reply := client.ask(method.train, server.model):
            server.model = reply.model


def test_a_task_begins_and_ends_once() -> None:
    simulation = probe(nothing)
    for expected in ((6, 0), (6, 0), (6, 0), (6, 1)):
        tiny.run_rounds(simulation, 1)
        assert (simulation.server.state.began, simulation.server.state.ended) == expected


def test_an_rolled_back_first_round_does_not_undo_the_beginning_of_the_task() -> None:
    simulation = probe(
        train, fault_injector=lambda number, client, step: "gone" if (number, step) == (1, "train") else None
    )
    records = tiny.run_rounds(simulation)
    assert [record["rolled_back"] for record in records] == [True, False, False, False]
    assert simulation.server.state.began == 6


def test_an_rolled_back_last_round_does_not_undo_the_end_of_the_task() -> None:
    simulation = probe(
        train, fault_injector=lambda number, client, step: "gone" if (number, step) == (4, "train") else None
    )
    assert [record["rolled_back"] for record in tiny.run_rounds(simulation)] == [False, False, False, True]
    assert simulation.server.state.ended == 1


def test_clients_outside_the_cohort_do_not_count_towards_its_minimum() -> None:
    cohort = probe(train, cohort_size=2).sample_cohort(1)
    simulation = probe(
        train, cohort_size=2, fault_injector=lambda number, client, step: None if client in cohort else "asleep"
    )
    (record,) = tiny.run_rounds(simulation, 1)
    assert not record["rolled_back"]
    assert simulation.server.state.began == 2
    assert not tiny.equal(simulation.server.model, simulation.context.runner.initial)


# Cohorts


def test_cohorts_are_drawn_without_replacement_from_seed_and_round_alone() -> None:
    simulation = tiny.simulation(FedAvg(), cohort_size=4, rounds=50)
    sampled = [simulation.sample_cohort(number) for number in range(1, 51)]
    assert all(len(set(cohort)) == 4 for cohort in sampled)
    assert sampled == [tiny.simulation(FedSeq(), cohort_size=4).sample_cohort(number) for number in range(1, 51)]
    assert len({tuple(cohort) for cohort in sampled}) > 30
    counts = [sum(client in cohort for cohort in sampled) for client in simulation.federation.clients]
    assert all(18 <= count <= 48 for count in counts), "33 expected, deviation 3.3"
    assert sampled != [
        tiny.simulation(FedAvg(), cohort_size=4, seed=1).sample_cohort(number) for number in range(1, 51)
    ]
    assert len(tiny.simulation(FedAvg(), cohort_size=99).sample_cohort(1)) == 6


def test_a_cohort_of_millions_is_drawn_without_a_permutation(monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny.dataset(9)
    federation = tiny.by_hand(data, [[0, 1, 2]])
    offsets = torch.cat([torch.tensor([0]), torch.full((3_000_000,), 3)])
    object.__setattr__(federation.partition, "offsets", offsets)
    simulation = tiny.simulation(FedAvg(), federation=federation, cohort_size=50)
    monkeypatch.setattr(torch, "randperm", lambda *args, **kwargs: pytest.fail("a permutation"))
    sampled = simulation.sample_cohort(1)
    assert len(set(sampled)) == 50
    assert sampled == simulation.sample_cohort(1) != simulation.sample_cohort(2)
    assert max(map(int, sampled)) > 1_000_000


# Evaluation


def test_counts_of_a_record_are_those_of_the_model() -> None:
    simulation = tiny.simulation(FedSeq(), evaluate_every=3, rounds=5)
    records = tiny.run_rounds(simulation)
    assert [record["round"] for record in records if "correct" in record] == [3, 5]
    test = simulation.federation.dataset.test
    network = simulation.context.runner.build()
    network.load_state_dict(dict(simulation.server.model))
    logits = network(simulation.context.normalise(test["input"])).detach()
    hits = [int(((logits.argmax(1) == c) & (test["label"] == c)).sum()) for c in range(tiny.CLASSES)]
    assert records[-1]["correct"] == hits
    assert records[-1]["test_loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, test["label"]).item(), rel=1e-5
    )
    assert sum(hits) > len(test["label"]) / 2, "it learned"


def test_local_trainings_tell_what_each_client_left_and_what_became_of_the_one_before() -> None:
    simulation = tiny.simulation(FedSeq(), evaluate_local_models=True, rounds=1)
    (record,) = tiny.run_rounds(simulation)
    sizes = [simulation.federation.num_examples(client) for client in record["cohort"]]
    assert [local_model["client"] for local_model in record["local_models"]] == record["cohort"]
    assert record["local_models"][-1]["correct"] == record["correct"]
    assert [local_model["own"][1] for local_model in record["local_models"]] == sizes
    assert [local_model["previous"] and local_model["previous"][1] for local_model in record["local_models"]] == [
        None,
        *sizes[:-1],
    ]


def test_the_loss_of_a_round_weighs_clients_by_examples() -> None:
    simulation = tiny.simulation(FedAvg(), rounds=1)
    (record,) = tiny.run_rounds(simulation)
    losses = {}
    for client in record["cohort"]:
        alone = tiny.by_hand(
            simulation.federation.dataset, [[]] * int(client) + [simulation.federation.partition[int(client)].tolist()]
        )
        single = tiny.simulation(FedAvg(), federation=alone, rounds=1, cohort_size=99)
        losses[client] = tiny.run_rounds(single)[0]["loss"]
    weights = {client: simulation.federation.num_examples(client) for client in losses}
    expected = sum(losses[c] * weights[c] for c in losses) / sum(weights.values())
    assert record["loss"] == pytest.approx(expected)
    assert record["examples"] == sum(weights.values())


def test_fedavg_is_the_weighted_mean_of_the_graduates() -> None:
    simulation = tiny.simulation(FedAvg(), rounds=1)
    recorded = record_fits(simulation)
    tiny.run_rounds(simulation)
    fits = [one.fit for one in recorded]
    total = sum(reply.num_examples for reply in fits)
    assert len(fits) == 3
    for name, tensor in simulation.server.model.items():
        mean = sum(reply.model[name].double() * reply.num_examples for reply in fits) / total
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("what", ["model", "state"])
def test_a_round_that_changes_a_shared_tensor_in_place_is_refused(what: str, lost: bool) -> None:
    def script(method: Subtracting, server: Server[Direction], cohort: Cohort) -> None:
        tensor = server.state.step if what == "state" else next(iter(server.model.values()))
        tensor.sub_(1.0)

        if lost:
            raise TooFewClients

    simulation = tiny.simulation(Subtracting(script))
    with pytest.raises(ConfigError, match=rf"round changed server\.{what}\..* in place"):
        simulation.run_round()


def test_after_a_round_in_place_the_last_checkpoint_stays(tmp_path: Path) -> None:
    def add(method: Subtracting, server: Server[Direction], cohort: Cohort) -> None:
        server.state.step = server.state.step + 1.0

    def script(method: Subtracting, server: Server[Direction], cohort: Cohort) -> None:
        if server.round == 3:
            server.state.step.sub_(9.0)
        else:
            add(method, server, cohort)

    with pytest.raises(ConfigError, match="in place"):
        run_trial(tiny.simulation(Subtracting(script), rounds=4), tmp_path, checkpoint_share=1e-9)
    mended = tiny.simulation(Subtracting(add), rounds=4)
    run_trial(mended, tmp_path)
    assert mended.server.state.step.tolist() == [5.0, 5.0]


@dataclass
class Direction:
    step: Tensor = field(default_factory=lambda: torch.ones(2))


@dataclass(frozen=True)
class Subtracting(Algorithm[Direction]):
    """Does what ``script`` says."""

    script: Callable[[Subtracting, Server[Direction], Cohort], None] | None = field(default=None, metadata=NO_OPTION)

    def round(self, server: Server[Direction], cohort: Cohort) -> None:
        assert self.script
        self.script(self, server, cohort)

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        return client.fit(model, CrossEntropy())
