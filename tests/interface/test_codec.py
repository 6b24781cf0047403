"""The codec: everything that may travel survives it, and nothing else comes out of it."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from fedkeep.errors import ValueRefused
from fedkeep.interface import Fit, NoState
from fedkeep.interface.codec import decode, encode, from_structure
from fedkeep.losses import ZERO_LOSS, CrossEntropy, Distillation, Loss, PerTeacher, Sum
from fedkeep.models import Weights

T = TypeVar("T")


@dataclass
class Inner:
    number: int = 0
    text: str | None = None


@dataclass
class Outer:
    tensor: Tensor
    inner: Inner = field(default_factory=Inner)
    many: list[Inner] = field(default_factory=list)
    by_name: dict[str, tuple[float, bool]] = field(default_factory=dict)
    kind: Literal["a", "b"] = "a"
    rest: tuple[int, ...] = ()


@dataclass
class Box(Generic[T]):
    content: int


@dataclass(frozen=True, eq=False)
class Weighed(Fit):
    weight: float = 1.0


class Trap:
    """A class that no annotation names; it must never be made."""

    def __init__(self, **anything: Any) -> None:
        raise AssertionError("constructed")


@dataclass
class TrapData:
    number: int = 0

    def __post_init__(self) -> None:
        if self.number == 666:
            raise AssertionError("constructed")


def same(a: Any, b: Any) -> bool:
    """Equality of values, tensors by type, shape and bits, NaN equal to itself."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and tiny.bits(a) == tiny.bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


def message(structure: Any, **tensors: Tensor) -> bytes:
    """Return a message as `encode` writes it, with any structure."""
    text = structure if isinstance(structure, bytes) else json.dumps(structure).encode()
    return save({**tensors, "structure": torch.tensor(list(text), dtype=torch.uint8)})


# Round trips

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
texts = st.text(max_size=5)
floats = st.floats(width=64)
integers = st.integers(-(2**80), 2**80)
tensors = st.builds(
    lambda shape, dtype, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
inners = st.builds(Inner, integers, st.none() | texts)

HINTS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, integers),
    (float, floats),
    (bool, st.booleans()),
    (str, texts),
    (Tensor, tensors),
    (None, st.none()),
    (int | None, st.none() | integers),
    (str | Tensor | list[int], texts | tensors | st.lists(integers)),
    (Literal["x", 3, None], st.sampled_from(["x", 3, None])),
    (list[float], st.lists(floats)),
    (list[list[str]], st.lists(st.lists(texts))),
    (tuple[int, str], st.tuples(integers, texts)),
    (tuple[float, ...], st.lists(floats).map(tuple)),
    (tuple[()], st.just(())),
    (dict[str, Tensor], st.dictionaries(texts, tensors)),
    (dict[int, list[bool]], st.dictionaries(integers, st.lists(st.booleans()))),
    (dict[bool, str], st.dictionaries(st.booleans(), texts)),
    (dict[str, dict[str, float | None]], st.dictionaries(texts, st.dictionaries(texts, floats | st.none()))),
    (Inner, inners),
    (
        Outer,
        st.builds(
            Outer,
            tensors,
            inners,
            st.lists(inners, max_size=2),
            st.dictionaries(texts, st.tuples(floats, st.booleans())),
            st.sampled_from(["a", "b"]),
            st.lists(integers).map(tuple),
        ),
    ),
    (Box[int], st.builds(Box, integers)),
    (NoState, st.just(NoState())),
    (Fit, st.builds(Fit, st.dictionaries(texts, tensors, max_size=2), integers, integers, floats)),
    (Fit, st.builds(Weighed, st.dictionaries(texts, tensors, max_size=2), integers, integers, floats, floats)),
]


@pytest.mark.parametrize(("hint", "strategy"), HINTS, ids=[str(hint) for hint, _ in HINTS])
def test_round_trip(hint: Any, strategy: st.SearchStrategy[Any]) -> None:
    @settings(max_examples=25, deadline=None, database=None)
    @given(strategy)
    def check(value: Any) -> None:
        blob = encode(value)
        again = decode(blob, hint)
        assert same(again, value), (value, again)
        assert encode(again) == blob, "one value, one encoding"

    check()


def test_an_int_given_for_a_float_comes_back_as_a_float() -> None:
    assert same(decode(encode(3), float), 3.0)
    assert same(decode(encode([1, 2.5]), list[float]), [1.0, 2.5])


def test_abstract_containers_and_type_variables() -> None:
    assert decode(encode([1, 2]), Sequence[int]) == [1, 2]
    assert same(decode(encode({"w": torch.ones(2)}), Weights), {"w": torch.ones(2)})
    bound = TypeVar("bound", bound=Inner)
    assert decode(encode(Inner(4)), bound) == Inner(4)


