"""Class-incremental methods by their formulas: what is taught, by whom, what is kept, and when classifiers meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import tiny
import torch
from interception import record_fits
from recorded_jobs import TWO_ONE, AnyAlgorithm, RecordedJobs, distilled, logits, loss_of, second_task
from torch import nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from fedkeep.algorithms.incremental.class_incremental import concat, distill_old_classes, update_memory
from fedkeep.algorithms.incremental.fedewc import EWCState, FedEWC
from fedkeep.algorithms.incremental.fedicarl import FediCaRL
from fedkeep.algorithms.incremental.fedlwf import FedLwF, FedProxLwF
from fedkeep.algorithms.incremental.fedskf import FedSKF, FedSKFClientState, next_in_turn, random_turn
from fedkeep.algorithms.incremental.finetune import Finetune
from fedkeep.algorithms.incremental.flwf2t import FLwF2T
from fedkeep.algorithms.incremental.target import TARGET
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.errors import ConfigError
from fedkeep.interface import Client, Fit
from fedkeep.interface.algorithm import algorithms
from fedkeep.losses import ZERO_LOSS
from fedkeep.losses.classification import TSDReading, tsd_loss
from fedkeep.models import Network, Weights
from fedkeep.models.heads import WEIGHT, classifier_tensors
from fedkeep.models.weights import mean
from fedkeep.training.model_runner import ModelRunner


def final(method: AnyAlgorithm, rounds: int | None = None, **changes: Any) -> Weights:
    simulation = tiny.simulation_with_tasks(method, TWO_ONE, cohort_size=4, **changes)
    tiny.run_rounds(simulation, rounds)
    return simulation.server.model


UNIFORM = FedAvg(aggregation="uniform")
FIRST = [Finetune(), FedLwF(), FLwF2T(), FediCaRL(), FedEWC(), FedProxLwF(mu=0.0), FedSKF(pit="off", sync=False)]
FIRST.append(TARGET(**tiny.INVERSION))


@pytest.mark.parametrize("method", FIRST, ids=repr)
def test_the_first_task_is_fedavgs_and_the_second_is_not(method: AnyAlgorithm) -> None:
    assert tiny.equal(final(method, 2), final(UNIFORM, 2))
    assert not tiny.equal(final(method), final(UNIFORM))


EQUAL = [
    (Finetune(ce_classes="all"), UNIFORM),
    (FedLwF(w_old=0.0), Finetune()),
    (FedProxLwF(mu=0.0), FedLwF()),
    (FLwF2T(w_old=0.0, w_server=0.0), Finetune()),
    (FedEWC(w_penalty=0.0), Finetune()),
    (FedSKF(pit="off", sync=False, w_local=0.0, w_global=3.0), FedLwF()),
    (FedSKF(pit="aligned", sync=False, w_local=0.0, w_global=0.0), Finetune()),
]


@pytest.mark.parametrize(("method", "same"), EQUAL, ids=repr)
def test_special_cases_are_equal(method: AnyAlgorithm, same: AnyAlgorithm) -> None:
    one, other = final(method), final(same)
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("round", [1, 2])
def test_fedlwf_by_formula(round: int) -> None:
    simulation, seen, old = second_task(FedProxLwF(mu=0.5))
    given = seen.fits[2, round, "1"]
    model = seen.results[2, round, "1"].model
    value, images, labels = loss_of(simulation, given, model)
    student = logits(simulation, model, images)
    pull = sum((model[n] - given.model[n]).square().sum() for n in simulation.context.runner.parameters)
    expected = cross_entropy(student[:, 2:], labels - 2) + 3 * distilled(student, logits(simulation, old, images), 2)
    torch.testing.assert_close(value, expected + 0.25 * pull)


def test_flwf2t_by_formula() -> None:
    simulation, seen, _ = second_task(FLwF2T(server_classes="all"))
    own = seen.results[1, 2, "1"].model
    for round, known in ((1, 2), (2, 3)):
        given, model = seen.fits[2, round, "1"], seen.results[2, round, "1"].model
        value, images, labels = loss_of(simulation, given, model)
        student = logits(simulation, model, images)
        expected = cross_entropy(student[:, 2:], labels - 2) + 3 * distilled(
            student, logits(simulation, own, images), 2
        )
        expected = expected + distilled(student, logits(simulation, given.model, images), known)
        torch.testing.assert_close(value, expected)


def test_flwf2t_may_learn_exemplars_again() -> None:
    simulation, seen, _ = second_task(FLwF2T(exemplars_per_class=2, ce_classes="all"))
    own, given, model = seen.results[1, 2, "1"].model, seen.fits[2, 2, "1"], seen.results[2, 2, "1"].model
    held = torch.bincount(simulation.federation.for_task(1).data("1")["label"], minlength=2)
    labels = given.streams[0].data["label"]
    assert torch.bincount(labels, minlength=3)[:2].tolist() == held.clamp(max=2).tolist() != [0, 0]
    assert int((labels == 2).sum()) == simulation.federation.for_task(2).num_examples("1")
    value, images, batch = loss_of(simulation, given, model)
    student = logits(simulation, model, images)
    expected = cross_entropy(student, batch) + 3 * distilled(student, logits(simulation, own, images), 2)
    torch.testing.assert_close(value, expected + distilled(student, logits(simulation, given.model, images), 2))
    with pytest.raises(ConfigError, match=r"set FLwF2T\.ce_classes=all too"):
        FLwF2T(exemplars_per_class=2)


def test_fedewc_by_formula() -> None:
    simulation, seen, old = second_task(FedEWC(w_penalty=7.0), rounds=3)
    kept: EWCState = simulation.client_states["1"]
    assert tiny.equal(kept.anchor, {name: old[name] for name in kept.anchor})
    assert 0 < max(float(f.max()) for f in kept.fisher.values()) <= 1e-4
    given, model = seen.fits[2, 1, "1"], seen.results[2, 1, "1"].model
    value, images, labels = loss_of(simulation, given, model)
    penalty = torch.zeros(())
    for name, fisher in kept.fisher.items():
        penalty = penalty + (fisher * (model[name][: len(fisher)] - old[name]).square()).sum()
    assert float(penalty) > 0
    expected = cross_entropy(logits(simulation, model, images)[:, 2:], labels - 2) + 3.5 * penalty
    torch.testing.assert_close(value, expected)


def test_fedewc_pulls_what_is_trained() -> None:
    """The penalty has a gradient once the weights have moved; that of TARGET's code has none."""
    simulation, seen, old = second_task(FedEWC(w_penalty=1e5), rounds=3)
    given, moved = seen.fits[2, 1, "1"], seen.results[2, 1, "1"].model
    name = "body.full1.weight"
    live = dict(moved) | {name: moved[name].clone().requires_grad_()}
    value, images, labels = loss_of(simulation, given, live)
    network = simulation.context.runner.train_network
    labelled = cross_entropy(functional_call(network, live, (images,))[:, 2:], labels - 2)
    pull = torch.autograd.grad(value, live[name])[0] - torch.autograd.grad(labelled, live[name])[0]
    expected = 1e5 * simulation.client_states["1"].fisher[name] * (moved[name] - old[name])
    assert float(expected.abs().max()) > 1e-4
    torch.testing.assert_close(pull, expected, rtol=1e-4, atol=1e-6)


