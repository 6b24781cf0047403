"""What counts by class do not tell of a model: F1, AUROC, calibration and specificity, by scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

BINS = 15
"""Bins of equal width in which confidence is compared with accuracy, as of Guo et al., 2017."""


def scores(labels: ArrayLike, logits: ArrayLike) -> dict[str, Any]:
    """Return by name what is recorded beside counts by class; None where it has no value.

    ``f1``: Macro average over the classes that have examples. ``auroc``: The mean over the classes of that of one class
    against the rest. ``ece``: The expected calibration error of the softmax. ``specificity``: By class, the share of
    all other examples that are not taken for it.

    ``labels``: int64 [n].
    ``logits``: [n, classes].
    """
    from scipy.special import softmax
    from sklearn.metrics import f1_score, multilabel_confusion_matrix, roc_auc_score

    truth, values = np.asarray(labels), np.asarray(logits, dtype=np.float64)
    count, classes = values.shape
    if not count:
        return {"f1": None, "auroc": None, "ece": None, "specificity": [None] * classes}
    predicted = values.argmax(axis=1)
    negatives = multilabel_confusion_matrix(truth, predicted, labels=range(classes))[:, 0]
    present = np.unique(truth)
    found: dict[str, Any] = {
        "f1": float(f1_score(truth, predicted, labels=present, average="macro", zero_division=0)),
        "auroc": None,
        "ece": None,
        "specificity": [float(kept / (kept + taken)) if kept + taken else None for kept, taken in negatives],
    }
    if np.isfinite(values).all():
        p = softmax(values, axis=1)
        each = [roc_auc_score(truth == one, p[:, one]) for one in present] if len(present) > 1 else []
        found["auroc"] = float(np.mean(each)) if each else None
        found["ece"] = calibration_error(truth == predicted, p.max(axis=1))
    return found


def calibration_error(correct: ArrayLike, confidence: ArrayLike) -> float:
    """Return how far confidence is from accuracy, sum_b |correct_b - confidence_b| / n over bins of confidence."""
    sure = np.asarray(confidence, dtype=np.float64)
    bins = np.clip(np.ceil(sure * BINS).astype(np.int64) - 1, 0, BINS - 1)
    gaps = np.bincount(bins, np.asarray(correct, dtype=np.float64) - sure)
    return float(np.abs(gaps).sum() / len(sure))


def chance_auroc(total: ArrayLike) -> float:
    """Return the AUROC that a guess exceeds in 5 % of all test sets, by the smallest class that has examples."""
    examples = np.asarray(total, dtype=np.float64)
    least, count = float(examples[examples > 0].min()), float(examples.sum())
    return 0.5 + 1.645 * math.sqrt((count + 1) / (12 * least * (count - least))) if count > least else 1.0
