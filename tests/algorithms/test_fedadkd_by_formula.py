"""FedADKD and its other readings against their formulas, in float64, from the specification (sections 8 and 14)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import byhand
import pytest
import tiny
import torch
from byhand import Hand, Model, average, each_cross_entropy, each_divergence, each_nontarget, each_target, softmax
from torch import Tensor

from fedkeep.algorithms.parallel.fedadkd import FedADKD
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.seqkeep import SeqKeep
from fedkeep.errors import ConfigError
from fedkeep.interface.pytree import tree_signature
from fedkeep.losses.fedadkd_variants import nontarget_part, target_part

ROUNDS = 3
TARGETS = ("binary", "single_term")
MASKS = ("gather", "additive", "zero_logit")


# The readings, naively


def each_target_term(teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
    p, q = softmax(teacher), softmax(student)
    return torch.stack([p[i, y] * (p[i, y] / q[i, y]).log() for i, y in enumerate(labels.tolist())])


def each_read_target(teacher: Tensor, student: Tensor, labels: Tensor, reading: str) -> Tensor:
    if reading == "binary":
        return each_target(teacher, student, labels)
    return each_target_term(teacher, student, labels)


def each_masked(teacher: Tensor, student: Tensor, labels: Tensor, mask: str) -> Tensor:
    if mask != "zero_logit":
        return each_nontarget(teacher, student, labels)
    label = torch.nn.functional.one_hot(labels, teacher.shape[1]).bool()
    return each_divergence(teacher.masked_fill(label, 0.0), student.masked_fill(label, 0.0))


def examples(classes: int, count: int = 12, size: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return (teacher's logits, student's logits, labels), all labels among them."""
    generator = torch.Generator().manual_seed(classes)
    teacher, student = (size * torch.randn(count, classes, generator=generator, dtype=torch.float64) for _ in range(2))
    return teacher, student, torch.arange(count) % classes


def with_gradient(losses: Any, student: Tensor) -> tuple[Tensor, Tensor]:
    live = student.clone().requires_grad_()
    each = losses(live)
    return each.detach(), torch.autograd.grad((each * torch.arange(1, len(each) + 1)).sum(), live)[0]


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("reading", TARGETS)
def test_target_readings(reading: Any, classes: int) -> None:
    teacher, student, labels = examples(classes)
    got = with_gradient(lambda s: target_part(teacher, s, labels, reading), student)
    expected = with_gradient(lambda s: each_read_target(teacher, s, labels, reading), student)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    for other in set(TARGETS) - {reading}:
        assert not torch.allclose(got[0], target_part(teacher, student, labels, other), rtol=1e-2)  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("mask", MASKS)
