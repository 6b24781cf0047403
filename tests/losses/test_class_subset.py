"""Terms on a slice of the logits, against the formulas of class-incremental papers written out naively."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from table_model import EXACT, TableView, data, draw, logits, model, settled, value_and_gradients
from torch import Tensor

from fedkeep.losses import (
    ZERO_LOSS,
    Batch,
    ClassSubset,
    CrossEntropy,
    Distillation,
    FullKL,
    Loss,
    QuadraticPenalty,
    Scaled,
    SubsetDistillation,
)

EXAMPLES, WIDTH, OLD, CLASSES, TAU = 10, 4, 3, 5, 2.0
STUDENT = model(EXAMPLES, WIDTH, CLASSES, seed=1)
TEACHER = model(EXAMPLES, WIDTH, OLD, seed=2)  # the head of the task before
NEW = data([3, 4, 4, 3, 3, 4, 3, 4, 4, 3])  # the new task's labels only
MIXED = data([0, 1, 2, 3, 4, 0, 1, 2, 3, 4])
ROWS = (7, 2, 5, 0)


def softmax(row: Tensor) -> list[float]:
    powers = row.exp().tolist()
    return [power / sum(powers) for power in powers]


def cross_entropy_by_hand(columns: slice, labels: Mapping[str, Tensor]) -> float:
    batch, total = draw(labels, ROWS), 0.0
    for row, label in zip(logits(STUDENT, batch), batch.data["label"].tolist(), strict=True):
        total -= math.log(softmax(row[columns])[label - (columns.start or 0)])
    return total / len(ROWS)


def distillation_by_hand(teacher_entropy: bool) -> float:
    batch, total = draw(NEW, ROWS), 0.0
    for own, output in zip(logits(STUDENT, batch), logits(TEACHER, batch), strict=True):
        s, p = softmax(own[:OLD] / TAU), softmax(output / TAU)
        total -= sum(p[c] * math.log(s[c]) for c in range(OLD))
        if teacher_entropy:
            total += sum(p[c] * math.log(p[c]) for c in range(OLD))
    return total / len(ROWS)


def distil(teacher_entropy: bool = True, weight: float = 1.0, **options: object) -> ClassSubset:
    term = Distillation((TEACHER,), FullKL(weight), TAU, "none", teacher_entropy=teacher_entropy)
    return ClassSubset(replace(term, **options), 0, OLD, any_label=True)  # type: ignore[arg-type]


def test_cross_entropy_among_the_new_classes() -> None:
    loss, gradients = value_and_gradients(ClassSubset(CrossEntropy(), OLD), STUDENT, draw(NEW, ROWS))
    assert float(loss) == pytest.approx(cross_entropy_by_hand(slice(OLD, None), NEW), rel=1e-12)
    assert not gradients["classifier.weight"][:OLD].any(), "old rows do not compete"
    assert gradients["classifier.weight"][OLD:].any()


def test_cross_entropy_among_the_old_classes_and_among_all() -> None:
    old = data([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    loss, gradients = value_and_gradients(ClassSubset(CrossEntropy(), 0, OLD), STUDENT, draw(old, ROWS))
    assert float(loss) == pytest.approx(cross_entropy_by_hand(slice(0, OLD), old), rel=1e-12)
    assert not gradients["classifier.weight"][OLD:].any()
    whole, _ = value_and_gradients(ClassSubset(CrossEntropy()), STUDENT, draw(MIXED, ROWS))
    plain, _ = value_and_gradients(CrossEntropy(), STUDENT, draw(MIXED, ROWS))
    assert torch.equal(whole, plain)


def test_a_label_outside_the_slice_is_an_error_where_labels_count() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        value_and_gradients(ClassSubset(CrossEntropy(), OLD), STUDENT, draw(MIXED, ROWS))


@pytest.mark.parametrize("teacher_entropy", [True, False])
@pytest.mark.parametrize("is_settled", [False, True])
def test_distillation_of_the_old_classes_on_new_examples(teacher_entropy: bool, is_settled: bool) -> None:
    objective: Loss = distil(teacher_entropy)
    if is_settled:
        objective = settled(objective, NEW)
    loss, gradients = value_and_gradients(objective, STUDENT, draw(NEW, ROWS))
    assert float(loss) == pytest.approx(distillation_by_hand(teacher_entropy), rel=1e-10)
    assert not gradients["classifier.weight"][OLD:].any()
    # The gradient of both: softmax differences over tau, through the old logits.
    batch = draw(NEW, ROWS)
    own, output = (logits(m, batch)[:, :OLD] / TAU for m in (STUDENT, TEACHER))
    upstream = (own.softmax(-1) - output.softmax(-1)) / TAU / len(ROWS)
    torch.testing.assert_close(gradients["classifier.bias"][:OLD], upstream.sum(0), **EXACT)


def test_labels_do_not_count_in_the_whole_divergence() -> None:
    ours, theirs = (value_and_gradients(distil(), STUDENT, draw(d, ROWS))[0] for d in (NEW, MIXED))
    torch.testing.assert_close(ours, theirs, **EXACT)


def test_the_teacher_may_have_more_rows_than_it_knew() -> None:
    grown = {**TEACHER, "classifier.weight": torch.cat((TEACHER["classifier.weight"], torch.ones(2, WIDTH).double()))}
    grown["classifier.bias"] = torch.cat((TEACHER["classifier.bias"], torch.zeros(2).double()))
    objective = distil(teachers=(grown,))
    for way in (objective, settled(objective, NEW)):
        loss, _ = value_and_gradients(way, STUDENT, draw(NEW, ROWS))
        assert float(loss) == pytest.approx(distillation_by_hand("kl"), rel=1e-10)


def test_a_settled_slice_asks_nobody_and_holds_the_slice_only() -> None:
    objective = settled(distil(), NEW)
    view = TableView(STUDENT)
    objective(view, [draw(NEW, ROWS)])
    assert view.teacher_calls == 0
    assert isinstance(objective, ClassSubset)
    assert objective.term.teachers.others.shape == (EXAMPLES, OLD)  # type: ignore[attr-defined]


@pytest.mark.parametrize("scale", ["none", "tau2"])
def test_squared_temperature_scales_exactly(scale: str) -> None:
    loss, gradients = value_and_gradients(distil(scale=scale), STUDENT, draw(NEW, ROWS))
    plain, slope = value_and_gradients(distil(), STUDENT, draw(NEW, ROWS))
    factor = TAU**2 if scale == "tau2" else 1.0
    torch.testing.assert_close(loss, factor * plain, **EXACT)
    torch.testing.assert_close(gradients["classifier.weight"], factor * slope["classifier.weight"], **EXACT)


def test_learning_without_forgetting_is_a_sum_of_terms() -> None:
    """FedLwF: CE among the new classes + 3 * distillation of the old ones, at temperature 2 without its square."""
    objective = ClassSubset(CrossEntropy(), OLD) + distil("ce", weight=3.0)
    expected = cross_entropy_by_hand(slice(OLD, None), NEW) + 3 * distillation_by_hand("ce")
    for way in (objective, settled(objective, NEW)):
        assert float(value_and_gradients(way, STUDENT, draw(NEW, ROWS))[0]) == pytest.approx(expected, rel=1e-10)


def test_one_old_class_teaches_nothing() -> None:
    single = replace(distil(), stop=1)
    loss, gradients = value_and_gradients(ClassSubset(CrossEntropy(), OLD) + single, STUDENT, draw(NEW, ROWS))
    alone, slope = value_and_gradients(ClassSubset(CrossEntropy(), OLD), STUDENT, draw(NEW, ROWS))
    assert torch.equal(loss, alone)
    assert all(torch.equal(gradients[name], slope[name]) for name in gradients)
    assert settled(single, NEW) is ZERO_LOSS


def test_one_new_class_has_nothing_to_be_told_from() -> None:
    only = data([4] * EXAMPLES)
    loss, gradients = value_and_gradients(ClassSubset(CrossEntropy(), 4), STUDENT, draw(only, ROWS))
    assert float(loss) == 0.0
    assert not any(slope.any() for slope in gradients.values())


def test_images_stay_the_same_tensor_so_that_a_student_answers_once() -> None:
    seen = []

    class Spy(TableView):
        def logits(self, batch: Batch) -> Tensor:
            seen.append(batch.data["input"])
            return super().logits(batch)

    batch = draw(NEW, ROWS)
    (ClassSubset(CrossEntropy(), OLD) + distil())(Spy(STUDENT), [batch])
    assert len(seen) == 2
    assert all(image is batch.data["input"] for image in seen)


def test_a_second_data_set_is_cut_too() -> None:
    term = ClassSubset(CrossEntropy(dataset_index=1), OLD)
    loss, _ = value_and_gradients(term, STUDENT, draw(NEW, (0,)), draw(NEW, ROWS))
    assert float(loss) == pytest.approx(cross_entropy_by_hand(slice(OLD, None), NEW), rel=1e-12)


def test_scaling_a_term() -> None:
    plain, slope = value_and_gradients(CrossEntropy(), STUDENT, draw(MIXED, ROWS))
    loss, gradients = value_and_gradients(Scaled(0.25, CrossEntropy()), STUDENT, draw(MIXED, ROWS))
    torch.testing.assert_close(loss, plain / 4, **EXACT)
    torch.testing.assert_close(gradients["table"], slope["table"] / 4, **EXACT)
    quarter = settled(Scaled(0.25, distil()), NEW)
    expected = distillation_by_hand("kl") / 4
    assert float(value_and_gradients(quarter, STUDENT, draw(NEW, ROWS))[0]) == pytest.approx(expected, rel=1e-10)
    assert settled(Scaled(2.0, Distillation((), FullKL(1.0))), NEW) is ZERO_LOSS


def test_a_pull_on_the_classifier_alone() -> None:
    """FedSKF's eq. 3: alpha times the squared distances of weight and bias, neither halved nor averaged."""
    head = {name: tensor + 0.5 for name, tensor in STUDENT.items() if name.startswith("classifier.")}
    loss, gradients = value_and_gradients(QuadraticPenalty(head, 2.0), STUDENT, draw(NEW, ROWS))
    assert float(loss) == pytest.approx(2.0 * 0.25 * (CLASSES * WIDTH + CLASSES))
    assert not gradients["table"].any()
    torch.testing.assert_close(
        gradients["classifier.bias"], torch.full_like(gradients["classifier.bias"], -2.0), **EXACT
    )


