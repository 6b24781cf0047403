"""Losses whose targets are predictions, against the formulas written out naively."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from table_model import EXACT, data, draw, logits, model, noise, value_and_gradients

from fedkeep.losses import CrossEntropy
from fedkeep.losses.distillation import LogitMatching, soft_label_loss

EXAMPLES, WIDTH, CLASSES = 9, 4, 5
STUDENT = model(EXAMPLES, WIDTH, CLASSES, seed=1)
PUBLIC = data([0, 3, 1, 4, 2, 2, 0, 4, 3])
ROWS = (7, 2, 5, 0)


@pytest.mark.parametrize(("start", "count"), [(0, 5), (0, 3), (3, 2), (1, 3)])
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_soft_labels_are_a_cross_entropy_with_the_softmax(start: int, count: int, tau: float) -> None:
    target = noise(EXAMPLES, count, seed=3)
    batch, total = draw(PUBLIC, ROWS), 0.0
    for own, row in zip(logits(STUDENT, batch), ROWS, strict=True):
        p = torch.softmax(target[row] / tau, 0).tolist()
        own_part = (own[start : start + count] / tau).tolist()
        everything = math.log(sum(math.exp(z) for z in own_part))
        total -= sum(p[c] * (own_part[c] - everything) for c in range(count))
    value, gradients = value_and_gradients(soft_label_loss(target, PUBLIC, tau, 0.7, start=start), STUDENT, batch)
    torch.testing.assert_close(value.item(), 0.7 * total / len(ROWS), **EXACT)
    outside = [c for c in range(CLASSES) if not start <= c < start + count]
    assert not gradients["classifier.weight"][outside].any()
    assert gradients["classifier.weight"][start : start + count].abs().sum() > 0


def test_probabilities_are_passed_as_tempered_logarithms() -> None:
    target, tau = noise(EXAMPLES, CLASSES, seed=4), 3.0
    probabilities = (target / tau).softmax(-1)
    one, two = (soft_label_loss(t, PUBLIC, tau) for t in (target, tau * probabilities.log()))
    torch.testing.assert_close(
        value_and_gradients(one, STUDENT, draw(PUBLIC, ROWS))[0],
        value_and_gradients(two, STUDENT, draw(PUBLIC, ROWS))[0],
        **EXACT,
    )


@pytest.mark.parametrize("tau", [1.0, 2.0])
@pytest.mark.parametrize("outputs", [0, CLASSES])
def test_probabilities_of_0_and_1_are_probabilities(tau: float, outputs: int) -> None:
    p = torch.tensor([[0.7, 0.3, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]] * 3)[:EXAMPLES].double()
    batch = draw(PUBLIC, ROWS)
    value, gradients = value_and_gradients(
        soft_label_loss(tau * p.log(), PUBLIC, tau, num_outputs=outputs), STUDENT, batch
    )
    own = logits(STUDENT, batch)[:, : outputs or 3] / tau
    expected = -(p[list(ROWS)] * own.log_softmax(-1)[:, :3]).sum(-1).mean()
    torch.testing.assert_close(value, expected.to(value), **EXACT)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())


def test_probabilities_of_0_beside_extreme_logits_of_half_precision() -> None:
    target = torch.tensor([[-torch.inf, -2e4, -3e4]] * EXAMPLES).half()
    value, _ = value_and_gradients(soft_label_loss(target, PUBLIC, 10.0), STUDENT, draw(PUBLIC, ROWS))
    own = logits(STUDENT, draw(PUBLIC, ROWS))[:, :3] / 10
    torch.testing.assert_close(value, -own.log_softmax(-1)[:, 1].mean().to(value), **EXACT)


def test_it_reads_its_data_set() -> None:
    own, other = draw(data([1, 0, 2, 3, 4, 1, 1, 0, 2]), (1, 3)), draw(PUBLIC, ROWS)
    target = noise(EXAMPLES, CLASSES, seed=5)
    both = CrossEntropy() + soft_label_loss(target, PUBLIC, 2.0, dataset_index=1)
    alone = [
        value_and_gradients(CrossEntropy(), STUDENT, own),
        value_and_gradients(soft_label_loss(target, PUBLIC, 2.0), STUDENT, other),
    ]
    value, _ = value_and_gradients(both, STUDENT, own, other)
    torch.testing.assert_close(value, alone[0][0] + alone[1][0], **EXACT)


def test_logits_are_matched_in_squares() -> None:
    target, batch = noise(EXAMPLES, CLASSES, seed=6), draw(PUBLIC, ROWS)
    own = logits(STUDENT, batch).tolist()
    squares = [(own[i][c] - target[row, c].item()) ** 2 for i, row in enumerate(ROWS) for c in range(CLASSES)]
    value, _ = value_and_gradients(LogitMatching(target), STUDENT, batch)
    torch.testing.assert_close(value.item(), sum(squares) / len(squares), **EXACT)


@pytest.mark.parametrize(("start", "count"), [(0, 3), (3, 2), (1, 1)])
@pytest.mark.parametrize(("tau", "scale"), [(1.0, "none"), (2.0, "none"), (2.0, "tau2")])
def test_taught_among_all_outputs(start: int, count: int, tau: float, scale: Any) -> None:
    output = noise(EXAMPLES, count, seed=3)
    batch, total = draw(PUBLIC, ROWS), 0.0
    for own, row in zip(logits(STUDENT, batch), ROWS, strict=True):
        p = torch.softmax(output[row] / tau, 0).tolist()
        everything = math.log(sum(math.exp(z / tau) for z in own.tolist()))
        total -= sum(p[c] * (own[start + c].item() / tau - everything) for c in range(count))
    term = soft_label_loss(output, PUBLIC, tau, 0.7, start=start, scale=scale, num_outputs=CLASSES)
    value, gradients = value_and_gradients(term, STUDENT, batch)
    factor = 0.7 * (tau**2 if scale == "tau2" else 1.0)
    torch.testing.assert_close(value.item(), factor * total / len(ROWS), **EXACT)
    assert gradients["classifier.bias"].abs().min() > 0, "all outputs compete"


def test_where_all_classes_are_spoken_of_it_makes_no_difference() -> None:
    output, batch = noise(EXAMPLES, CLASSES, seed=3), draw(PUBLIC, ROWS)
    ways = [
        value_and_gradients(soft_label_loss(output, PUBLIC, 2.0, num_outputs=n), STUDENT, batch) for n in (0, CLASSES)
    ]
    assert torch.equal(ways[0][0], ways[1][0])
    assert all(torch.equal(ways[0][1][name], slope) for name, slope in ways[1][1].items())


def test_squared_temperature_scales_exactly() -> None:
    output, batch = noise(EXAMPLES, 3, seed=3), draw(PUBLIC, ROWS)
    plain, scaled = (soft_label_loss(output, PUBLIC, 2.0, scale=scale) for scale in ("none", "tau2"))  # type: ignore[arg-type]
    one, other = (value_and_gradients(term, STUDENT, batch)[0] for term in (plain, scaled))
    torch.testing.assert_close(4 * one, other, **EXACT)