def test_fedicarl_learns_exemplars_with_all_classes() -> None:
    simulation, seen, old = second_task(FediCaRL(exemplars_per_class=2))
    given, model = seen.fits[2, 2, "1"], seen.results[2, 2, "1"].model
    labels = given.streams[0].data["label"]
    held = simulation.federation.for_task(1).data("1")["label"]
    assert torch.bincount(labels, minlength=3)[:2].tolist() == torch.bincount(held, minlength=2).clamp(max=2).tolist()
    assert int((labels == 2).sum()) == simulation.federation.num_examples("1")
    value, images, batch = loss_of(simulation, given, model)
    student = logits(simulation, model, images)
    expected = cross_entropy(student, batch) + distilled(student, logits(simulation, old, images), 2)
    torch.testing.assert_close(value, expected)
    assert simulation.client_states["1"].memory["label"].tolist().count(2) == min(
        2, simulation.federation.num_examples("1")
    )


def test_fedicarl_with_the_loss_of_glfc() -> None:
    simulation, seen, old = second_task(FediCaRL(loss="glfc", exemplars_per_class=2))
    for location, known in (((1, 2, "1"), 0), ((2, 2, "1"), 2)):
        simulation.set_task(location[0])
        given, model = seen.fits[location], seen.results[location].model
        value, images, labels = loss_of(simulation, given, model)
        student = logits(simulation, model, images)
        truth = torch.nn.functional.one_hot(labels, student.shape[1]).float()
        gaps = [1 - float(row[c].sigmoid()) for row, c in zip(student, labels, strict=True)]
        weights = []
        for gap, c in zip(gaps, labels, strict=True):
            alike = [g for g, other in zip(gaps, labels, strict=True) if (other < known) == (c < known)]
            weights.append(gap / (sum(alike) / len(alike)) if known else 1.0)
        losses = binary_cross_entropy_with_logits(student, truth, reduction="none")
        expected = (torch.tensor(weights)[:, None] * losses).mean()
        if known:
            target = torch.cat((logits(simulation, old, images).sigmoid(), truth[:, 2:]), 1)
            expected = (expected + binary_cross_entropy_with_logits(student, target)) / 2
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(
    ("method", "most"),
    [
        (FediCaRL(exemplars_per_class=4), 4),
        (FedSKF(level="icarl", exemplars_per_class=4), 4),
    ],
    ids=repr,
)
def test_what_each_client_keeps(method: AnyAlgorithm, most: int) -> None:
    simulation = tiny.simulation_with_tasks(method, TWO_ONE, rounds=1, cohort_size=4, training=tiny.SHORT)
    tiny.run_rounds(simulation)
    for client in "0123":
        labels = [simulation.federation.for_task(task).data(client)["label"] for task in (1, 2)]
        had = torch.bincount(torch.cat(labels), minlength=3)
        held = torch.bincount(simulation.client_states[client].memory["label"], minlength=3)
        assert torch.equal(held, had.clamp(max=most))


