"""Elastic weight consolidation over a head that grows, by hand."""

from __future__ import annotations

import pytest
import torch
from table_model import data, draw, model, value_and_gradients

from fedkeep.losses import QuadraticPenalty
from fedkeep.losses.penalties import merge_fisher, pad_rows

OLD, NEW = model(6, 4, 3, seed=1), model(6, 4, 5, seed=2)


def test_older_tensors_get_rows_of_zeros() -> None:
    found = pad_rows(OLD, NEW)
    assert [tuple(t.shape) for t in found.values()] == [tuple(t.shape) for t in NEW.values()]
    assert torch.equal(found["classifier.weight"][:3], OLD["classifier.weight"])
    assert not found["classifier.weight"][3:].any()
    assert torch.equal(found["table"], OLD["table"])
    assert pad_rows({"scale": torch.tensor(2.0)}, {"scale": torch.tensor(3.0)})["scale"] == 2.0


def test_diagonals_are_merged_where_both_have_rows_and_limited() -> None:
    old = {"w": torch.tensor([[2e-5, 1e-4]]), "scale": torch.tensor(1e-5)}
    new = {"w": torch.tensor([[6e-5, 5.0], [3e-5, 7.0]]), "scale": torch.tensor(3e-5)}
    found = merge_fisher(old, new, share=0.75)
    torch.testing.assert_close(found["w"], torch.tensor([[0.75 * 2e-5 + 0.25 * 6e-5, 1e-4], [3e-5, 1e-4]]))
    assert float(found["scale"]) == pytest.approx(0.75e-5 + 0.75e-5)
    first = merge_fisher({}, new, share=0.0)
    torch.testing.assert_close(first["w"], torch.tensor([[6e-5, 1e-4], [3e-5, 1e-4]]))
    assert float(merge_fisher(old, new, 0.5, limit=1.0)["w"][0, 1]) == pytest.approx(0.5e-4 + 0.5)


def test_new_rows_are_free() -> None:
    """1000 * 1/2 * sum F (w - w*)^2 over what the model before had."""
    fisher = {name: tensor.abs() for name, tensor in model(6, 4, 3, seed=3).items()}
    penalty = QuadraticPenalty(pad_rows(OLD, NEW), 500.0, pad_rows(fisher, NEW))
    loss, gradients = value_and_gradients(penalty, NEW, draw(data([0] * 6), (0, 1)))
    moved = {name: (NEW[name][: len(tensor)] - tensor).square() for name, tensor in OLD.items()}
    assert float(loss) == pytest.approx(500.0 * sum(float((fisher[name] * moved[name]).sum()) for name in moved))
    assert not gradients["classifier.weight"][3:].any()
    assert gradients["classifier.weight"][:3].all()
