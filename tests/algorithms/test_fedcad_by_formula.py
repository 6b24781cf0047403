"""FedCAD against its formula over whole rounds, in float64, from the specification (section 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import byhand
import pytest
import tiny
import torch
from byhand import (
    Hand,
    Lesson,
    Model,
    average,
    each_cross_entropy,
    each_divergence,
    hand_of,
    softmax,
    taught_by,
)
from torch import Tensor

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedcad import FedCAD
from fedkeep.algorithms.parallel.fedlsd import FedLSD
from fedkeep.errors import ConfigError
from fedkeep.interface import Server
from fedkeep.options import option
from fedkeep.trials.simulation import Simulation

ROUNDS = 3
SURE = replace(tiny.TRAINING, lr=0.45)
"""With a learning rate at which the model comes to be sure of some classes."""


def uneven() -> Any:
    """Return the tiny federation with one, two and three images of the classes on the server, in no order."""
    server = tiny.dataset(12, seed=3).train
    rows = torch.tensor([9, 4, 8, 0, 5, 11])
    return replace(tiny.federation(), server_data={name: column[rows] for name, column in server.items()})


def trusts(hand: Hand, model: Mapping[str, Tensor], low: float, high: float, tau: float) -> list[float]:
    """Return low + (high - low) mean over the server's images of a class of p of that class."""
    server = hand.simulation.federation.server_data
    images = hand.simulation.context.normalise(server["input"]).double()
    p = softmax(hand.taught(model, images), tau)
    values = []
    for c in range(hand.classes):
        own = [p[i, c].item() for i, y in enumerate(server["label"].tolist()) if y == c]
        values.append(low + (high - low) * sum(own) / len(own))
    return values


def fedcad_distillation(trust: Sequence[float], tau: float, factor: float) -> Lesson:
    def distillation(t: Tensor, s: Tensor, y: Tensor) -> Tensor:
        ce, kl = each_cross_entropy(s, y), each_divergence(t, s, tau)
        each = [(1 - trust[c]) * ce[i] + trust[c] * factor * kl[i] for i, c in enumerate(y.tolist())]
        return torch.stack(each).mean()

    return distillation


def fedcad(hand: Hand, rounds: int, **options: Any) -> tuple[list[Model], list[list[float]]]:
    """Return the model after each round, and the trust that was sent in it."""
    given: dict[str, Any] = {"low": 0.0, "high": 0.7, "tau": 2.0} | options
    low, high, tau = given["low"], given["high"], given["tau"]
    factor = tau**2 if options.get("kd_scale") == "tau2" else 1.0
    model, left, sent = hand.initial, [], []
    for number, cohort in hand.cohorts(rounds):
        trust = trusts(hand, model, low, high, tau)
        distillation = fedcad_distillation(trust, tau, factor)
        replies = {c: hand.train(c, number, model, taught_by(hand, model, distillation)) for c in cohort}
        model = average(list(replies.values())) if options.get("aggregation") == "uniform" else hand.by_count(replies)
        left.append(model)
        sent.append(trust)
    return left, sent


def trust_in(simulation: Simulation) -> dict[tuple[int, str], Tensor]:
    """Run a simulation, and return the trust that reached each client, by (round, client)."""
    seen = tiny.record_arguments(simulation, "train")
    tiny.run_rounds(simulation)
    return {when: trust for when, (_, trust) in seen.items()}


@dataclass(frozen=True)
class Sure(FedCAD):
    """FedCAD whose server gives every right class the same probability."""

    title = "sure"
    p: float = option(0.5, "the probability")

    def confidence(self, server: Server) -> Tensor:
        return torch.full((tiny.CLASSES,), self.p)


CAD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"low": 0.3, "high": 0.9},
    {"low": 0.1, "high": 0.95, "tau": 4.0},
    {"low": 0.0, "high": 1.0},
    {"kd_scale": "tau2"},
    {"kd_scale": "tau2", "tau": 3.0, "aggregation": "uniform"},
]


@pytest.mark.parametrize("options", CAD_OPTIONS, ids=str)
def test_fedcad(options: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"federation": uneven(), "training": SURE}
    hand = hand_of(**changes)
    left, sent = fedcad(hand, ROUNDS, **options)
    simulation = tiny.simulation(FedCAD(**options), rounds=len(left), **changes)
    seen = tiny.record_arguments(simulation, "train")
    byhand.compare_rounds(simulation, left)
    for (number, _), (_, trust) in seen.items():
        assert trust.tolist() == pytest.approx(sent[number - 1], abs=2e-5)
    assert sorted({number for number, _ in seen}) == [1, 2, 3]
    assert max(map(abs, (a - b for a, b in zip(sent[0], sent[-1], strict=True)))) > 1e-2, "recomputed every round"
    assert max(sent[-1]) - min(sent[-1]) > 1e-2, "class by class"


def test_fedcads_options_can_be_told_apart_here() -> None:
    changes: dict[str, Any] = {"federation": uneven(), "training": SURE}
    ends = [byhand.run_rounds(FedCAD(**options), ROUNDS, **changes).server.model for options in CAD_OPTIONS]
    for i, one in enumerate(ends):
        assert all(byhand.distance(one, other) > 1e-3 for other in ends[:i])
    even = byhand.run_rounds(FedCAD(), ROUNDS, training=changes["training"]).server.model
    assert byhand.distance(ends[0], even) > 1e-4, "the server's images count"


