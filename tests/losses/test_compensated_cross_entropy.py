"""GLFC's weighted binary cross-entropy, as loops over examples and classes."""

from __future__ import annotations

import math

import pytest
import torch
from table_model import EXACT, data, draw, logits, model, value_and_gradients

from fedkeep.losses import CompensatedCrossEntropy

EXAMPLES, WIDTH, OLD, CLASSES = 8, 4, 3, 5
STUDENT = model(EXAMPLES, WIDTH, CLASSES, seed=1)
DATA = data([0, 1, 2, 3, 4, 3, 4, 0])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(("old", "rows"), [(OLD, (6, 3, 0, 1, 5)), (OLD, (3, 4, 5)), (5, (0, 7))])
def test_examples_of_old_and_of_new_classes_weigh_by_their_own_mean(old: int, rows: tuple[int, ...]) -> None:
    batch = draw(DATA, rows)
    labels = batch.data["label"].tolist()
    output = logits(STUDENT, batch).tolist()
    gaps = [1 - sigmoid(z[label]) for z, label in zip(output, labels, strict=True)]
    expected = 0.0
    for z, label, gap in zip(output, labels, gaps, strict=True):
        alike = [g for g, other in zip(gaps, labels, strict=True) if (other < old) == (label < old)]
        for c in range(CLASSES):
            p = sigmoid(z[c]) if c == label else 1 - sigmoid(z[c])
            expected -= gap / (sum(alike) / len(alike)) * math.log(p) / CLASSES / len(rows)
    loss, _ = value_and_gradients(CompensatedCrossEntropy(old), STUDENT, batch)
    assert float(loss) == pytest.approx(expected, rel=1e-10)


def test_before_there_are_old_classes_all_weigh_the_same() -> None:
    batch = draw(DATA, (6, 3, 0, 1))
    loss, _ = value_and_gradients(CompensatedCrossEntropy(0), STUDENT, batch)
    truth = torch.nn.functional.one_hot(batch.data["label"], CLASSES).double()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits(STUDENT, batch), truth)
    torch.testing.assert_close(loss, expected, **EXACT)


def test_weights_have_no_gradient() -> None:
    """Of one example alone the weight is 1, whatever its gap: the loss is the plain binary cross-entropy."""
    batch = draw(DATA, (3,))
    _, gradients = value_and_gradients(CompensatedCrossEntropy(OLD), STUDENT, batch)
    truth = torch.nn.functional.one_hot(batch.data["label"], CLASSES).double()
    expected = (logits(STUDENT, batch).sigmoid() - truth)[0] / CLASSES
    torch.testing.assert_close(gradients["classifier.bias"], expected, **EXACT)
    two = draw(DATA, (3, 5))
    _, gradients = value_and_gradients(CompensatedCrossEntropy(OLD), STUDENT, two)
    gaps = 1 - logits(STUDENT, two).sigmoid()[:, 3]
    errors = logits(STUDENT, two).sigmoid() - torch.nn.functional.one_hot(two.data["label"], CLASSES)
    expected = (gaps / gaps.mean())[:, None] * errors
    torch.testing.assert_close(gradients["classifier.bias"], expected.mean(0) / CLASSES, **EXACT)


def test_certain_examples_stay_finite() -> None:
    sure = {**STUDENT, "classifier.weight": STUDENT["classifier.weight"] * 0}
    sure["classifier.bias"] = torch.tensor([900.0, -900, -900, -900, -900]).double()
    loss, gradients = value_and_gradients(CompensatedCrossEntropy(OLD), sure, draw(DATA, (0, 7)))
    assert float(loss) == 0.0
    assert all(bool(torch.isfinite(slope).all()) for slope in gradients.values())