def test_exemplars_are_herded_or_drawn() -> None:
    def kept(method: AnyAlgorithm) -> torch.Tensor:
        simulation = tiny.simulation_with_tasks(method, TWO_ONE, rounds=1, cohort_size=4, training=tiny.SHORT)
        tiny.run_rounds(simulation, 1)
        return torch.cat([state.memory["input"] for state in simulation.client_states.values()])

    herded, drawn = kept(FediCaRL(exemplars_per_class=2)), kept(FLwF2T(ce_classes="all", exemplars_per_class=2))
    assert herded.shape == drawn.shape
    assert not torch.equal(herded, drawn)


@pytest.mark.parametrize(("level", "start"), [("lwf", 2), ("icarl", 0)])
def test_fedskf_by_formula(level: Any, start: int) -> None:
    method = FedSKF(level=level, exemplars_per_class=2)
    simulation, seen, old = second_task(method)
    own = seen.results[1, 2, "1"].model
    given, model = seen.fits[2, 2, "1"], seen.results[2, 2, "1"].model
    value, images, labels = loss_of(simulation, given, model)
    student, local = logits(simulation, model, images), logits(simulation, own, images)
    truth = torch.nn.functional.one_hot(labels, 3).float()
    tsd = binary_cross_entropy_with_logits(student, torch.cat((local.sigmoid(), truth[:, 2:]), 1))
    expected = cross_entropy(student[:, start:], labels - start) + 3 * (distilled(student, local, 2) + tsd)
    expected = expected + distilled(student, logits(simulation, old, images), 2)
    pull = sum(
        (model[n] - given.model[n]).square().sum() for n in classifier_tensors(model)
    )  # synchronised in this round
    torch.testing.assert_close(value, expected + 2 * pull)


@pytest.mark.parametrize("reading", ["off", *get_args(TSDReading)])
def test_fedskf_with_each_reading_of_tsd(reading: Any) -> None:
    method = FedSKF(level="icarl", tsd=reading, w_pull=0.0, w_local=5.0, w_global=0.5)
    simulation, seen, old = second_task(method)
    own, model = seen.results[1, 2, "1"].model, seen.results[2, 2, "1"].model
    value, images, labels = loss_of(simulation, seen.fits[2, 2, "1"], model)
    student, local = logits(simulation, model, images), logits(simulation, own, images)
    tsd = 0.0 if reading == "off" else tsd_loss(local, student, labels, reading)
    expected = cross_entropy(student, labels) + 5 * (distilled(student, local, 2) + tsd)
    torch.testing.assert_close(value, expected + 0.5 * distilled(student, logits(simulation, old, images), 2))