@pytest.mark.parametrize("is_settled", [False, True])
@pytest.mark.parametrize("scale", ["none", "tau2"])
def test_among_all_the_student_answers_with_all_its_outputs(is_settled: bool, scale: Any) -> None:
    objective: Loss = SubsetDistillation(TEACHER, 0, OLD, 0.7, TAU, scale)
    if is_settled:
        objective = settled(objective, NEW)
    batch, total, factor = draw(NEW, ROWS), 0.0, 0.7 * (TAU**2 if scale == "tau2" else 1.0)
    for own, output in zip(logits(STUDENT, batch), logits(TEACHER, batch), strict=True):
        q, p = softmax(own / TAU), softmax(output / TAU)
        total -= sum(p[c] * math.log(q[c]) for c in range(OLD))
    view = TableView(STUDENT)
    objective(view, [batch])
    assert view.teacher_calls == (0 if is_settled else 1)
    loss, gradients = value_and_gradients(objective, STUDENT, batch)
    assert float(loss) == pytest.approx(factor * total / len(ROWS), rel=1e-12)
    own, output = logits(STUDENT, batch) / TAU, logits(TEACHER, batch) / TAU
    target = torch.cat((output.softmax(-1), torch.zeros(len(ROWS), CLASSES - OLD)), -1)
    upstream = factor * (own.softmax(-1) - target) / TAU / len(ROWS)
    torch.testing.assert_close(gradients["classifier.bias"], upstream.sum(0), **EXACT)
    assert (gradients["classifier.bias"][OLD:] > 0).all(), "outputs that are not spoken of are lowered"


