"""Methods with penalties on the weights, each against its formula over whole rounds, in float64.

From the specification, without looking at the methods. Servers that remember are in `test_servers_by_formula`,
distillation in `test_distilling_by_formula`.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import byhand
import pytest
import tiny
import torch
from byhand import Hand, Model, average, combined, hand_of, zeros
from torch import Tensor

from fedkeep._utils import seeds
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedcurv import FedCurv
from fedkeep.algorithms.parallel.fedprox import FedProx
from fedkeep.algorithms.sequential.cwc import CWC
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.models import Weights
from fedkeep.training.party import LocalParty

ROUNDS = 4


# FedAvg and FedProx: the hand itself


@pytest.mark.parametrize("aggregation", ["num_examples", "uniform"])
@pytest.mark.parametrize("training", [tiny.TRAINING, replace(tiny.TRAINING, momentum=0.9, lr_decay=0.5)])
def test_fedavg(aggregation: Any, training: Any) -> None:
    hand = hand_of(training=training)
    model = hand.initial
    for number, cohort in hand.cohorts(ROUNDS):
        replies = {c: hand.train(c, number, model, hand.cross_entropy) for c in cohort}
        model = hand.by_count(replies) if aggregation == "num_examples" else average(list(replies.values()))
    simulation = byhand.run_rounds(FedAvg(aggregation=aggregation), ROUNDS, training=training)
    byhand.assert_same(simulation.server.model, model)


def test_fedprox() -> None:
    hand, mu = hand_of(), 0.7
    model = hand.initial
    for number, cohort in hand.cohorts(ROUNDS):
        replies = {}
        for client in cohort:

            def loss(w: Mapping[str, Tensor], x: Tensor, y: Tensor, start: Model = model) -> Tensor:
                near = torch.stack([((w[n] - start[n]) ** 2).sum() for n in w]).sum()
                return hand.cross_entropy(w, x, y) + mu / 2 * near

            replies[client] = hand.train(client, number, model, loss)
        model = hand.by_count(replies)
    byhand.assert_same(byhand.run_rounds(FedProx(mu=mu), ROUNDS).server.model, model)


# FedCurv (section 5)


Reading = Literal["papers", "forgets the old", "keeps its own"]


def fedcurv(
    hand: Hand, rounds: int, weight: float, fisher: str, reading: Reading = "papers", limit: int = 500
) -> list[Model]:
    """Return the model after each round."""
    shares: dict[str, tuple[Model, Model]] = {}  # of every client ever seen: F_j and F_j w_j
    model, left = hand.initial, []
    for number, cohort in hand.cohorts(rounds):
        before = dict(shares)
        if reading == "forgets the old":
            before = {
                c: share for c, share in before.items() if number > 1 and c in dict(hand.cohorts(rounds))[number - 1]
            }
        replies: dict[str, Model] = {}
        for client in cohort:
            missing = set() if reading == "keeps its own" else {client}
            others = [share for c, share in before.items() if c not in missing]
            p = combined((0.0, model), *((1.0, f) for f, _ in others))
            q = combined((0.0, model), *((1.0, product) for _, product in others))

            def loss(w: Mapping[str, Tensor], x: Tensor, y: Tensor, p: Model = p, q: Model = q) -> Tensor:
                penalty = torch.stack([(p[n] * w[n] ** 2 - 2 * q[n] * w[n]).sum() for n in w]).sum()
                return hand.cross_entropy(w, x, y) + weight * penalty

            replies[client] = trained = hand.train(client, number, model, loss)
            size = 1 if fisher == "sample" else hand.training.batch_size
            f = hand.squared_gradients(trained, client, size, limit, round=number if size > 1 else 0)
            shares[client] = f, {name: f[name] * trained[name] for name in f}
        model = hand.by_count(replies)
        left.append(model)
    return left


@pytest.mark.parametrize(("fisher", "weight"), [("sample", 0.6), ("batch", 1.5)])
def test_fedcurv(fisher: Any, weight: float) -> None:
    hand = hand_of()
    readings: tuple[Reading, ...] = ("papers", "forgets the old", "keeps its own")
    ends = {reading: fedcurv(hand, ROUNDS, weight, fisher, reading) for reading in readings}
    simulation = tiny.simulation(FedCurv(w_penalty=weight, fisher=fisher), rounds=ROUNDS)
    for expected in ends["papers"]:
        tiny.run_rounds(simulation, 1)
        byhand.assert_same(simulation.server.model, expected)
    for one, other in itertools.combinations(readings, 2):
        assert byhand.distance(ends[one][-1], ends[other][-1]) > 1e-4, f"{one} and {other} cannot be told apart here"


def test_fedcurvs_two_fishers_differ() -> None:
    sample, batch = (byhand.run_rounds(method, 3).server.model for method in (FedCurv(), FedCurv(fisher="batch")))
    assert byhand.distance(sample, batch) > 1e-3


def test_fedcurv_without_penalty_and_in_its_first_round_is_fedavg() -> None:
    plain, muted, curved = (tiny.simulation(m) for m in (FedAvg(), FedCurv(w_penalty=0.0), FedCurv(w_penalty=5.0)))
    for number in range(1, ROUNDS + 1):
        for simulation in (plain, muted, curved):
            tiny.run_rounds(simulation, 1)
        assert tiny.equal(muted.server.model, plain.server.model)
        assert tiny.equal(curved.server.model, plain.server.model) is (number == 1)


def test_fedcurvs_first_local_training_of_a_lone_client_has_no_penalty_and_nor_has_any_other() -> None:
    """P and Q are over the others: with one client there are none."""
    alone = tiny.federation((9,))
    curved = byhand.run_rounds(FedCurv(w_penalty=5.0), 3, federation=alone, cohort_size=1)
    plain = byhand.run_rounds(FedAvg(), 3, federation=alone, cohort_size=1)
    byhand.assert_same(curved.server.model, plain.server.model, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "rows", "size"), [(FedCurv(), 500, 1), (CWC(), 500, 1), (FedCurv(fisher="batch"), 512, 32)], ids=repr
)
def test_curvature_is_of_about_500_examples(method: Any, rows: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first in a random order of this client and round; in batches, as many as just exceed 500."""
    large = tiny.federation((530, 20))
    training = replace(tiny.TRAINING, epochs=1, batch_size=32)
    hand = hand_of(federation=large, cohort_size=2, training=training)
    answers: dict[str, tuple[Weights, Weights]] = {}
    fisher = LocalParty.fisher

    def spy(self: LocalParty, model: Weights, *args: Any, **kwargs: Any) -> Weights:
        answer = fisher(self, model, *args, **kwargs)
        answers[self.name] = model, answer
        return answer

    monkeypatch.setattr(LocalParty, "fisher", spy)
    byhand.run_rounds(method, 1, federation=large, cohort_size=2, training=training)
    at, got = answers["0"]
    order = torch.randperm(530, generator=seeds.rng(0, "fisher", task=1, round=1, client="0"))[:rows]
    images, labels = hand.data("0")
    hand.data = lambda client: (images[order], labels[order])  # type: ignore[method-assign]
    byhand.assert_same(got, hand.squared_gradients(byhand.doubled(at), "0", size), atol=1e-8)