def test_nontarget_masks(mask: Any, classes: int) -> None:
    teacher, student, labels = examples(classes)
    got = with_gradient(lambda s: nontarget_part(teacher, s, labels, mask), student)
    expected = with_gradient(lambda s: each_masked(teacher, s, labels, mask), student)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    own = got[1].gather(1, labels[:, None])
    assert float(own.abs().max()) < 1e-12, "no mask lets the target's own logit learn"
    if mask == "zero_logit":
        gathered = nontarget_part(teacher, student, labels, "gather")
        assert not torch.allclose(got[0], gathered, rtol=1e-2), "the target stays in the softmax"
    elif classes == 2:
        assert not bool(got[0].any())


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_the_additive_mask_is_removal_in_float32(classes: int) -> None:
    teacher, student, labels = (t.float() if t.is_floating_point() else t for t in examples(classes, 120, 5.0))
    one, two = (
        with_gradient(lambda s, m=m: nontarget_part(teacher, s, labels, m), student) for m in ("gather", "additive")
    )
    torch.testing.assert_close(one[0], two[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one[1], two[1], rtol=1e-5, atol=1e-4)  # of a sum with factors up to 120
    exact = each_masked(teacher.double(), student.double(), labels, "gather")
    torch.testing.assert_close(two[0].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("reading", "value"), [("binary", 0.451707), ("single_term", 0.734803)])
def test_golden_target_readings(reading: Any, value: float) -> None:
    student, teacher = torch.tensor([[1.0, 0.5, -0.5, 2.0]]), torch.tensor([[2.0, -1.0, 0.3, 0.7]])
    assert target_part(teacher, student, torch.tensor([0]), reading).item() == pytest.approx(value, abs=4e-6)


@pytest.mark.parametrize(("mask", "value"), [("gather", 0.389513), ("additive", 0.389513), ("zero_logit", 0.369104)])
def test_golden_masks(mask: Any, value: float) -> None:
    student, teacher = torch.tensor([[1.0, 0.5, -0.5, 2.0]]), torch.tensor([[2.0, -1.0, 0.3, 0.7]])
    assert nontarget_part(teacher, student, torch.tensor([0]), mask).item() == pytest.approx(value, abs=1e-6)


def test_a_single_target_term_may_be_negative() -> None:
    labels = torch.tensor([1])
    sure, unsure = torch.tensor([[0.0, 4.0, 0.0]]), torch.tensor([[0.0, 0.5, 0.0]])
    assert target_part(unsure, sure, labels, "single_term").item() < 0
    assert target_part(unsure, sure, labels, "binary").item() > 0


@pytest.mark.parametrize("reading", TARGETS)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_target_readings_of_extreme_logits_are_finite(reading: Any, size: float) -> None:
    teacher, student, labels = (t.float() if t.is_floating_point() else t for t in examples(4, 24, size))
    each, slope = with_gradient(lambda s: target_part(teacher, s, labels, reading), student)
    assert bool(torch.isfinite(each).all())
    assert bool(torch.isfinite(slope).all())


# Whole rounds


def balance(known: Mapping[str, float], cohort: Sequence[str], delta: float) -> dict[str, float]:
    """Return phi_i = M x_i / sum_j x_j, x = ln(1 + delta G), or G itself for delta = 0."""
    x = {c: math.log(1 + delta * known[c]) if delta else known[c] for c in cohort}
    total = sum(x.values())
    return {c: len(cohort) * x[c] / total if total else 1.0 for c in cohort}


def fedadkd(hand: Hand, rounds: int, **options: Any) -> tuple[list[Model], list[dict[str, float]]]:
    """Return the model after each round, and every client's weight of the target part."""
    given: dict[str, Any] = {"w_target": 0.3, "w_nontarget": 1.0, "delta": 1.0, "phi": "on"}
    given |= {"tckd": "single_term", "nckd_mask": "gather", "w_target_iid": None, "iid_from": 0.85}
    given["aggregation"] = "uniform"
    given |= options
    known: dict[str, float] = {}
    model, left, weights = hand.initial, [], []
    for number, cohort in hand.cohorts(rounds):
        phi = balance({c: known.get(c, 1.0) for c in cohort}, cohort, given["delta"])
        if given["phi"] == "off":
            phi = dict.fromkeys(cohort, 1.0)
        target = {c: phi[c] * given["w_target"] for c in cohort}
        if given["w_target_iid"] is not None:
            balanced = {c: hand.gini(c) >= given["iid_from"] for c in cohort}
            target = {c: given["w_target_iid"] if balanced[c] else given["w_target"] for c in cohort}
        replies = {}
        for client in cohort:

            def loss(
                w: Mapping[str, Tensor], x: Tensor, y: Tensor, start: Model = model, a: float = target[client]
            ) -> Tensor:
                t, s = hand.taught(start, x), hand.logits(w, x)
                tc = each_read_target(t, s, y, given["tckd"])
                nt = each_masked(t, s, y, given["nckd_mask"])
                each: Tensor = each_cross_entropy(s, y) + a * tc + given["w_nontarget"] * nt
                return each.mean()

            replies[client] = hand.train(client, number, model, loss)
        known |= {c: hand.gini(c) for c in cohort}
        model = average(list(replies.values())) if given["aggregation"] == "uniform" else hand.by_count(replies)
        left.append(model)
        weights.append(target)
    return left, weights


OPTIONS: list[dict[str, Any]] = [
    {},
    {"w_target": 3.0, "w_nontarget": 0.5, "delta": 10.0},
    {"w_target": 3.0, "delta": 0.0},
    {"w_target": 3.0, "aggregation": "num_examples"},
    {"w_target": 3.0, "phi": "off"},
    {"w_target": 2.0, "tckd": "binary"},
    {"w_nontarget": 2.0, "nckd_mask": "additive"},
    {"w_nontarget": 2.0, "nckd_mask": "zero_logit"},
    {"w_target": 2.0, "tckd": "binary", "nckd_mask": "zero_logit", "delta": 5.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fedadkd(options: dict[str, Any]) -> None:
    simulation = tiny.simulation(FedADKD(**options), rounds=ROUNDS)
    left, _ = fedadkd(Hand(tiny.simulation(FedAvg())), ROUNDS, **options)
    for expected in left:
        tiny.run_rounds(simulation, 1)
        byhand.assert_same(simulation.server.model, expected)


def test_fedadkds_options_can_be_told_apart_here() -> None:
    hand = Hand(tiny.simulation(FedAvg()))
    assert len({round(hand.gini(c), 3) for c in "012345"}) > 3
    ends = {str(options): byhand.run_rounds(FedADKD(**options), ROUNDS).server.model for options in OPTIONS}
    for i, (name, one) in enumerate(ends.items()):
        for other in list(ends)[:i]:
            assert byhand.distance(one, ends[other]) > 2e-5, f"{name} and {other}"


def phis(method: FedADKD, rounds: int, **changes: Any) -> dict[tuple[int, str], float]:
    """Return the weight that reaches each client, by (round, client)."""
    simulation = tiny.simulation(method, rounds=rounds, **changes)
    seen = tiny.record_arguments(simulation, "train")
    tiny.run_rounds(simulation)
    return {when: phi for when, (_, phi) in seen.items()}


@pytest.mark.parametrize("delta", [0.0, 1.0, 10.0])
def test_phi_by_hand(delta: float) -> None:
    hand = Hand(tiny.simulation(FedAvg()))
    _, weights = fedadkd(hand, 4, delta=delta, w_target=1.0)
    got = phis(FedADKD(delta=delta), 4)
    for number, cohort in hand.cohorts(4):
        values = [got[number, c] for c in cohort]
        assert values == pytest.approx([weights[number - 1][c] for c in cohort], rel=1e-6)
        assert sum(values) == pytest.approx(len(cohort))
        if number == 1:
            assert len({round(v, 6) for v in values}) == 1, "nobody is known yet"


# A weight of its own for balanced clients (section 8.7, figure 4)


def mixed() -> Any:
    """Return two clients with all classes alike, two with two classes and two with one."""
    data = tiny.dataset(36)
    rows = [torch.nonzero(data.train["label"] == c).flatten().tolist() for c in range(3)]
    return tiny.by_hand(
        data,
        [
            rows[0][:3] + rows[1][:3] + rows[2][:3],
            rows[0][3:6] + rows[1][3:7],
            rows[2][3:8],
            rows[0][6:8] + rows[1][7:9] + rows[2][8:10],
            rows[1][9:12],
            rows[0][8:12] + rows[2][10:12],
        ],
    )


@pytest.mark.parametrize(
    ("iid", "noniid", "nckd_mask", "threshold"),
    [(5.0, 1.0, "gather", 0.6), (1.0, 4.0, "additive", 0.6), (0.0, 2.0, "gather", 0.45)],
)
def test_weights_of_balanced_clients(iid: float, noniid: float, nckd_mask: Any, threshold: float) -> None:
    """Whether a client is balanced is what its labels say, in its first round too; phi is 1 for all."""
    options: dict[str, Any] = {"w_target": noniid, "w_target_iid": iid, "iid_from": threshold}
    options |= {"nckd_mask": nckd_mask}
    hand = Hand(tiny.simulation(FedAvg(), federation=mixed()))
    balanced = {c for c in "012345" if hand.gini(c) >= threshold}
    assert balanced == ({"0", "3"} if threshold == 0.6 else {"0", "1", "3"})
    left, _ = fedadkd(hand, ROUNDS, **options)
    simulation = tiny.simulation(FedADKD(**options), rounds=ROUNDS, federation=mixed())
    for expected in left:
        tiny.run_rounds(simulation, 1)
        byhand.assert_same(simulation.server.model, expected)


def test_equal_weights_of_both_groups_are_phi_off() -> None:
    method = FedADKD(w_target=2.0, w_target_iid=2.0, iid_from=0.6)
    off = byhand.run_rounds(FedADKD(w_target=2.0, phi="off"), ROUNDS, federation=mixed()).server.model
    byhand.assert_same(byhand.run_rounds(method, ROUNDS, federation=mixed()).server.model, off, rtol=1e-5, atol=1e-6)
    apart = byhand.run_rounds(replace(method, w_target_iid=6.0), ROUNDS, federation=mixed()).server.model
    assert byhand.distance(apart, off) > 1e-3


@pytest.mark.parametrize(
    "options", [{"tckd": "binary", "nckd_mask": "additive"}, {}, {"nckd_mask": "zero_logit"}], ids=str
)
def test_readings_with_teachers_asked_in_every_batch(options: dict[str, Any]) -> None:
    """Under an augmentation that happens to change nothing teachers are not settled."""
    settled = byhand.run_rounds(FedADKD(**options), 2).server.model
    changes: dict[str, Any] = {"augmentation": tiny.UNMOVED, "through_codec": True}
    byhand.assert_same(byhand.run_rounds(FedADKD(**options), 2, **changes).server.model, settled, rtol=1e-5, atol=3e-6)


def test_the_binary_reading_is_decoupled_distillation() -> None:
    """The binary target part and gathering, by the path that the other readings take, too."""
    binary = byhand.run_rounds(FedADKD(w_target=2.0, tckd="binary"), ROUNDS).server.model
    read = byhand.run_rounds(FedADKD(w_target=2.0, tckd="binary", nckd_mask="additive"), ROUNDS).server.model
    byhand.assert_same(read, binary, rtol=1e-5, atol=3e-6)


def test_the_defaults_are_those_that_were_chosen_on_held_out_images() -> None:
    assert FedADKD() == FedADKD(tckd="single_term", w_target=0.3, w_nontarget=1.0, delta=1.0, nckd_mask="gather")


@pytest.mark.parametrize("reading", TARGETS)
def test_clients_of_unequal_balance_can_be_trained_as_one_stack(reading: Any) -> None:
    """Losses are stacked if only tensors set them apart."""
    method, model = FedADKD(tckd=reading), tiny.simulation(FedAvg()).server.model
    one, other = (tree_signature(method.distillation(model, weight)) for weight in (3.0, 3.03))
    assert one == other


@pytest.mark.parametrize(("method", "options"), [(FedADKD, {"iid_from": 0.5}), (SeqKeep, {"tau": 4.0})])
def test_an_option_without_effect_is_refused(method: Any, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{method.__name__}.{next(iter(options))}"):
        method(**options)