@pytest.mark.parametrize(
    "objective",
    [
        ZERO_LOSS,
        CrossEntropy(dataset_index=1),
        CrossEntropy()
        + Distillation(
            ({"w": torch.ones(2)}, {"w": torch.zeros(2)}), PerTeacher(torch.ones(2), torch.zeros(2)), 2.0, "none"
        ),
        Sum(
            (
                CrossEntropy(),
                CrossEntropy(dataset_index=1),
                Distillation((), PerTeacher(torch.zeros(0), torch.zeros(0))),
            )
        ),
    ],
)
def test_objectives_travel_as_values(objective: Loss) -> None:
    again = decode(encode(objective), Loss)
    assert same(again, objective)


def test_a_tensor_that_occurs_twice_travels_once() -> None:
    tensor = torch.randn(1000)
    blob = encode([tensor, tensor, {"again": tensor}][:2])
    assert len(blob) < 6000
    first, second = decode(blob, list[Tensor])
    assert first is second


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.detach(),
        lambda t: t.view(2, 6),
        lambda t: t.t(),
        lambda t: t[:2],
        lambda t: t.flatten()[3:],
        lambda t: t[:0],
        lambda t: t.view(torch.int32),
    ],
)
def test_views_of_one_storage_travel_together(view: Any) -> None:
    tensor = torch.randn(3, 4)
    value = [tensor, view(tensor)]
    assert same(decode(encode(value), list[Tensor]), value)


def test_only_the_part_that_is_seen_travels() -> None:
    assert len(encode(torch.zeros(100_000)[:3])) < 500
    assert same(decode(encode(torch.zeros(1).expand(3)), Tensor), torch.zeros(3))


def test_a_parameter_travels_without_its_gradient() -> None:
    value = torch.ones(2, requires_grad=True)
    assert not decode(encode(value), Tensor).requires_grad


@pytest.mark.parametrize(
    "value", [{1, 2}, b"x", object(), [torch.nn.Linear(1, 1)], Inner, 1j, {(1, 2): 3}, {torch.ones(1): 2}]
)
def test_what_is_no_value_is_not_encoded(value: Any) -> None:
    with pytest.raises(TypeError):
        encode(value)


# Refusals

INNER = f"{Inner.__module__}.{Inner.__qualname__}"

BAD: list[tuple[Any, Any]] = [
    (1, str),
    ("1", int),
    (1.0, int),
    (True, int),
    (1, bool),
    (0, bool),
    (True, float),
    ("x", float),
    (None, int),
    (1, None),
    ("nan", float),
    ([1], int),
    (1, list[int]),
    ({"a": 1}, list[int]),
    ([1], dict[str, int]),
    ((1, 2), tuple[int]),
    ((1,), tuple[int, int]),
    ((), tuple[int]),
    ((1, "x"), tuple[int, ...]),
    ([1, "x"], list[int]),
    ({1: 1}, dict[str, int]),
    ({"a": "b"}, dict[str, int]),
    ("c", Literal["a", "b"]),
    (1, Literal["1"]),
    ({"a": 1}, Inner),
    (True, Literal[1]),
    (1.0, Literal[1]),
    (torch.ones(1), float),
    (1.0, Tensor),
    ("0", Tensor),
    (Inner(), Outer),
    (Inner(), Fit),
    (Fit({}, 1, 1, 0.0), Weighed),
    (CrossEntropy(), Inner),
    (Inner(), Loss),
    (Inner(number="x"), Inner),
    (Outer(3), Outer),
    (Inner(), int | str | None),
    (NoState(), dict[str, int]),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("value", "hint"), BAD)
def test_the_wrong_type_is_refused(value: Any, hint: Any) -> None:
    with pytest.raises(ValueRefused):
        decode(encode(value), hint)


def test_a_refusal_says_where() -> None:
    with pytest.raises(ValueRefused, match=r"the value\.many\[1\]\.number is of type str, not int"):
        decode(encode(Outer(torch.ones(1), many=[Inner(), Inner("x")])), Outer)  # type: ignore[arg-type]
    with pytest.raises(ValueRefused, match=r"the value\.a\[0\] has 3 items instead of 2"):
        decode(encode({"a": [(1, 2, 3)]}), dict[str, list[tuple[int, int]]])


def test_a_refusal_shows_the_beginning_of_a_long_name() -> None:
    """Of each item of a list below it the place is written down, so that its length would count as often."""
    with pytest.raises(ValueRefused, match=r"^the value\.x{80}\[0\] is of type str") as refusal:
        from_structure({"dict": [["x" * 1000, {"list": ["text"]}]]}, {}, dict[str, list[int]])
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    ("structure", "reported"),
    [
        ({"class": "Trap", "fields": {}}, "'Trap' where Inner is expected"),
        ({"class": "TrapData", "fields": {"number": 666}}, "'TrapData' where Inner is expected"),
        ({"class": "Outer", "fields": {}}, "'Outer' where Inner"),
        ({"class": "object", "fields": {}}, "'object' where Inner"),
        ({"class": "tests.Inner", "fields": {"number": 1, "text": None}}, "where Inner"),
        ({"class": ["Inner"], "fields": {}}, "where Inner"),
        ({"class": "Inner", "fields": []}, "where Inner"),
        ({"class": "Inner"}, "where Inner"),
        ({"class": INNER, "fields": {"number": 1}}, "has the fields"),
        ({"class": INNER, "fields": {"number": 1, "text": None, "more": 2}}, "has the fields"),
        ({"class": INNER, "fields": {"number": 1, "txet": None}}, "has the fields"),
    ],
)
def test_only_what_the_annotation_names_is_constructed(structure: Any, reported: str) -> None:
    with pytest.raises(ValueRefused, match=reported):
        decode(message(structure), Inner)