# CWC (section 3, reconstructed)


def cwc(hand: Hand, rounds: int, weight: float, sigma: float, capped: bool = True) -> tuple[list[Model], Model]:
    """Return the model after each round, and the importance at the end."""
    importance, model, left = zeros(hand.initial), hand.initial, []
    for number, cohort in hand.cohorts(rounds):
        importance = combined((sigma, importance))
        cap = 1 / (hand.training.lr * hand.training.lr_decay ** (number - 1) * weight)
        for client in cohort:
            used = importance
            if capped:
                used = {name: tensor.clamp(max=cap) for name, tensor in used.items()}

            def loss(w: Mapping[str, Tensor], x: Tensor, y: Tensor, o: Model = used, a: Model = model) -> Tensor:
                penalty = torch.stack([(o[n] * (w[n] - a[n]) ** 2).sum() for n in w]).sum()
                return hand.cross_entropy(w, x, y) + weight / 2 * penalty

            model = hand.train(client, number, model, loss)
            importance = combined((1.0, importance), (1.0, hand.squared_gradients(model, client, 1, 500)))
        left.append(model)
    return left, importance


@pytest.mark.parametrize(
    ("weight", "sigma"),
    [(3.0, 0.5), (3.0, 0.9), (3.0, 1.0), (3.0, 0.0), (100.0, 0.5)],  # the last beyond the cap
)
def test_cwc(weight: float, sigma: float) -> None:
    hand = hand_of()
    left, importance = cwc(hand, ROUNDS, weight, sigma)
    simulation = tiny.simulation(CWC(w_penalty=weight, attenuation=sigma), rounds=ROUNDS)
    for expected in left:
        tiny.run_rounds(simulation, 1)
        byhand.assert_same(simulation.server.model, expected)
    byhand.assert_same(simulation.server.state.importance, importance, rtol=1e-3)


