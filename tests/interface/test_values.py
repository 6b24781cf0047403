"""Values: walking, counting, checking and copying what travels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep.interface import Fit, each
from fedkeep.interface.values import Each, copied, leaves, not_finite, payload
from fedkeep.losses import NOTHING, CrossEntropy


@dataclass
class State:
    models: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    note: str | None = None


@dataclass(frozen=True)
class Frozen:
    names: tuple[str, ...] = ()


def test_leaves_come_in_order_with_their_paths() -> None:
    value = {"a": [1, (2.5, "x")], "b": State(order=["y"], note=None), "c": {"d": True}}
    assert list(leaves(value)) == [
        ("a[0]", 1),
        ("a[1][0]", 2.5),
        ("a[1][1]", "x"),
        ("b.order[0]", "y"),
        ("b.note", None),
        ("c.d", True),
    ]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {2}]}, r"a\[1\] is a set"),
        (State(models={"x": {"w": nn.Linear(1, 1)}}), r"models\.x\.w is a Linear"),  # type: ignore[dict-item]
        (object(), "this is a object"),
        (State, "this is a type"),
        (b"bytes", "this is a bytes"),
        (torch.float32, "this is a dtype"),
        (torch.Generator(), "this is a Generator"),
    ],
)
def test_what_is_no_value_is_named_with_its_place(value: Any, path: str) -> None:
    for function in (lambda v: list(leaves(v)), payload, not_finite):
        with pytest.raises(TypeError, match=path):
            function(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, 0),
        (True, 8),
        (3, 8),
        (2.5, 8),
        ("abc", 3),
        ("ä€", 5),
        ("", 0),
        ([], 0),
        ({}, 0),
        (NOTHING, 0),
        (CrossEntropy(), 16),
        (torch.zeros(3, 4), 48),
        (torch.zeros(3, dtype=torch.uint8), 3),
        (torch.zeros(2, dtype=torch.bool), 2),
        (torch.zeros(5, dtype=torch.int64), 40),
        (torch.zeros(4, dtype=torch.bfloat16), 8),
        (torch.zeros(()), 4),
        (torch.zeros(0), 0),
        (torch.zeros(100)[:2], 8),
        (torch.zeros(1).expand(10), 40),
        ({"a": torch.zeros(2), "b": [1, "xy", None]}, 18),
        (Fit({"w": torch.zeros(6), "n": torch.zeros((), dtype=torch.int64)}, 10, 20, 0.5), 24 + 8 + 24),
        ([[torch.zeros(2)], {}], 8),
    ],
)
def test_payload_is_counted_without_framing(value: Any, expected: int) -> None:
    assert payload(value) == expected


def test_keys_are_free_of_charge() -> None:
    assert payload({"a long name": 1}) == payload({"a": 1})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_names_the_place(bad: float) -> None:
    tensor = torch.tensor([1.0, bad])
    assert not_finite(tensor) == "the value"
    assert not_finite(bad) == "the value"
    assert not_finite({"a": {"b": tensor}}) == "a.b"
    assert not_finite([0.5, tensor.double()]) == "[1]"
    assert not_finite([tensor.half(), bad]) == "[0]"
    assert not_finite(Fit({"w": torch.ones(2)}, 1, 1, bad)) == "loss"
    assert not_finite(Fit({"w": torch.ones(2), "v.x": tensor}, 1, 1, 0.0)) == "model.v.x"


def test_a_complex_number_that_is_not_finite_is_found() -> None:
    assert not_finite(torch.tensor([complex(0, math.nan)])) == "the value"


@pytest.mark.parametrize(
    "fine",
    [
        None,
        3,
        True,
        "nan",
        1e308,
        torch.ones(3),
        torch.zeros(0),
        torch.tensor([2**62]),
        [],
        State(note="inf"),
        torch.tensor([1e38]),
        torch.tensor([True]),
    ],
)
def test_what_is_finite_passes(fine: Any) -> None:
    assert not_finite(fine) is None


def test_a_copy_has_its_own_containers_and_the_same_tensors() -> None:
    tensor = torch.ones(2)
    value = State({"a": {"w": tensor}}, ["x"])
    copy = copied(value)
    assert copy is not value
    assert copy.models["a"]["w"] is tensor
    copy.models["a"]["v"] = copy.models["b"] = {}  # type: ignore[assignment]
    copy.order.append("y")
    assert value == State({"a": {"w": tensor}}, ["x"])


def test_copies_reach_into_lists_tuples_and_nested_dataclasses() -> None:
    value = [({"a": [1]}, State())]
    copy = copied(value)
    copy[0][0]["a"].append(2)
    copy[0][1].order.append("x")
    assert value == [({"a": [1]}, State())]
    assert type(copied((1, 2))) is tuple


def test_what_is_frozen_is_shared() -> None:
    frozen, fit = Frozen(("a",)), Fit({}, 1, 1, 0.0)
    assert copied(frozen) is frozen
    assert copied(fit) is fit
    assert copied("x") == "x"


def test_each_is_its_values() -> None:
    values = {"1": 2.0}
    marked: Any = each(values)
    assert marked == Each(values)
    assert replace(marked, values={"1": 3.0}) != marked