@pytest.mark.parametrize(
    ("structure", "hint"),
    [
        ({"tensor": "9"}, Tensor),
        ({"tensor": []}, Tensor),
        ({"tensor": {}}, Tensor),
        ({"tensor": None}, Tensor),
        ({"tensor": 0}, Tensor),
        ({"dict": [[1, 2, 3]]}, dict[int, int]),
        ({"dict": [1]}, dict[int, int]),
        ({"dict": ["ab"]}, dict[int, int]),
        ({"dict": {}}, dict[int, int]),
        ({"dict": [[{"list": [1]}, 2]]}, dict[list[int], int]),
        ({"list": 3}, list[int]),
        ({"list": {"a": 1}}, list[int]),
        ({"tuple": None}, tuple[int, ...]),
        ({"float": "1.0"}, float),
        ({"float": []}, float),
        (10**400, float),
        ({"class": "Objective", "fields": {}}, Loss),
        ({"class": "WeightRule", "fields": {}}, Loss),
        ([], Any),
        ([], int),
        ([1], list[int]),
        ({}, dict[str, int]),
        ({"class": "Inner", "fields": {}}, Any),
        ({"class": "Inner", "fields": {}}, object),
    ],
)
def test_malformed_structures_are_refused(structure: Any, hint: Any) -> None:
    with pytest.raises(ValueRefused):
        decode(message(structure), hint)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\0",
        b"not safetensors at all, but long enough to have a header",
        b"\xff" * 64,
        message(b""),
        message(b"{"),
        message(b"\xff"),
        message(b"[" * 100_000),
        message(b"1" * 5000),
        save({}),
        save({"0": torch.ones(1)}),
        save({"structure": torch.zeros(3)}),
        save({"structure": torch.tensor(3)}),
        save({"structure": torch.tensor(10**15)}),
        save({"structure": torch.zeros(2, 2, dtype=torch.uint8)}),
        save({"structure": torch.full((3,), 300)}),
    ],
    ids=lambda blob: str(len(blob)),
)
def test_damaged_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(ValueRefused, match="damaged"):
        decode(blob, int)


def test_a_message_cut_at_any_length_is_refused() -> None:
    blob = encode({"a": torch.arange(3), "b": [1, "x"]})
    hint = dict[str, Tensor | list[int | str]]
    decode(blob, hint)
    for length in range(len(blob)):
        with pytest.raises(ValueRefused):
            decode(blob[:length], hint)


@settings(max_examples=300, deadline=None, database=None)
@given(st.data())
def test_flipped_bytes_are_refused_or_decode_to_the_same_type(data: st.DataObject) -> None:
    blob = bytearray(encode({"a": torch.arange(3), "b": [1, "x"], "c": [Inner(2, "y")]}))
    for location in data.draw(st.lists(st.integers(0, len(blob) - 1), min_size=1, max_size=3)):
        blob[location] = data.draw(st.integers(0, 255))
    try:
        value = decode(bytes(blob), dict[str, Tensor | list[int | str | Inner]])
    except ValueRefused:
        return
    assert isinstance(value, dict)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["0", "Inner", "x", "nan"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tensor", "list", "tuple", "dict", "class", "fields", "float", "number", "text"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None, database=None)
@given(
    json_values,
    st.sampled_from(
        [int, float, Tensor, list[Inner], dict[str, Inner], tuple[int, str], Inner, Outer, Loss, int | None]
    ),
)
def test_any_structure_is_refused_or_fits_its_annotation(structure: Any, hint: Any) -> None:
    try:
        value = decode(message(structure, **{"0": torch.ones(1)}), hint)
    except ValueRefused:
        return
    origin = typing.get_origin(hint) or hint
    if origin not in (typing.Union, type(int | None)):
        assert isinstance(value, origin)


def test_two_classes_of_one_name_are_not_mixed_up() -> None:
    """Of two subclasses called alike, decoding must not quietly make the other one."""

    @dataclass(frozen=True, eq=False)
    class Twin(Fit):
        extra: int = 1

    class Elsewhere:
        @dataclass(frozen=True, eq=False)
        class Twin(Fit):
            extra: int = 2

    for cls in (Twin, Elsewhere.Twin):
        assert type(decode(encode(cls({}, 1, 1, 0.0)), Fit)) is cls


def test_the_package_never_pickles_in_the_codec() -> None:
    import fedkeep.interface.codec as codec

    assert "pickle" not in Path(codec.__file__).read_text().replace("Never pickle", "")


def test_tensors_land_on_the_device_asked_for() -> None:
    assert decode(encode(torch.ones(1)), Tensor, torch.device("meta")).device.type == "meta"