def test_fedskf_classifiers_meet_once_a_task() -> None:
    simulation = tiny.simulation_with_tasks(FedSKF(), TWO_ONE, rounds=4, cohort_size=4)
    seen = RecordedJobs(simulation)
    sent: dict[tuple[int, int], Weights] = {}
    while simulation.finished < simulation.rounds:
        before = simulation.server.model
        record = simulation.run_round().record
        task, number = simulation.settings.run.position(record["round"])
        sent[task, number] = simulation.server.expand_head(before)
        assert record["log"]["diagonal"]
        assert all(0 <= share <= 1 for share in record["log"]["diagonal"])
    for task in (1, 2):
        for client in "0123":
            for number in (1, 2, 3, 4):
                start, model = seen.fits[task, number, client].model, sent[task, number]
                body = {name: tensor for name, tensor in start.items() if "classifier" not in name}
                assert tiny.equal(body, {name: model[name] for name in body}), "the extractor is always the global one"
                met = tiny.equal(classifier_tensors(start), classifier_tensors(model))
                assert met == (number == 2 or (task, number) == (1, 1)), (task, number)
    own, others = (seen.results[2, 4, client].model for client in "01")
    assert not tiny.equal(classifier_tensors(own), classifier_tensors(others))


def test_fedskf_ties_classifiers_when_the_pull_is_strong() -> None:
    def spread(w_pull: float) -> float:
        training = replace(tiny.TRAINING, epochs=30, lr=0.01, momentum=0.0)
        simulation = tiny.simulation_with_tasks(
            FedSKF(w_pull=w_pull, pit="off"), TWO_ONE, rounds=3, cohort_size=4, training=training
        )
        tiny.run_rounds(simulation, 3)
        states: list[FedSKFClientState] = list(simulation.client_states.values())
        heads = torch.stack([state.own_model[WEIGHT] for state in states])
        return float((heads - heads.mean(0)).abs().max())

    assert spread(45.0) < 0.1 * spread(0.0)


def test_the_bases_turn_goes_round() -> None:
    assert next_in_turn(["3", "11", "0"], "") == "0"
    assert next_in_turn(["3", "11", "0"], "0") == "3"
    assert next_in_turn(["3", "11", "0"], "3") == "11"
    assert next_in_turn(["3", "11", "0"], "11") == "0"
    assert next_in_turn(["4", "1"], "2") == "4"


def test_the_bases_turn_goes_on_from_task_to_task() -> None:
    simulation = tiny.simulation_with_tasks(FedSKF(), TWO_ONE, rounds=3, cohort_size=4, training=tiny.SHORT)
    turns = []
    while simulation.finished < simulation.rounds:
        simulation.run_round()
        turns.append(simulation.server.state.base)
    assert turns == list("012301")


def test_by_lot_each_client_is_the_base_once_a_turn_and_no_round_is_somebodys() -> None:
    simulation = tiny.simulation_with_tasks(
        FedSKF(pit_turn="random"), TWO_ONE, rounds=8, cohort_size=4, training=tiny.SHORT
    )
    turns = []
    while simulation.finished < simulation.rounds:
        simulation.run_round()
        turns.append(simulation.server.state.base)
    cycles = [turns[k : k + 4] for k in range(0, 16, 4)]
    assert all(sorted(cycle) == list("0123") for cycle in cycles)
    assert len({cycle[-1] for cycle in cycles}) > 1, "the last of a turn is not always the same"


def test_by_lot_those_who_had_no_turn_come_first() -> None:
    def sampled(clients: list[str], done: list[str]) -> set[str]:
        return {random_turn(clients, done, torch.Generator().manual_seed(seed)) for seed in range(40)}

    assert sampled(["0", "1", "10"], []) == {"0", "1", "10"}
    assert sampled(["0", "1", "10"], ["1"]) == {"0", "10"}
    assert sampled(["1"], ["1"]) == {"1"}, "the others are not there"
    orders = [["0", "10", "2"], ["2", "0", "10"]]
    assert random_turn(orders[0], [], torch.Generator().manual_seed(3)) == random_turn(
        orders[1], [], torch.Generator().manual_seed(3)
    )


def test_lots_are_the_seeds() -> None:
    def turns(seed: int) -> list[str]:
        simulation = tiny.simulation_with_tasks(
            FedSKF(pit_turn="random"), TWO_ONE, rounds=8, cohort_size=4, training=tiny.SHORT, seed=seed
        )
        return [simulation.run_round() and simulation.server.state.base for _ in range(16)]  # type: ignore[func-returns-value]

    assert turns(0) == turns(0) != turns(1)


def test_fedskfs_projection_is_its_fusion() -> None:
    """Where no neuron moves, fused with eta 1/2 is the mean of the mean and the base."""
    simulation = tiny.simulation_with_tasks(FedSKF(pit="fused"), TWO_ONE, cohort_size=4)
    seen = RecordedJobs(simulation)
    record = simulation.run_round().record
    assert set(record["log"]["diagonal"]) == {1.0}, "as after any first round from one start"
    models = [seen.results[1, 1, client].model for client in record["cohort"]]
    expected = mean([mean(models), seen.results[1, 1, "0"].model])
    for name, tensor in expected.items():
        torch.testing.assert_close(simulation.server.model[name], tensor)


