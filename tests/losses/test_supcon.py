"""Supervised contrast against its formula written out in float64."""

from __future__ import annotations

import math

import torch
from table_model import EXACT, data, draw, features, model, value_and_gradients

from fedkeep.losses import SupCon
from fedkeep.losses.features import supervised_contrastive

EXAMPLES, WIDTH, CLASSES = 9, 4, 3
STUDENT = model(EXAMPLES, WIDTH, CLASSES, seed=1)
OWN = data([0, 1, 0, 2, 1, 0, 1, 1, 0])  # the only 2 is row 3
ROWS = (7, 2, 5, 0, 3, 1)


def by_formula(tau: float) -> float:
    batch = draw(OWN, ROWS)
    raw, labels = features(STUDENT, batch).tolist(), batch.data["label"].tolist()
    unit = [[x / math.sqrt(sum(y * y for y in row)) for x in row] for row in raw]

    def near(i: int, j: int) -> float:
        return math.exp(sum(a * b for a, b in zip(unit[i], unit[j], strict=True)) / tau)

    total = 0.0
    for i in range(len(ROWS)):
        others = [j for j in range(len(ROWS)) if j != i]
        positives = [j for j in others if labels[j] == labels[i]]
        everybody = sum(near(i, j) for j in others)
        total -= sum(math.log(near(i, p) / everybody) for p in positives) / max(len(positives), 1)
    return total / len(ROWS)


def test_the_value() -> None:
    for tau in (0.07, 1.0):
        value, gradients = value_and_gradients(SupCon(tau), STUDENT, draw(OWN, ROWS))
        torch.testing.assert_close(value.item(), by_formula(tau), **EXACT)
        assert not gradients["classifier.weight"].any()


def test_the_gradient_by_differences() -> None:
    _, gradients = value_and_gradients(SupCon(0.5), STUDENT, draw(OWN, ROWS))
    step = 1e-6
    for row, column in ((7, 0), (3, 2), (1, 3)):
        ends = []
        for sign in (1, -1):
            moved = {name: tensor.clone() for name, tensor in STUDENT.items()}
            moved["table"][row, column] += sign * step
            ends.append(value_and_gradients(SupCon(0.5), moved, draw(OWN, ROWS))[0].item())
        torch.testing.assert_close(
            (ends[0] - ends[1]) / (2 * step), gradients["table"][row, column].item(), rtol=1e-5, atol=1e-8
        )
    assert not gradients["table"][[4, 6, 8]].any(), "rows that are not in the batch"


def test_the_length_of_features_does_not_matter() -> None:
    longer = {**STUDENT, "table": STUDENT["table"] * torch.arange(1, EXAMPLES + 1).unsqueeze(1)}
    one, other = (value_and_gradients(SupCon(), each, draw(OWN, ROWS))[0] for each in (STUDENT, longer))
    torch.testing.assert_close(one, other, **EXACT)


def test_without_a_positive_there_is_nothing_to_learn() -> None:
    for rows in ((3,), (3, 0), (3, 1, 2)):
        value, gradients = value_and_gradients(SupCon(), STUDENT, draw(OWN, rows))
        assert torch.isfinite(value)
        assert bool(torch.isfinite(gradients["table"]).all())
    assert value_and_gradients(SupCon(), STUDENT, draw(OWN, (3,)))[0] == 0
    assert value_and_gradients(SupCon(), STUDENT, draw(OWN, (3, 0)))[0] == 0


def test_autocast_changes_nothing() -> None:
    rng = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(16, 8, generator=rng), torch.arange(16) % 3
    plain = supervised_contrastive(rows, labels, 0.07)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(supervised_contrastive(rows, labels, 0.07), plain)