def test_among_all_by_numbers() -> None:
    """Logits (1, 0.5, -0.5, 2) at temperature 2, taught (2, 0) about the first two: worked out by hand."""
    student = {"table": torch.tensor([[1.0]]).double(), "classifier.weight": torch.zeros(4, 1).double()}
    student["classifier.bias"] = torch.tensor([1.0, 0.5, -0.5, 2.0]).double()
    for scale, value in (("none", 1.4281833456375053), ("tau2", 5.712733382550021)):
        logits = torch.tensor([[2.0, 0.0]]).double()
        term = SubsetDistillation.from_logits(logits, 0, 1.0, 2.0, scale)  # type: ignore[arg-type]
        loss, _ = value_and_gradients(term, student, draw(data([0]), [0]))
        assert float(loss) == pytest.approx(value, rel=1e-14)


def test_among_all_a_class_alone_still_competes_with_the_others() -> None:
    term = SubsetDistillation(model(EXAMPLES, WIDTH, 1, seed=4), 0, 1, 1.0, TAU)
    loss, _ = value_and_gradients(term, STUDENT, draw(data([0] * EXAMPLES), ROWS))
    plain, _ = value_and_gradients(CrossEntropy(tau=TAU), STUDENT, draw(data([0] * EXAMPLES), ROWS))
    torch.testing.assert_close(loss, plain, **EXACT)


def test_among_all_another_data_set_is_left_alone() -> None:
    term = SubsetDistillation(TEACHER, 0, OLD, dataset_index=1)
    assert settled(term, NEW) is term