@pytest.mark.parametrize("options", [{}, {"low": 0.0, "high": 1.0}, {"low": 0.2, "high": 0.5}])
def test_fedcads_trust_stays_within_its_bounds(options: dict[str, Any]) -> None:
    method = FedCAD(**options)
    seen = trust_in(tiny.simulation(method, rounds=5, training=SURE))
    assert len(seen) == 15
    for trust in seen.values():
        assert trust.shape == (tiny.CLASSES,)
        assert bool((trust >= method.low - 1e-7).all())
        assert bool((trust <= method.high + 1e-7).all())
    first = torch.stack([trust for (number, _), trust in seen.items() if number == 1])
    middle = method.low + (method.high - method.low) / tiny.CLASSES
    assert float((first - middle).abs().max()) < 0.25 * (method.high - method.low), "it knows nothing in round 1"


@pytest.mark.parametrize(
    ("low", "high", "p", "trust"),
    [(0.3, 0.7, 0.25, 0.4), (0.3, 0.7, 0.0, 0.3), (0.3, 0.7, 1.0, 0.7), (0.0, 0.5, 0.5, 0.25), (0.5, 0.5, 0.1, 0.5)],
)
def test_golden_trust(low: float, high: float, p: float, trust: float) -> None:
    seen = trust_in(tiny.simulation(Sure(low=low, high=high, p=p), rounds=1))
    assert len(seen) == 3
    for value in seen.values():
        assert value.tolist() == pytest.approx([trust] * tiny.CLASSES)
    printed = (high - low) / 2 * (2 * p - 1) + (high + low) / 2  # eq. 6
    assert printed == pytest.approx(trust)


@pytest.mark.parametrize("options", [{}, {"tau": 4.0}, {"aggregation": "uniform"}])
def test_fedcad_that_trusts_nothing_is_fedavg(options: dict[str, Any]) -> None:
    plain = byhand.run_rounds(FedAvg(aggregation=options.get("aggregation", "num_examples")), ROUNDS).server.model
    assert tiny.equal(byhand.run_rounds(FedCAD(low=0.0, high=0.0, **options), ROUNDS).server.model, plain)
    assert not tiny.equal(byhand.run_rounds(FedCAD(low=0.0, high=0.3, **options), ROUNDS).server.model, plain)


@pytest.mark.parametrize("a", [0.1, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("options", [{}, {"tau": 3.0, "kd_scale": "tau2", "aggregation": "uniform"}], ids=str)
def test_fedcad_that_trusts_all_classes_alike_is_fedlsd(a: float, options: dict[str, Any]) -> None:
    lsd = byhand.run_rounds(FedLSD(w_full=a, **options), ROUNDS).server.model
    assert tiny.equal(byhand.run_rounds(FedCAD(low=a, high=a, **options), ROUNDS).server.model, lsd)
    assert not tiny.equal(byhand.run_rounds(FedCAD(low=a - 0.1, high=a, **options), ROUNDS).server.model, lsd)


def test_fedcads_bounds_may_be_equal_but_not_crossed() -> None:
    grid = [FedCAD(low=low, high=high) for low in (0, 0.3, 0.5, 0.7) for high in (0, 0.3, 0.5, 0.7) if low <= high]
    assert len(grid) == 10
    with pytest.raises(ConfigError):
        FedCAD(low=0.5, high=0.3)


@pytest.mark.parametrize(
    "method", [FedCAD(), FedLSD(), FedLSD(tau=3.0, kd_scale="tau2", aggregation="uniform")], ids=repr
)
def test_before_its_first_round_it_is_fedavg(method: Any) -> None:
    """Figure 1: rounds of FedAvg, and then one of the method from the model that they left."""
    plain, late = (
        tiny.simulation(FedAvg(aggregation=method.aggregation)),
        tiny.simulation(replace(method, first_round=3)),
    )
    tiny.run_rounds(plain, 2)
    tiny.run_rounds(late, 2)
    assert tiny.equal(late.server.model, plain.server.model)
    at_once = tiny.simulation(method)
    at_once.server.model, at_once.finished = plain.server.model, 2
    tiny.run_rounds(at_once, 1)
    tiny.run_rounds(late, 1)
    assert tiny.equal(late.server.model, at_once.server.model)
    tiny.run_rounds(plain, 1)
    assert not tiny.equal(late.server.model, plain.server.model)


def test_fedcad_trusts_nothing_before_its_first_round() -> None:
    simulation = tiny.simulation(FedCAD(low=0.3, first_round=2))
    first, second = (record["log"]["trust"] for record in tiny.run_rounds(simulation, 2))
    assert first == [0.0] * tiny.CLASSES
    assert min(second) >= 0.3


def test_fedcads_payload_is_a_model_and_one_number_per_class() -> None:
    plain, trusting = (tiny.run_rounds(tiny.simulation(m), 1)[0] for m in (FedAvg(), FedCAD()))
    assert trusting["down"] - plain["down"] == 3 * 4 * tiny.CLASSES
    assert trusting["up"] == plain["up"]
