"""F1, AUROC, calibration and specificity, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedkeep.metrics import calibration_error, chance_auroc, scores

LABELS = [0, 0, 0, 1, 1]
LOGITS = np.log([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.3, 0.7], [0.7, 0.3]])
"""Predicted: 0, 0, 1, 1, 0. Of the six pairs of a 0 and a 1, four are in order."""


def test_scores_of_two_classes_by_hand() -> None:
    found = scores(LABELS, LOGITS)
    assert found["f1"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert found["auroc"] == pytest.approx(3 / 6)
    assert found["specificity"] == pytest.approx([1 / 2, 2 / 3])
    # In bins of a fifteenth: 0.9 right; 0.6 right; 0.8 wrong; 0.7 right and 0.7 wrong.
    assert found["ece"] == pytest.approx((0.1 + 0.4 + 0.8 + abs(1 - 1.4)) / 5)


def test_auroc_ranks_where_the_softmax_is_one() -> None:
    margins = np.array([40.0, 45, 50, 41, 60, 70, 80, 90])
    labels = [0] * 4 + [1] * 4
    assert scores(labels, np.stack([0 * margins, margins], axis=1))["auroc"] == 1


def test_auroc_counts_equal_rows_as_half_whichever_class_is_the_best() -> None:
    """Of many rows of small whole logits, against ties found exactly: a class's odds need no more than its rivals'."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        labels, logits = rng.integers(0, 4, 60), rng.integers(-5, 6, (60, 4)).astype(float)
        by_class = []
        for c in np.unique(labels):
            rivals = np.sort(np.delete(logits, c, axis=1) - logits[:, [c]], axis=1)
            exact = -np.exp(rivals).sum(axis=1)
            pairs = np.sign(exact[labels == c][:, None] - exact[labels != c][None, :])
            by_class.append(((pairs + 1) / 2).mean())
        assert scores(labels, logits)["auroc"] == pytest.approx(np.mean(by_class), abs=1e-12)


def test_what_cannot_be_measured_is_none_and_absent_classes_do_not_count() -> None:
    assert scores([], np.zeros((0, 2))) == {"f1": None, "auroc": None, "ece": None, "specificity": [None, None]}
    assert scores([1, 1], [[0.0, 1.0], [0.0, 2.0]])["auroc"] is None
    assert scores([0, 1], [[np.nan, 1.0], [0.0, 2.0]])["ece"] is None
    three = scores(LABELS, np.concatenate([LOGITS, np.full((5, 1), -50.0)], axis=1))
    assert three["auroc"] == pytest.approx(3 / 6)
    assert three["f1"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert three["specificity"][2] == 1


def test_calibration_of_sure_and_right_is_perfect() -> None:
    assert calibration_error([True, True], [1.0, 1.0]) == 0
    assert calibration_error([True, False], [0.5, 0.5]) == pytest.approx(0)


def test_a_guess_exceeds_the_chance_of_auroc_rarely() -> None:
    draw = np.random.default_rng(0)
    labels = np.arange(60) % 6 == 0
    above = [scores(labels.astype(int), draw.normal(size=(60, 2)))["auroc"] > chance_auroc([50, 10]) for _ in range(60)]
    assert np.mean(above) < 0.15
    assert chance_auroc([50, 0]) == 1