def test_a_network_that_cannot_be_projected_is_refused_before_anybody_trains() -> None:
    def network() -> nn.Module:
        return Network(nn.Sequential(nn.Flatten(), nn.LayerNorm(16)), 16, tiny.CLASSES)

    refused, other = (tiny.simulation(method, factory=network) for method in (FedSKF(), FedSKF(pit="off")))
    trained, others = record_fits(refused), record_fits(other)
    with pytest.raises(ConfigError, match=r"through body\.1, a LayerNorm.*or the plain mean"):
        refused.run_round()
    assert not trained
    other.run_round()
    assert others


def test_old_teachers_are_asked_once_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    cache_teachers = ModelRunner.logits
    locations: list[tuple[int, int]] = []

    def spy(self: ModelRunner, model: Weights, images: torch.Tensor) -> torch.Tensor:
        if locations:
            asked.append(locations[-1])
        return cache_teachers(self, model, images)

    train = FedSKF.train

    def noting(self: FedSKF, client: Client, model: Weights) -> Fit:
        locations.append((client.task, client.round))
        try:
            return train(self, client, model)
        finally:
            locations.pop()

    noting._fedkeep_client_step = True  # type: ignore[attr-defined]
    noting.__annotations__ = train.__annotations__
    monkeypatch.setattr(ModelRunner, "logits", spy)
    monkeypatch.setattr(FedSKF, "train", noting)
    tiny.run_rounds(tiny.simulation_with_tasks(FedSKF(), TWO_ONE, rounds=3, cohort_size=4))
    assert asked == [(2, 1)] * 8, "of four clients each the own old model, for two terms, and the global one"


def test_nothing_is_taught_without_a_model_or_without_weight() -> None:
    assert distill_old_classes({}, 3.0, 2.0) is ZERO_LOSS
    assert distill_old_classes({WEIGHT: torch.zeros(2, 3)}, 0.0, 2.0) is ZERO_LOSS


def test_memories_are_joined() -> None:
    simulation = tiny.simulation_with_tasks(FediCaRL(), TWO_ONE, cohort_size=4)
    tiny.run_rounds(simulation, 2)
    state = simulation.client_states["0"]
    first = state.memory
    from fedkeep.training.party import LocalClient

    simulation.set_task(2)
    client = LocalClient(simulation.context, "0", simulation.federation.data("0"), state, task=2, round=1, uses={})
    later = update_memory(client, simulation.server.expand_head(simulation.server.model), first, 1)
    assert later["label"].tolist() == [*first["label"].tolist(), 2]
    assert torch.equal(later["input"][:-1], first["input"])
    assert len(concat(later, {})["label"]) == len(later["label"])


def test_the_methods_are_known_by_name() -> None:
    teaching = {"fedlwf", "fedprox-lwf", "flwf-2t", "fedpass", "fedicarl", "fedskf"}
    assert teaching | {"finetune", "fedewc"} <= algorithms().keys()


# Clients that have nothing of a task


AWAY = tiny.stream((1, 2), clients=5, absent=2)


def absent(task: int) -> set[str]:
    """Return the clients without examples of a task, counted from 1."""
    partition = AWAY.tasks[task - 1].partition
    return {str(client) for client in range(5) if not len(partition[client])}


def test_who_has_no_example_of_a_task_does_not_count_in_the_mean() -> None:
    simulation = tiny.simulation_with_tasks(FedLwF(), AWAY, rounds=1, cohort_size=5)
    seen = RecordedJobs(simulation)
    tiny.run_rounds(simulation)
    assert len(absent(2)) == 2
    trained = [fit.model for (task, _, client), fit in seen.results.items() if task == 2 and client not in absent(2)]
    assert len(trained) == 3
    assert tiny.equal(simulation.server.model, mean(trained))


def test_models_are_aligned_with_one_that_has_learned_the_task() -> None:
    simulation = tiny.simulation_with_tasks(FedSKF(), AWAY, rounds=5, cohort_size=5)
    bases = []
    for _ in range(10):
        simulation.run_round()
        bases.append(simulation.server.state.base)
    for task in (1, 2):
        assert set(bases[5 * task - 5 : 5 * task]) == set("01234") - absent(task)
