"""Methods whose teacher is the received model, each against its formula over whole rounds, in float64.

From the specification, without looking at the methods. FedCAD and FedADKD have files of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import byhand
import pytest
import tiny
import torch
from byhand import (
    Hand,
    Lesson,
    Model,
    assert_objective,
    average,
    compare,
    each_cross_entropy,
    each_divergence,
    each_nontarget,
    each_target,
    elsewhere,
    entropies,
    hand_of,
    objective_at,
    rounds_of,
    taught_by,
)
from torch import Tensor

from fedkeep.algorithms.parallel.asd import ASD, FedNTDASD
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedcad import FedCAD
from fedkeep.algorithms.parallel.feddkd import FedDKD
from fedkeep.algorithms.parallel.fedgkd import FedGKD
from fedkeep.algorithms.parallel.fedlsd import FedLSD
from fedkeep.algorithms.parallel.fedntd import FedNTD
from fedkeep.algorithms.parallel.moon import MOON

ROUNDS = 3


# FedNTD, FedLSD, FedDKD (sections 6 and 7)


def fedntd(weight: float, tau: float) -> Lesson:
    return lambda t, s, y: (each_cross_entropy(s, y) + weight * tau**2 * each_nontarget(t, s, y, tau)).mean()


def fedlsd(weight: float, tau: float, factor: float = 1.0) -> Lesson:
    return lambda t, s, y: (
        (1 - weight) * each_cross_entropy(s, y) + weight * factor * each_divergence(t, s, tau)
    ).mean()


def feddkd(target: float, nontarget: float, tau: float, factor: float) -> Lesson:
    return lambda t, s, y: (
        each_cross_entropy(s, y)
        + factor * (target * each_target(t, s, y, tau) + nontarget * each_nontarget(t, s, y, tau))
    ).mean()


@pytest.mark.parametrize(
    ("method", "distillation"),
    [
        (FedNTD(), fedntd(1.0, 1.0)),
        (FedNTD(w_nontarget=0.4, tau=3.0), fedntd(0.4, 3.0)),
        (FedLSD(), fedlsd(0.3, 2.0)),
        (FedLSD(w_full=0.5, tau=3.0, kd_scale="tau2"), fedlsd(0.5, 3.0, 9.0)),
        (FedDKD(w_nontarget=2.0), feddkd(1.0, 2.0, 4.0, 16.0)),
        (FedDKD(w_target=3.0, w_nontarget=0.5, tau=2.0, kd_scale="none"), feddkd(3.0, 0.5, 2.0, 1.0)),
        (FedDKD(w_target=0.7, w_nontarget=0.0, tau=1.0), feddkd(0.7, 0.0, 1.0, 1.0)),
    ],
    ids=["fedntd", "fedntd-warm", "fedlsd", "fedlsd-scaled", "feddkd", "feddkd-unscaled", "feddkd-target-only"],
)
def test_distillation_with_fixed_weights(method: Any, distillation: Lesson) -> None:
    hand = hand_of()
    compare(method, rounds_of(hand, ROUNDS, lambda client: distillation))
    assert_objective(hand, method, distillation, [0, 3, 4, 9, 11])


def test_feddkd_by_default_has_the_official_weights() -> None:
    assert FedDKD() == FedDKD(w_target=1.0, w_nontarget=8.0, tau=4.0, kd_scale="tau2")
    assert_objective(hand_of(), FedDKD(), feddkd(1.0, 8.0, 4.0, 16.0), [1, 2, 5])


def test_feddkd_without_target_part_is_fedntd() -> None:
    dkd = FedDKD(w_target=0.0, w_nontarget=1.0, tau=1.0)
    ntd = byhand.run_rounds(FedNTD(), ROUNDS).server.model
    assert tiny.equal(byhand.run_rounds(dkd, ROUNDS).server.model, ntd)
    assert not tiny.equal(byhand.run_rounds(replace(dkd, w_target=0.5), ROUNDS).server.model, ntd)
    assert not tiny.equal(byhand.run_rounds(replace(dkd, w_nontarget=2.0), ROUNDS).server.model, ntd)
    unscaled = byhand.run_rounds(replace(dkd, w_nontarget=1.5, tau=3.0), ROUNDS).server.model
    assert tiny.equal(unscaled, byhand.run_rounds(FedNTD(w_nontarget=1.5, tau=3.0), ROUNDS).server.model)


# ASD and FedNTD+ASD (section 6)


def asd_weights(
    teacher: Tensor, labels: Sequence[int], own: Sequence[int], beta: float, by_entropy: float
) -> list[float]:
    """Return o_i of a batch: exp(-by_entropy H_i) pi(y_i)^-beta, summing to one; pi from all labels of the client."""
    raw = [
        math.exp(-by_entropy * h) * (own.count(y) / len(own)) ** -beta
        for h, y in zip(entropies(teacher), labels, strict=True)
    ]
    return [x / sum(raw) for x in raw]


def asd(hand: Hand, client: str, weight: float, tau: float, beta: float, by_entropy: float, nontarget: bool) -> Lesson:
    own = hand.data(client)[1].tolist()

    def distillation(t: Tensor, s: Tensor, y: Tensor) -> Tensor:
        each = each_nontarget(t, s, y, tau) if nontarget else each_divergence(t, s, tau)
        o = asd_weights(t, y.tolist(), own, beta, by_entropy)
        assert sum(o) == pytest.approx(1)
        weighed = torch.stack([w * e for w, e in zip(o, each, strict=True)])
        return each_cross_entropy(s, y).mean() + weight * weighed.sum()

    return distillation


ASD_OPTIONS = [
    {},
    pytest.param({"beta": 0.0, "beta_entropy": 3.0}, marks=pytest.mark.slow),
    pytest.param({"beta": 2.5, "beta_entropy": 0.0}, marks=pytest.mark.slow),
    {"w_full": 5.0, "tau": 1.0, "beta": 0.5, "beta_entropy": 2.0},
]


def asd_distillation(hand: Hand, cls: Any, options: Mapping[str, float]) -> Callable[[str], Lesson]:
    values = {"w_full": 2.0, "tau": 2.0, "beta": 1.0, "beta_entropy": 1.0} | dict(options)
    weight, tau, beta, by_entropy = (values[name] for name in ("w_full", "tau", "beta", "beta_entropy"))
    return lambda client: asd(hand, client, weight, tau, beta, by_entropy, cls is FedNTDASD)


@pytest.mark.parametrize("options", ASD_OPTIONS, ids=str)
@pytest.mark.parametrize("cls", [ASD, FedNTDASD])
def test_asd(cls: Any, options: dict[str, float]) -> None:
    hand = hand_of()
    lesson_of = asd_distillation(hand, cls, options)
    lengths = {len(rows) for _, cohort in hand.cohorts(ROUNDS) for c in cohort for rows in hand.batches(c, 1)}
    assert len(lengths) > 1, "a short last batch"
    compare(cls(**options), rounds_of(hand, ROUNDS, lesson_of))
    for rows in ([0, 5, 7, 11], [3, 10], [6]):
        assert_objective(hand, cls(**options), lesson_of("2"), rows)


@pytest.mark.parametrize("options", [{"beta_entropy": 150.0}, {"beta": 200.0}], ids=str)
def test_asds_weights_sum_to_one_however_strong(options: dict[str, Any]) -> None:
    compare(ASD(**options), rounds_of(hand_of(), 1, asd_distillation(hand_of(), ASD, options)))


@pytest.mark.parametrize("cls", [ASD, FedNTDASD])
def test_asd_with_uniform_weights_is_the_mean(cls: Any) -> None:
    hand = hand_of()

    def distillation(t: Tensor, s: Tensor, y: Tensor) -> Tensor:
        each = each_divergence(t, s, 2.0) if cls is ASD else each_nontarget(t, s, y, 2.0)
        return each_cross_entropy(s, y).mean() + 2.0 * each.mean()

    uniform = cls(beta=0.0, beta_entropy=0.0)
    compare(uniform, rounds_of(hand, ROUNDS, lambda client: distillation))
    ends = [byhand.run_rounds(method, ROUNDS).server.model for method in (uniform, cls())]
    assert byhand.distance(*ends) > 1e-3


@pytest.mark.parametrize("cls", [ASD, FedNTDASD])
@pytest.mark.parametrize("rows", [[0, 3, 8, 11], [7, 2, 11], [4, 9], [5]], ids=len)
def test_asds_weights_sum_to_one_in_every_batch(cls: Any, rows: list[int]) -> None:
    """Where every example loses alike, the distillation is ``w_full`` times that, however the weights are spread.

    With images that are all the same, the divergence of every example is the same; that of the classes which are not
    the label, of every example with the same label.
    """
    federation = tiny.federation()
    alike = {**federation.dataset.train, "input": torch.full_like(federation.dataset.train["input"], 90)}
    pictures = replace(federation, dataset=replace(federation.dataset, train=alike))
    hand = hand_of(federation=pictures)
    objective, received = objective_at(cls(w_full=7.0), "2", 1, federation=pictures)
    plain, _ = objective_at(cls(w_full=0.0), "2", 1, federation=pictures)
    student = elsewhere(received)
    own = hand.data("2")[1].tolist()
    same = rows if cls is ASD else [row for row, label in enumerate(own) if label == own[rows[0]]][: len(rows)]
    images, labels = hand.data("2")[0][same], hand.data("2")[1][same]
    teacher, output = hand.taught(received, images), hand.taught(student, images)
    each = each_divergence(teacher, output, 2.0) if cls is ASD else each_nontarget(teacher, output, labels, 2.0)
    assert float(each.max() - each.min()) < 1e-12 < float(each.min())
    distilled = hand.asked(objective, "2", same, student)[0] - hand.asked(plain, "2", same, student)[0]
    assert distilled == pytest.approx(7.0 * each[0].item(), rel=1e-6)


@pytest.mark.parametrize("cls", [ASD, FedNTDASD])
def test_asd_without_weight_is_fedavg(cls: Any) -> None:
    plain = byhand.run_rounds(FedAvg(), ROUNDS).server.model
    byhand.assert_same(byhand.run_rounds(cls(w_full=0.0), ROUNDS).server.model, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [ASD(), FedNTDASD(), FedDKD(), FedCAD()], ids=repr)
def test_teachers_asked_in_every_batch_teach_the_same(method: Any) -> None:
    """Under an augmentation that happens to change nothing teachers are not settled."""
    settled = byhand.run_rounds(method, 2).server.model
    asked = byhand.run_rounds(method, 2, augmentation=tiny.UNMOVED, through_codec=True).server.model
    byhand.assert_same(asked, settled, rtol=1e-5, atol=3e-6)


# MOON and FedGKD (section 7)


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 1.0)])
def test_moon(mu: float, tau: float) -> None:
    """-ln softmax over (cosine to the global model's features, cosine to those of the own last model) / tau."""
    hand = hand_of()
    rounds = 4
    assert byhand.returning(hand, rounds)
    own: dict[str, Model] = {}
    model, left = hand.initial, []
    for number, cohort in hand.cohorts(rounds):
        replies = {}
        for client in cohort:
            last = own.get(client, hand.initial)

            def loss(
                w: Mapping[str, Tensor],
                x: Tensor,
                y: Tensor,
                near: Model = model,
                far: Model = last,
            ) -> Tensor:
                z, zg, zp = (hand.features(m, x) for m in (w, near, far))
                each = []
                for i in range(len(y)):
                    towards, away = (
                        ((z[i] * other[i]).sum() / z[i].norm() / other[i].norm() / tau).exp() for other in (zg, zp)
                    )
                    each.append(-(towards / (towards + away)).log())
                return hand.cross_entropy(w, x, y) + mu * torch.stack(each).mean()

            replies[client] = own[client] = hand.train(client, number, model, loss)
        model = hand.by_count(replies)
        left.append(model)
    compare(MOON(mu=mu, tau=tau), left)


@pytest.mark.parametrize("window", [5, 2])
def test_fedgkd(window: int) -> None:
    """Taught by the mean of the last global models, from round 2 on; averaged uniformly."""
    hand = hand_of()
    past, left, rounds = [hand.initial], [], 4
    for number, cohort in hand.cohorts(rounds):
        model, replies = past[-1], []
        for client in cohort:
            # In round 1 the only global model is the received one: from the second on there is something to learn.
            def distillation(t: Tensor, s: Tensor, y: Tensor) -> Tensor:
                return (each_cross_entropy(s, y) + 0.5 * 4 * each_divergence(t, s, 2.0)).mean()

            loss = hand.cross_entropy if number == 1 else taught_by(hand, average(past[1:][-window:]), distillation)
            replies.append(hand.train(client, number, model, loss))
        past.append(average(replies))
        left.append(past[-1])
    compare(FedGKD(w_full=0.5, tau=2.0, window=window), left)
