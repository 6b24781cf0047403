"""The three readings of task semantics distillation, as loops over examples and classes."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from table_model import EXACT, TableView, data, draw, logits, model, settled, value_and_gradients
from torch import Tensor

from fedkeep.losses import TSD
from fedkeep.losses.classification import TSDReading, tsd_loss

EXAMPLES, WIDTH, OLD, CLASSES = 8, 4, 3, 5
STUDENT = model(EXAMPLES, WIDTH, CLASSES, seed=1)
TEACHER = model(EXAMPLES, WIDTH, OLD, seed=2)
DATA = data([0, 1, 2, 3, 4, 3, 4, 0])  # exemplars of old classes among the new ones
ROWS = (6, 3, 0, 1, 5)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_hand(old: Tensor, student: Tensor, labels: list[int], reading: TSDReading) -> float:
    """Return the loss as the papers write it, a binary cross-entropy of every example and class."""
    total = 0.0
    for output, own, label in zip(old.tolist(), student.tolist(), labels, strict=True):
        joined = [*output, *own[OLD:]]
        powers = [math.exp(z) for z in joined]
        for c in range(CLASSES):
            target = float(c == label)
            if reading == "recombined_sigmoid":
                p = sigmoid(joined[c])
            elif reading == "recombined_softmax":
                p = powers[c] / sum(powers)
            else:
                p, target = sigmoid(own[c]), sigmoid(output[c]) if c < OLD else target
            total -= target * math.log(p) + (1 - target) * math.log(1 - p)
    return total / len(labels) / CLASSES


@pytest.mark.parametrize("reading", get_args(TSDReading))
@pytest.mark.parametrize("is_settled", [False, True])
def test_each_reading_is_its_formula(reading: TSDReading, is_settled: bool) -> None:
    batch = draw(DATA, ROWS)
    expected = by_hand(logits(TEACHER, batch), logits(STUDENT, batch), batch.data["label"].tolist(), reading)
    objective = TSD(TEACHER, OLD, reading)
    loss, _ = value_and_gradients(settled(objective, DATA) if is_settled else objective, STUDENT, batch)
    assert float(loss) == pytest.approx(expected, rel=1e-10)


def gradients_of(reading: TSDReading) -> dict[str, Tensor]:
    return value_and_gradients(TSD(TEACHER, OLD, reading), STUDENT, draw(DATA, ROWS))[1]


def test_as_printed_it_is_the_binary_cross_entropy_of_the_new_rows_alone() -> None:
    gradients = gradients_of("recombined_sigmoid")
    assert not gradients["classifier.weight"][:OLD].any()
    assert not gradients["classifier.bias"][:OLD].any()
    batch = draw(DATA, ROWS)
    truth = torch.nn.functional.one_hot(batch.data["label"], CLASSES).double()
    expected = (logits(STUDENT, batch).sigmoid() - truth)[:, OLD:].sum(0) / len(ROWS) / CLASSES
    torch.testing.assert_close(gradients["classifier.bias"][OLD:], expected, **EXACT)


def test_through_a_softmax_old_logits_compete_but_old_rows_learn_nothing() -> None:
    gradients = gradients_of("recombined_softmax")
    assert not gradients["classifier.weight"][:OLD].any()
    higher = {**TEACHER, "classifier.bias": TEACHER["classifier.bias"] + 1}
    other = value_and_gradients(TSD(higher, OLD, "recombined_softmax"), STUDENT, draw(DATA, ROWS))[1]
    assert not torch.allclose(other["classifier.bias"], gradients["classifier.bias"])


def test_as_in_glfc_old_rows_are_taught() -> None:
    gradients = gradients_of("glfc")
    batch = draw(DATA, ROWS)
    own, output = logits(STUDENT, batch).sigmoid(), logits(TEACHER, batch).sigmoid()
    torch.testing.assert_close(
        gradients["classifier.bias"][:OLD], (own[:, :OLD] - output).sum(0) / len(ROWS) / CLASSES, **EXACT
    )
    assert gradients["classifier.weight"][:OLD].any()


@pytest.mark.parametrize("reading", get_args(TSDReading))
def test_extreme_logits_stay_finite_and_no_gradient_reaches_the_teacher(reading: TSDReading) -> None:
    old = torch.tensor([[300.0, -300.0, 0.0]], requires_grad=True)
    student = torch.tensor([[-300.0, 300.0, 0.0, 300.0, -300.0]], requires_grad=True)
    loss = tsd_loss(old, student, torch.tensor([4]), reading)
    assert torch.isfinite(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    assert old.grad is None


def test_half_precision_is_raised() -> None:
    old, student = torch.randn(2, OLD).half(), torch.randn(2, CLASSES).half()
    losses = [tsd_loss(old, student, torch.tensor([1, 4]), reading) for reading in get_args(TSDReading)]
    assert {loss.dtype for loss in losses} == {torch.float32}


def test_settled_it_holds_the_old_classes_and_asks_nobody() -> None:
    objective = settled(TSD(TEACHER, OLD), DATA)
    assert isinstance(objective, TSD)
    assert objective.teacher == {}
    assert objective.teacher_logits is not None
    assert objective.teacher_logits.shape == (EXAMPLES, OLD)
    view = TableView(STUDENT)
    objective(view, [draw(DATA, ROWS)])
    assert view.teacher_calls == 0
    assert settled(objective, DATA) is objective
    answer = None
    assert TSD(TEACHER, OLD).cache_teachers(answer, DATA, 1).teacher is TEACHER  # type: ignore[arg-type,attr-defined]


@pytest.mark.parametrize("reading", ["recombined_sigmoid", "recombined_softmax", "glfc"])
def test_a_model_that_diverged_has_a_loss_that_is_no_number(reading: TSDReading) -> None:
    """Its client is then lost for the round; an exception would stop the run."""
    student = torch.tensor([[0.1, 0.2, float("nan"), 0.3]], requires_grad=True)
    loss = tsd_loss(torch.tensor([[0.5, -0.5]]), student, torch.tensor([3]), reading)
    assert loss.isnan()
    loss.backward()
