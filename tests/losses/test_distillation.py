"""Distillation as an objective: composed losses, settled teachers, sums.

The student is a table of logits, one row an example, so that every expected number comes from a formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep.losses import ZERO_LOSS, Batch, CrossEntropy, Distillation, Loss, PerTeacher, Sum

EXAMPLES, CLASSES = 12, 5
# Float64 against float64: some hundred roundings of 1e-16 of terms up to 100 (3 teachers, weights 3, tau squared 16).
EXACT = 1e-11
STUDENT, TEACHER = [1.0, 0.5, -0.5, 2.0], [2.0, -1.0, 0.3, 0.7]


class Table:
    """A student whose logits are a parameter; an example's image is its row's number, its index where it was drawn."""

    def __init__(self, logits: Tensor) -> None:
        self.table = logits.clone().requires_grad_()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return {"table": self.table}

    def logits(self, batch: Batch) -> Tensor:
        return self.table[batch.data["input"].long()]

    def features(self, batch: Batch) -> Tensor:
        return self.logits(batch)

    def teacher_logits(self, model: Mapping[str, Tensor], batch: Batch) -> Tensor:
        with torch.no_grad():
            return model["table"][batch.data["input"].long()]


class TeacherlessView(Table):
    """A student that has no other model at hand: who asks for one has not settled."""

    def teacher_logits(self, model: Mapping[str, Tensor], batch: Batch) -> Tensor:
        raise AssertionError("asked a teacher that has already spoken")


def random_table(seed: int, rows: int = EXAMPLES, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2 * torch.randn(rows, CLASSES, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def whole(rows: Sequence[int] = range(EXAMPLES)) -> dict[str, Tensor]:
    """Return data whose images are the numbers ``rows`` of the table, with labels that depend on them."""
    numbers = torch.tensor(list(rows))
    return {"input": numbers, "label": numbers * 3 % CLASSES}


def draw(data: Mapping[str, Tensor], index: Sequence[int]) -> Batch:
    picked = torch.tensor(list(index))
    return Batch({name: column[picked] for name, column in data.items()}, picked)


def value_and_gradient(objective: Loss, student: Any, *batches: Batch) -> tuple[Tensor, Tensor]:
    loss = objective(student, list(batches))
    assert loss.shape == ()
    (slope,) = torch.autograd.grad(loss, student.table)
    return loss.detach(), slope


def softmax(logits: Sequence[float], tau: float) -> list[float]:
    powers = [math.exp(value / tau) for value in logits]
    return [power / sum(powers) for power in powers]


def naive(teacher: Sequence[float], student: Sequence[float], label: int, tau: float) -> tuple[float, float]:
    p, s = softmax(teacher, tau), softmax(student, tau)
    q, r = 1 - p[label], 1 - s[label]
    others = [c for c in range(len(p)) if c != label]
    target = p[label] * math.log(p[label] / s[label]) + q * math.log(q / r)
    return target, sum(p[c] / q * math.log(p[c] / q / (s[c] / r)) for c in others)


def three_teachers(tau: float = 4.0, scale: Any = "tau2", dtype: torch.dtype = torch.float64) -> Distillation:
    teachers = tuple({"table": random_table(seed, dtype=dtype)} for seed in (11, 12, 13))
    rule = PerTeacher(torch.tensor([0.5, 2.0, 0.5], dtype=dtype), torch.tensor([0.2, 0.3, 0.5], dtype=dtype))
    return Distillation(teachers, rule, tau=tau, scale=scale)


def cache_teachers(objective: Loss, data: Mapping[str, Tensor], dataset_index: int = 0) -> Loss:
    return objective.cache_teachers(lambda weights: weights["table"][data["input"]], data, dataset_index)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "target", "nontarget", "golden"),
    [
        ("FedNTD", 0.0, 1.0, 1.904188),
        ("FedADKD, phi 0.5", 0.5, 1.0, 2.130041),
        ("SFedKD, one teacher", 3.0, 1.0, 3.259309),
    ],
)
@pytest.mark.parametrize("scale", ["none", "tau2"])  # the same at temperature 1
@pytest.mark.parametrize("settled", [False, True])
def test_golden_whole_losses(
    method: str, target: float, nontarget: float, golden: float, scale: Any, settled: bool
) -> None:
    rule = PerTeacher(torch.tensor([target]), torch.tensor([nontarget]))
    objective: Loss = CrossEntropy() + Distillation(({"table": torch.tensor([TEACHER])},), rule, tau=1.0, scale=scale)
    data = {"input": torch.tensor([0]), "label": torch.tensor([0])}
    if settled:
        objective = cache_teachers(objective, data)
    loss = objective(Table(torch.tensor([STUDENT])), [draw(data, [0])])
    # Printed to six decimals (5e-7), computed in float32 (1e-7 of terms up to 3).
    assert loss.item() == pytest.approx(golden, abs=2e-6), method


@pytest.mark.parametrize(("tau", "target", "nontarget"), [(2.0, 0.096334, 0.119158), (4.0, 0.020440, 0.032080)])
def test_golden_sfedkd_at_other_temperatures(tau: float, target: float, nontarget: float) -> None:
    data = {"input": torch.tensor([0]), "label": torch.tensor([0])}
    for scale, factor in (("none", 1.0), ("tau2", tau**2)):
        rule = PerTeacher(torch.tensor([3.0]), torch.tensor([1.0]))
        teachers = ({"table": torch.tensor([TEACHER])},)
        loss = (CrossEntropy() + Distillation(teachers, rule, tau, scale))(
            Table(torch.tensor([STUDENT])), [draw(data, [0])]
        )
        # Cross-entropy stays at temperature 1. Printed to six decimals, times 3 + 1, times tau squared.
        golden = 1.514675 + factor * (3 * target + nontarget)
        assert loss.item() == pytest.approx(golden, abs=2e-6 * max(1.0, factor))


@pytest.mark.parametrize("tau", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("scale", ["none", "tau2"])
def test_value_is_the_mean_of_the_formula(tau: float, scale: Any) -> None:
    objective, data = three_teachers(tau, scale), whole()
    student, index = Table(random_table(1)), [4, 0, 7, 11]
    total = 0.0
    for row in index:
        label = int(data["label"][row])
        for k, teacher in enumerate(objective.teachers):
            parts = naive(teacher["table"][row].tolist(), student.table[row].tolist(), label, tau)
            total += [0.5, 2.0, 0.5][k] * parts[0] + [0.2, 0.3, 0.5][k] * parts[1]
    expected = (tau**2 if scale == "tau2" else 1.0) * total / len(index)
    assert objective(student, [draw(data, index)]).item() == pytest.approx(expected, rel=EXACT)


def test_cross_entropy_is_the_mean_of_the_formula() -> None:
    data, student = whole(), Table(random_table(1))
    index = [3, 8, 1]
    expected = -sum(math.log(softmax(student.table[row].tolist(), 1.0)[int(data["label"][row])]) for row in index) / 3
    assert CrossEntropy()(student, [draw(data, index)]).item() == pytest.approx(expected, rel=EXACT)


def test_averaged_teachers_with_tied_parts_are_plain_distillation() -> None:
    # With weights (1/K, q_y^T/K) on one example the loss is the mean KL divergence (AVER), tau squared in front.
    tau, data, student = 4.0, whole(), Table(random_table(1))
    tables = [random_table(seed) for seed in (11, 12, 13)]
    label = int(data["label"][5])
    rest = torch.tensor([1 - softmax(table[5].tolist(), tau)[label] for table in tables], dtype=torch.float64)
    rule = PerTeacher(torch.full((3,), 1 / 3, dtype=torch.float64), rest / 3)
    objective = Distillation(tuple({"table": table} for table in tables), rule, tau, "tau2")
    mine = softmax(student.table[5].tolist(), tau)
    plain = sum(
        p * math.log(p / s) for table in tables for p, s in zip(softmax(table[5].tolist(), tau), mine, strict=True)
    )
    assert objective(student, [draw(data, [5])]).item() == pytest.approx(16 * plain / 3, rel=EXACT)


# --- settling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.0, 4.0])
@pytest.mark.parametrize("scale", ["none", "tau2"])
@pytest.mark.parametrize(
    "index", [list(range(EXAMPLES)), list(range(EXAMPLES))[::-1], [7, 2, 9], [5], [3, 3, 0, 11, 3]]
)
def test_settled_teachers_say_the_same(tau: float, scale: Any, index: list[int]) -> None:
    objective, data = CrossEntropy() + three_teachers(tau, scale), whole()
    batch = draw(data, index)
    asked = value_and_gradient(objective, Table(random_table(1)), batch)
    settled = value_and_gradient(cache_teachers(objective, data), TeacherlessView(random_table(1)), batch)
    torch.testing.assert_close(settled, asked, rtol=EXACT, atol=EXACT)
    assert asked[1].abs().max() > 1e-3


def test_settled_on_some_rows_of_a_larger_data_set() -> None:
    # Row 0 of this client's data is row 9 of the table: index counts rows of the data, not of anything else.
    objective, data = CrossEntropy() + three_teachers(), whole([9, 2, 7, 4, 0])
    settled = cache_teachers(objective, data)
    for index in ([0, 1, 2, 3, 4], [4, 2], [3], [1, 0, 4]):
        batch = draw(data, index)
        asked = value_and_gradient(objective, Table(random_table(1)), batch)
        output = value_and_gradient(settled, TeacherlessView(random_table(1)), batch)
        torch.testing.assert_close(output, asked, rtol=EXACT, atol=EXACT)


def test_a_pass_in_any_order_has_the_same_mean() -> None:
    data, student = whole(), TeacherlessView(random_table(1))
    settled = cache_teachers(three_teachers(), data)
    full = value_and_gradient(settled, student, draw(data, range(EXAMPLES)))
    order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(3)).tolist()
    parts = [value_and_gradient(settled, student, draw(data, order[k : k + 4])) for k in range(0, EXAMPLES, 4)]
    torch.testing.assert_close(sum(part[0] for part in parts) / 3, full[0], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(sum(part[1] for part in parts) / 3, full[1], rtol=EXACT, atol=EXACT)


def test_settled_in_float32_says_the_same_to_rounding() -> None:
    # Rounding of 6e-8 of sums of size 16 * 3 * 3, over some ten operations.
    data, batch = whole(), draw(whole(), [7, 2, 9])
    objective = CrossEntropy() + three_teachers(dtype=torch.float32)
    student = random_table(1, dtype=torch.float32)
    asked = value_and_gradient(objective, Table(student), batch)
    output = value_and_gradient(cache_teachers(objective, data), TeacherlessView(student), batch)
    torch.testing.assert_close(output, asked, rtol=1e-5, atol=1e-5)


def test_settled_objective_follows_the_student() -> None:
    # The teachers are frozen, the student is not: what was settled holds for its later weights too.
    objective, data, batch = three_teachers(), whole(), draw(whole(), [1, 6])
    settled = cache_teachers(objective, data)
    for seed in (1, 2):
        asked = value_and_gradient(objective, Table(random_table(seed)), batch)
        output = value_and_gradient(settled, TeacherlessView(random_table(seed)), batch)
        torch.testing.assert_close(output, asked, rtol=EXACT, atol=EXACT)


def test_settling_changes_nothing_but_teachers_on_that_data() -> None:
    objective = three_teachers()
    assert cache_teachers(objective, whole(), dataset_index=1) is objective
    assert cache_teachers(objective, whole(), dataset_index=0) is not objective
    plain = CrossEntropy()
    assert cache_teachers(plain, whole()) is plain
    settled = cache_teachers(objective, whole())
    student, batch = TeacherlessView(random_table(1)), draw(whole(), [2, 5])
    assert torch.equal(cache_teachers(settled, whole())(student, [batch]), settled(student, [batch]))


@pytest.mark.parametrize("settled", [False, True])
def test_distillation_on_a_second_data_set(settled: bool) -> None:
    first = three_teachers()
    objective: Loss = Distillation(first.teachers, first.rule, first.tau, first.scale, dataset_index=1)
    local, proxy = draw(whole(), [0, 1]), draw(whole([8, 6, 4]), [2, 1])
    expected = value_and_gradient(first, Table(random_table(1)), proxy)
    if settled:
        objective = cache_teachers(objective, whole([8, 6, 4]), dataset_index=1)
    found = value_and_gradient(objective, (TeacherlessView if settled else Table)(random_table(1)), local, proxy)
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


# --- sums and teachers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", ["unsettled", "settled", "nothing"])
def test_no_teachers_distil_nothing(added: str) -> None:
    # SFedKD without teachers (its first round) is FedSeq, bit for bit.
    empty = CrossEntropy() + Distillation((), PerTeacher(torch.zeros(0), torch.zeros(0)), tau=4.0)
    objective = {"unsettled": empty, "settled": cache_teachers(empty, whole()), "nothing": CrossEntropy() + ZERO_LOSS}[
        added
    ]
    batch, logits = draw(whole(), [0, 3, 5]), random_table(1, dtype=torch.float32)
    plain = value_and_gradient(CrossEntropy(), Table(logits), batch)
    found = value_and_gradient(objective, Table(logits), batch)
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])


def test_sums_are_flat_and_add_up() -> None:
    first, second = CrossEntropy(), three_teachers()
    objective = first + second + ZERO_LOSS + (second + first)
    assert isinstance(objective, Sum)
    assert objective.terms == (first, second, second, first)
    student, batch = Table(random_table(1)), draw(whole(), [0, 3, 5])
    expected = 2 * (first(student, [batch]) + second(student, [batch]))
    assert objective(student, [batch]).item() == pytest.approx(expected.item(), rel=EXACT)


@pytest.mark.parametrize("settled", [False, True])
def test_teachers_get_no_gradient(settled: bool) -> None:
    tables = [random_table(seed).requires_grad_() for seed in (11, 12)]
    rule = PerTeacher(torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    objective: Loss = Distillation(tuple({"table": table} for table in tables), rule)
    if settled:
        objective = cache_teachers(objective, whole())
    student = Table(random_table(1))
    objective(student, [draw(whole(), [0, 3, 5])]).backward()
    assert student.table.grad is not None
    assert [table.grad for table in tables] == [None, None]


def test_bfloat16_logits_are_raised() -> None:
    tables = [random_table(seed).bfloat16() for seed in (1, 11)]
    rule = PerTeacher(torch.tensor([3.0]), torch.tensor([1.0]))
    batch = draw(whole(), [0, 3, 5, 7])
    half = Distillation(({"table": tables[1]},), rule, tau=4.0)(Table(tables[0]), [batch])
    wide = Distillation(({"table": tables[1].float()},), rule, tau=4.0)(Table(tables[0].float()), [batch])
    assert half.dtype == torch.float32
    assert torch.equal(half, wide)