def test_cwcs_cap_follows_the_learning_rate() -> None:
    training = replace(tiny.TRAINING, lr_decay=0.5)
    hand = hand_of(training=training)
    left, _ = cwc(hand, ROUNDS, 60.0, 0.9)
    byhand.assert_same(
        byhand.run_rounds(CWC(w_penalty=60.0, attenuation=0.9), ROUNDS, training=training).server.model, left[-1]
    )


def test_cwcs_options_can_be_told_apart_here() -> None:
    hand = hand_of()
    ends = [
        cwc(hand, ROUNDS, *options)[0][-1]
        for options in (
            (3.0, 0.5),
            (3.0, 1.0),
            (3.0, 0.0),
            (1.5, 0.5),  # as if there were no one half, the other way round
            (0.0001, 0.5),
        )
    ]
    assert all(byhand.distance(one, other) > 1e-3 for one, other in itertools.combinations(ends, 2))
    assert (
        byhand.distance(cwc(hand, ROUNDS, 30.0, 0.9)[0][-1], cwc(hand, ROUNDS, 30.0, 0.9, capped=False)[0][-1]) > 1e-3
    )


def test_cwc_is_capped_before_it_overshoots() -> None:
    """lr w_penalty O stays at 1 at most, so that a thousandfold penalty keeps parameters near, and finite."""
    simulation = byhand.run_rounds(CWC(w_penalty=1e6, attenuation=1.0), 6)
    assert tiny.finite(simulation.server.model)
    assert byhand.distance(simulation.server.model, simulation.context.runner.initial) < 10


@pytest.mark.parametrize("options", [{}, {"attenuation": 1.0}], ids=str)
def test_cwc_without_penalty_is_fedseq(options: dict[str, Any]) -> None:
    plain = byhand.run_rounds(FedSeq(), ROUNDS).server.model
    assert tiny.equal(byhand.run_rounds(CWC(w_penalty=0.0, **options), ROUNDS).server.model, plain)
    assert not tiny.equal(byhand.run_rounds(CWC(w_penalty=1.0, **options), ROUNDS).server.model, plain)


def test_cwcs_first_local_training_ever_is_fedseqs() -> None:
    """Importance begins at zero; the second client of the first round is held already."""
    for cohort, equal in ((1, True), (2, False)):
        one, two = (byhand.run_rounds(m, 1, cohort_size=cohort).server.model for m in (CWC(), FedSeq()))
        assert tiny.equal(one, two) is equal


def test_cwc_is_marked_as_reconstructed(tmp_path: pathlib.Path) -> None:
    (method,) = load_recipe(tiny.write_recipe(tmp_path), methods=["cwc"]).methods
    assert method.label == "CWC (reconstructed)"
