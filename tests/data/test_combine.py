"""Data sets made of others, and letters made to look like others."""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from small_sources import own_folders, write_femnist, write_mnist

from fedkeep.data.catalog import CATALOG
from fedkeep.data.combine import concatenate, select_classes, shared_classes, to_emnist_style
from fedkeep.data.holdout import HELD_OUT, with_held_out
from fedkeep.data.loading import load
from fedkeep.errors import DataError


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)


def test_several_sets_are_one() -> None:
    first, second = tiny.dataset(12, 6), replace(tiny.dataset(9, 3, seed=1), name="other", note="Not the whole.")
    whole = concatenate([first, second])
    assert whole.name == "tiny+other"
    assert whole.label_names == ("tiny: a", "tiny: b", "tiny: c", "other: a", "other: b", "other: c")
    assert torch.equal(whole.train["input"], torch.cat((first.train["input"], second.train["input"])))
    assert whole.train["label"].tolist() == [*first.train["label"].tolist(), *(second.train["label"] + 3).tolist()]
    assert len(whole.test["label"]) == 9
    assert whole.note == "other: Not the whole."
    pixels = whole.train["input"].double() / 255
    assert whole.mean == pytest.approx((float(pixels.mean()),))
    assert whole.std == pytest.approx((float(pixels.std(correction=0)),))


def test_what_cannot_be_joined() -> None:
    small = tiny.dataset()
    large = {name: torch.zeros(6, 1, 5, 5, dtype=torch.uint8) if name == "input" else column[:6]
             for name, column in small.train.items()}  # fmt: skip
    with pytest.raises(DataError, match=r"big cannot be joined to tiny: its images are 1 x 5 x 5, not 1 x 4 x 4"):
        concatenate([small, replace(small, name="big", train=large, test=large)])
    floats = {**small.train, "input": small.train["input"].float()}
    with pytest.raises(DataError, match="its inputs are not uint8 images"):
        concatenate([small, replace(small, train=floats, test=floats, mean=(), std=())])
    train, test = ({**half, "group": half["label"]} for half in (small.train, small.test))
    patients = replace(small, train=train, test=test, name="patients")
    with pytest.raises(DataError, match=r"patients cannot be joined to others: data\.group is of one data set alone"):
        concatenate([small, patients])
    with pytest.raises(DataError, match="two classes have the same name"):
        concatenate([small, small])


def test_a_name_with_plus_loads_both(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=(7, 2, 2, 9), test=(9, 7))
    (tmp_path / "one+two").mkdir()  # a folder of that name comes first
    with pytest.raises(DataError, match="has no images"):
        load("one+two", data_dir=tmp_path)
    with pytest.raises(DataError, match="two classes have the same name"):
        load("mnist+mnist", data_dir=tmp_path)
    with pytest.raises(DataError, match="digits cannot be joined to mnist: its images are 1 x 8 x 8"):
        load("mnist+digits", data_dir=tmp_path)
    with pytest.raises(DataError, match="There is no data set 'mnits'"):
        load("mnist+mnits", data_dir=tmp_path)


def test_some_classes_of_a_set() -> None:
    data = tiny.dataset(12, 6)
    some = select_classes(data, ["c", "a"])
    assert some.label_names == ("c", "a")
    assert some.train["label"].tolist() == [1] * 4 + [0] * 4
    assert torch.equal(some.train["input"], data.train["input"][data.train["label"] != 1])
    with pytest.raises(DataError, match="tiny has no class 'd' in this copy"):
        select_classes(data, ["a", "d"])


LEAF = string.digits + string.ascii_uppercase + string.ascii_lowercase


@pytest.mark.parametrize(
    ("name", "classes", "first"),
    [("femnist-digits", string.digits, 0), ("femnist-alphabet", string.ascii_uppercase, 10)],
)
def test_what_else_femnist_may_mean(name: str, classes: str, first: int, tmp_path: Path) -> None:
    """LEAF numbers digits, capitals and small letters in this order; both cases of a letter are one class."""
    write_femnist(tmp_path, {"train": 124, "test": 62}, characters=LEAF)
    whole, part = load("femnist", data_dir=tmp_path), load(name, data_dir=tmp_path)
    assert part.name == name
    assert part.label_names == tuple(classes)
    for half, chosen in ((whole.train, part.train), (whole.test, part.test)):
        kept = [row for row, label in enumerate(half["label"].tolist()) if LEAF[label].upper() in classes]
        assert len(kept) == len(half["label"]) // 62 * (10 if first == 0 else 52)
        named = [LEAF[int(half["label"][row])].upper() for row in kept]
        assert [classes[label] for label in chosen["label"].tolist()] == named
        for column in ("input", "writer"):
            assert torch.equal(chosen[column], half[column][kept]), "the rest of a row goes with it"
    assert CATALOG[name].num_classes == len(classes)
    assert (part.mean, part.std) == (whole.mean, whole.std)


def test_letters_as_emnist_has_them() -> None:
    paper = torch.full((3, 1, 28, 28), 255, dtype=torch.uint8)
    paper[0, 0, 3:14, 2:4] = 0  # a thin stroke of 11 x 2 pixels in a corner
    paper[1, 0, 20:25, 10:20] = 60
    letters = to_emnist_style(paper)
    assert letters.dtype == torch.uint8
    assert letters.shape == paper.shape
    rows, columns = ((letters[0, 0] > 127).any(axis).nonzero().flatten() for axis in (1, 0))
    assert (rows[0], rows[-1]) == (3, 24)  # 22 pixels high, in the middle
    assert (columns[0], columns[-1]) == (12, 15)
    rows, columns = ((letters[1, 0] > 90).any(axis).nonzero().flatten() for axis in (1, 0))
    assert (columns[0], columns[-1]) == (3, 24)
    assert (rows[0], rows[-1]) == (8, 18)
    assert not letters[2].any()


def test_classes_are_known_by_their_own_names() -> None:
    ours, theirs = ("mnist: 3", "aquarium_fish", "K"), ("Aquarium Fish", "emnist: 3", "x: k", "L")
    assert shared_classes(ours, theirs) == {"mnist: 3": "emnist: 3", "aquarium_fish": "Aquarium Fish", "K": "x: k"}
    assert shared_classes(ours, ()) == {}


def test_official_test_examples_are_given_to_no_client_where_another_set_held_its_own_out() -> None:
    official, own = tiny.dataset(12, 6), replace(tiny.dataset(9, 3, seed=1), name="other", test_held_out=True)
    own = replace(own, note=f"{HELD_OUT.format('20% of each class')}")
    mixed = with_held_out(concatenate([official, own]))
    assert len(mixed.train["label"]) == 21
    assert mixed.test_held_out, "whoever counts training rows must know"
    both = concatenate([replace(official, test_held_out=True, note=own.note), own])
    assert len(with_held_out(both).train["label"]) == 30
    assert with_held_out(both).note == "", "neither a note nor the name of a set without one is left"
    named = [replace(own, name="my data.csv"), replace(own, name="b.v2", note=f"It is old. {own.note}")]
    assert with_held_out(concatenate(named)).note == "b.v2: It is old."
    assert concatenate([concatenate([official, own]), named[0]]).test_held_out == "partly"
