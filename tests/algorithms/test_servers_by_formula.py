"""Corrections of client drift and servers that remember, each against its formula over whole rounds, in float64.

From the specification, without looking at the methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import byhand
import pytest
import tiny
import torch
from byhand import Hand, Model, average, combined, hand_of, zeros
from interception import record_fits
from torch import Tensor, nn

from fedkeep.algorithms.parallel.asd import ASD, FedNTDASD
from fedkeep.algorithms.parallel.fedadkd import FedADKD
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedcurv import FedCurv
from fedkeep.algorithms.parallel.feddkd import FedDKD
from fedkeep.algorithms.parallel.fedgkd import FedGKD
from fedkeep.algorithms.parallel.fedlsd import FedLSD
from fedkeep.algorithms.parallel.fednova import FedNova
from fedkeep.algorithms.parallel.fedntd import FedNTD
from fedkeep.algorithms.parallel.fedopt import FedAdam, FedAvgM
from fedkeep.algorithms.parallel.fedprox import FedProx
from fedkeep.algorithms.parallel.moon import MOON
from fedkeep.algorithms.parallel.scaffold import SCAFFOLD
from fedkeep.algorithms.sequential.cwc import CWC
from fedkeep.algorithms.sequential.fedseq import FedSeq

ROUNDS = 4


# SCAFFOLD (section 7)


def control_steps(steps: int, momentum: float) -> float:
    """Return how many times the learning rate a constant gradient moves a client."""
    velocity = moved = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        moved += velocity
    return moved


def test_scaffold() -> None:
    training = replace(tiny.TRAINING, lr_decay=0.8)
    hand = hand_of(training=training)
    model, c = hand.initial, zeros(hand.initial)
    own: dict[str, Model] = {}
    for number, cohort in hand.cohorts(ROUNDS):
        replies, moved = {}, []
        for client in cohort:
            before = own.get(client, zeros(c))
            correction = combined((1.0, c), (-1.0, before))

            def loss(w: Mapping[str, Tensor], x: Tensor, y: Tensor, s: Model = correction) -> Tensor:
                return hand.cross_entropy(w, x, y) + torch.stack([(s[n] * w[n]).sum() for n in w]).sum()

            replies[client] = trained = hand.train(client, number, model, loss)
            k = control_steps(hand.steps(client), training.momentum)
            rate = training.lr * 0.8 ** (number - 1)
            after = combined((1.0, before), (-1.0, c), (1 / (k * rate), model), (-1 / (k * rate), trained))
            moved.append(combined((1.0, after), (-1.0, before)))
            own[client] = after
        model = hand.by_count(replies)
        c = combined((1.0, c), (len(cohort) / 6, average(moved)))
    simulation = byhand.run_rounds(SCAFFOLD(), ROUNDS, training=training)
    byhand.assert_same(simulation.server.model, model)
    byhand.assert_same(simulation.server.state.c, c, atol=1e-5)


# FedNova (section 7)


def nova(hand: Hand, rounds: int) -> list[Model]:
    """Return the model after each round."""
    model, left = hand.initial, []
    for number, cohort in hand.cohorts(rounds):
        total = sum(hand.size(client) for client in cohort)
        reach, moves = 0.0, []
        for client in cohort:
            trained = hand.train(client, number, model, hand.cross_entropy)
            a = control_steps(hand.steps(client), hand.training.momentum)
            move = combined((1.0, model), (-1.0, trained))
            p = hand.size(client) / total
            reach += p * a
            moves.append((p / a, move))
        model = combined((1.0, model), (-reach, combined(*moves)))
        left.append(model)
    return left


@pytest.mark.parametrize("training", [tiny.TRAINING, replace(tiny.TRAINING, momentum=0.0, lr_decay=0.7)])
def test_fednova(training: Any) -> None:
    hand = hand_of(training=training)
    simulation = tiny.simulation(FedNova(), rounds=ROUNDS, training=training)
    for expected in nova(hand, ROUNDS):
        tiny.run_rounds(simulation, 1)
        byhand.assert_same(simulation.server.model, expected)


# FedAvgM and FedAdam: the server's optimiser


@pytest.mark.parametrize("aggregation", ["num_examples", "uniform"])
@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.9), (0.5, 0.7), (1.0, 0.0)])
def test_fedavgm(lr: float, momentum: float, aggregation: Any) -> None:
    hand = hand_of()
    model, velocity = hand.initial, zeros(hand.initial)
    simulation = tiny.simulation(FedAvgM(server_lr=lr, momentum=momentum, aggregation=aggregation), rounds=3)
    for number, cohort in hand.cohorts(3):
        replies = {c: hand.train(c, number, model, hand.cross_entropy) for c in cohort}
        mean = hand.by_count(replies) if aggregation == "num_examples" else average(list(replies.values()))
        velocity = combined((momentum, velocity), (1.0, mean), (-1.0, model))
        model = combined((1.0, model), (lr, velocity))
        tiny.run_rounds(simulation, 1)
        byhand.assert_same(simulation.server.model, model)


@pytest.mark.parametrize(
    ("lr", "betas", "tau"), [(0.01, (0.9, 0.99), 1e-3), (0.1, (0.5, 0.9), 0.05), (0.03, (0.0, 0.0), 0.01)]
)
def test_fedadam(lr: float, betas: tuple[float, float], tau: float) -> None:
    """Without bias correction, v from tau^2."""
    hand = hand_of()
    model, m = hand.initial, zeros(hand.initial)
    v = {name: torch.full_like(tensor, tau**2) for name, tensor in m.items()}
    simulation = tiny.simulation(FedAdam(server_lr=lr, beta1=betas[0], beta2=betas[1], tau=tau), rounds=3)
    for number, cohort in hand.cohorts(3):
        replies = {c: hand.train(c, number, model, hand.cross_entropy) for c in cohort}
        step = combined((1.0, hand.by_count(replies)), (-1.0, model))
        m = {n: betas[0] * m[n] + (1 - betas[0]) * step[n] for n in m}
        v = {n: betas[1] * v[n] + (1 - betas[1]) * step[n] ** 2 for n in v}
        model = {n: model[n] + lr * m[n] / (v[n].sqrt() + tau) for n in model}
        tiny.run_rounds(simulation, 1)
        byhand.assert_same(simulation.server.model, model, atol=1e-5)


class Flat(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) / 10


def normed() -> nn.Module:
    return nn.Sequential(Flat(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, tiny.CLASSES))


@pytest.mark.parametrize("adam", [False, True])
def test_buffers_follow_the_mean(adam: bool) -> None:
    """Running statistics are averaged by examples, and take no step of the optimiser; counters are the first's."""
    method = FedAdam(server_lr=0.05, tau=0.01) if adam else FedAvgM(server_lr=0.5, momentum=0.8)
    simulation = tiny.simulation(method, factory=normed, rounds=3)
    recorded = record_fits(simulation)
    model = byhand.doubled(simulation.server.model)
    parameters = set(simulation.context.runner.parameters)
    assert set(model) - parameters == {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    m = {n: torch.zeros_like(model[n]) for n in parameters}
    v = {n: torch.full_like(model[n], 0.01**2) for n in parameters}
    for _ in range(3):
        recorded.clear()
        tiny.run_rounds(simulation, 1)
        fits = [one.fit for one in recorded]
        total = sum(f.num_examples for f in fits)
        for name, tensor in model.items():
            if name == "2.num_batches_tracked":
                model[name] = fits[0].model[name]
                assert len({int(f.model[name]) for f in fits}) > 1
                continue
            mean = torch.stack([f.num_examples / total * f.model[name].double() for f in fits]).sum(0)
            if name not in parameters:
                model[name] = mean
                continue
            step = mean - tensor
            if adam:
                m[name] = 0.9 * m[name] + 0.1 * step
                v[name] = 0.99 * v[name] + 0.01 * step**2
                model[name] = tensor + 0.05 * m[name] / (v[name].sqrt() + 0.01)
            else:
                m[name] = 0.8 * m[name] + step
                model[name] = tensor + 0.5 * m[name]
        byhand.assert_same(simulation.server.model, model, atol=1e-5)
        assert simulation.server.model["2.num_batches_tracked"].dtype == torch.int64


# What travels (section 17)


@pytest.mark.parametrize(
    ("method", "first", "later"),
    [
        *(
            (method, (1, 1), (1, 1))
            for method in (FedAvg(), FedProx(), FedNTD(), FedLSD(), ASD(), FedNTDASD(), FedDKD())
        ),
        (FedSeq(), (1, 1), (1, 1)),
        (MOON(), (1, 1), (1, 1)),
        (FedGKD(), (1, 1), (2, 1)),
        (FedAvgM(), (1, 1), (1, 1)),
        (FedAdam(), (1, 1), (1, 1)),
        (FedNova(), (1, 1), (1, 1)),
        (SCAFFOLD(), (2, 2), (2, 2)),
        (FedCurv(), (1, 3), (3, 3)),
        (CWC(), (None, 2), (2, 2)),
    ],
    ids=repr,
)
def test_models_that_travel(method: Any, first: tuple[int | None, int], later: tuple[int, int]) -> None:
    """Down and up per client, in round one and after. Nothing is known of curvature before the first reply."""
    simulation = tiny.simulation(method, rounds=3)
    model = sum(tensor.nbytes for tensor in simulation.server.model.values())
    for number, record in enumerate(tiny.run_rounds(simulation), start=1):
        down, up = first if number == 1 else later
        assert record["up"] == 3 * (up * model + 3 * 8)  # examples, steps and loss of a fit
        assert record["down"] == (3 * down if down is not None else 1 + 2 * 2) * model


def test_fedadkd_sends_one_number_more_each_way() -> None:
    """Phi down, the impurity up; SFedKD's and FedCAD's numbers are counted in their own files."""
    plain, weighed = (tiny.run_rounds(tiny.simulation(method), 2) for method in (FedAvg(), FedADKD()))
    for one, other in zip(plain, weighed, strict=True):
        assert (other["down"] - one["down"], other["up"] - one["up"]) == (3 * 8, 3 * 8)
