"""Trees of values: walking, counting, checking and copying what travels."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedkeep.interface import Fit, each, pytree
from fedkeep.interface.codec import encode, to_structure
from fedkeep.interface.cohort import Each
from fedkeep.interface.pytree import (
    copy_containers,
    find_nonfinite,
    iter_instances,
    keystr,
    num_bytes,
    replace_tensors,
    stack_tensors,
    tree_leaves_with_path,
    tree_signature,
    tree_tensors,
)
from fedkeep.losses import ZERO_LOSS, CrossEntropy, Loss


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
    assert [(keystr(path), leaf) for path, leaf in tree_leaves_with_path(value)] == [
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
    for function in (tree_leaves_with_path, num_bytes, find_nonfinite):
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
        (ZERO_LOSS, 0),
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
        ("x\ud800", 4),  # half of a surrogate pair, which JSON from outside may hold
    ],
)
def test_bytes_are_counted_without_framing(value: Any, expected: int) -> None:
    assert num_bytes(value) == expected


def test_keys_are_free_of_charge() -> None:
    assert num_bytes({"a long name": 1}) == num_bytes({"a": 1})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_find_nonfinite_names_the_place(bad: float) -> None:
    tensor = torch.tensor([1.0, bad])
    assert find_nonfinite(tensor) == "the value"
    assert find_nonfinite(bad) == "the value"
    assert find_nonfinite({"a": {"b": tensor}}) == "a.b"
    assert find_nonfinite([0.5, tensor.double()]) == "[1]"
    often = {str(number): tensor for number in range(9)}
    assert find_nonfinite({"a": torch.ones(2), **often}) == "0"
    assert find_nonfinite([tensor.half(), bad]) == "[0]"
    assert find_nonfinite(Fit({"w": torch.ones(2)}, 1, 1, bad)) == "loss"
    assert find_nonfinite(Fit({"w": torch.ones(2), "v.x": tensor}, 1, 1, 0.0)) == "model.v.x"


def test_a_complex_number_that_is_not_finite_is_found() -> None:
    assert find_nonfinite(torch.tensor([complex(0, math.nan)])) == "the value"


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
    assert find_nonfinite(fine) is None


def test_a_copy_has_its_own_containers_and_the_same_tensors() -> None:
    tensor = torch.ones(2)
    value = State({"a": {"w": tensor}}, ["x"])
    copy = copy_containers(value)
    assert copy is not value
    assert copy.models["a"]["w"] is tensor
    copy.models["a"]["v"] = copy.models["b"] = {}  # type: ignore[assignment]
    copy.order.append("y")
    assert value == State({"a": {"w": tensor}}, ["x"])


def test_a_mapping_that_is_no_dict_is_shared() -> None:
    mapping = MappingProxyType({"a": [1]})
    assert copy_containers([mapping])[0] is mapping


def test_copies_reach_into_lists_tuples_and_nested_dataclasses() -> None:
    value = [({"a": [1]}, State())]
    copy = copy_containers(value)
    copy[0][0]["a"].append(2)
    copy[0][1].order.append("x")
    assert value == [({"a": [1]}, State())]
    assert type(copy_containers((1, 2))) is tuple


def test_what_is_frozen_is_shared() -> None:
    frozen, fit = Frozen(("a",)), Fit({}, 1, 1, 0.0)
    assert copy_containers(frozen) is frozen
    assert copy_containers(fit) is fit
    assert copy_containers("x") == "x"


def test_instances_come_the_outer_before_the_inner() -> None:
    inner = {"w": torch.ones(1)}
    fit, outer = Fit(inner, 1, 1, 0.0), {"a": [inner]}
    assert list(iter_instances([fit, object(), outer, 3], Mapping)) == [inner, outer, inner]
    assert list(iter_instances([outer, (fit,)], Fit)) == [fit]
    assert list(iter_instances(fit, Tensor)) == [], "leaves do not count"


# Losses that are trained as one


@dataclass(frozen=True, eq=False)
class Loss(Loss):
    per_example_fields: ClassVar[tuple[str, ...]] = ("rows",)

    rows: dict[str, Tensor]
    anchor: Tensor
    strength: Any = 1.0

    def __call__(self, student: Any, batches: Any) -> Tensor:
        raise NotImplementedError


def loss(rows: int, value: float = 0.0, strength: Any = 1.0) -> Loss:
    return CrossEntropy() + Loss({"a": torch.full((rows, 2), value)}, torch.full((3,), value), strength)


def test_tensors_are_found_and_replaced_in_order() -> None:
    one, new = loss(4), [torch.ones(1), torch.ones(2)]
    found = tree_tensors(one)
    assert [(tuple(tensor.shape), per_example) for tensor, per_example in found] == [((4, 2), True), ((3,), False)]
    other = replace_tensors(one, new)
    assert type(other) is type(one)
    assert [tensor for tensor, _ in tree_tensors(other)] == new
    assert all(a is b for (a, _), (b, _) in zip(tree_tensors(one), found, strict=True)), "the first is as it was"


def test_a_signature_is_all_but_numbers_in_tensors_and_the_length_of_columns() -> None:
    assert tree_signature(loss(4)) == tree_signature(loss(5, value=7.0))
    hash(tree_signature(loss(4)))
    others = [
        loss(4, strength=2.0),
        loss(4, strength=None),
        loss(4) + CrossEntropy(),
        Loss({"b": torch.zeros(4, 2)}, torch.zeros(3)),
        Loss({"a": torch.zeros(4, 3)}, torch.zeros(3)),
        Loss({"a": torch.zeros(4, 2)}, torch.zeros(2)),
        Loss({"a": torch.zeros(4, 2)}, torch.zeros(3, dtype=torch.float64)),
        Loss([torch.zeros(4, 2)], torch.zeros(3)),  # type: ignore[arg-type]
        Loss((torch.zeros(4, 2),), torch.zeros(3)),  # type: ignore[arg-type]
    ]
    signatures = [tree_signature(other) for other in [loss(4), Loss({"a": torch.zeros(4, 2)}, torch.zeros(3)), *others]]
    assert len(set(signatures)) == len(signatures)


def test_what_cannot_be_compared_is_unlike_anything() -> None:
    assert tree_signature(loss(1, strength=bytearray())) != tree_signature(loss(1, strength=bytearray()))
    one, other = Loss({}, torch.ones(1)), Loss({}, torch.ones(1))
    assert tree_signature(one) == tree_signature(other)
    object.__setattr__(one, "hidden", 1)
    assert tree_signature(one) != tree_signature(other)
    assert tree_signature(one) != tree_signature(one)


def test_stacked_columns_are_filled_up_to_the_longest() -> None:
    rows, anchors = stack_tensors([loss(1, 1.0), loss(3, 2.0)])
    assert rows[:, :, 0].tolist() == [[1, 0, 0], [2, 2, 2]]
    assert anchors.tolist() == [[1, 1, 1], [2, 2, 2]]


def test_each_is_its_values() -> None:
    values = {"1": 2.0}
    marked: Any = each(values)
    assert marked == Each(values)
    assert replace(marked, values={"1": 3.0}) != marked


@pytest.mark.parametrize(
    "walk",
    [num_bytes, find_nonfinite, copy_containers, tree_signature, encode, lambda tree: to_structure(tree)[0]],
    ids=["num_bytes", "find_nonfinite", "copy_containers", "tree_signature", "encode", "to_structure"],
)
def test_a_walk_keeps_no_tensor_in_memory(walk: Callable[[Any], Any]) -> None:
    """Models of a round would wait for Python's search for cycles, and memory would grow with the cohort."""
    tree = {"models": [{"weight": torch.ones(3)}]}
    reference = weakref.ref(tree["models"][0]["weight"])
    gc.disable()
    try:
        walk(tree)
        del tree
        assert reference() is None
    finally:
        gc.enable()


def test_a_tensor_that_a_message_names_often_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes name it once more, and a look at it takes as long as it is large."""
    looks: list[int] = []
    monkeypatch.setattr(pytree, "all_finite", lambda tensors: looks.append(len(tensors)) or True)
    assert find_nonfinite(dict.fromkeys(map(str, range(1000)), torch.ones(2))) is None
    assert looks == [1]
