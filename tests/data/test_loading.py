"""Loading: local Parquet, image folders, names, and what is said when it fails."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_sources import encoded, image, own_folders, parquet, pyarrow, write, write_femnist, write_mnist

from fedkeep.data import DataSet
from fedkeep.data.catalog import CATALOG, is_known, known_datasets
from fedkeep.data.loading import load
from fedkeep.errors import DataError, MissingExtra

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared copies of the data sets are not here")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    dataset, digits = load("digits"), load_digits()
    pixels = {tuple(image) for image in (torch.from_numpy(digits.data) * (255 / 16)).round().int().tolist()}
    inputs = torch.cat([dataset.train["input"], dataset.test["input"]]).flatten(1).int()
    assert {tuple(image) for image in inputs.tolist()} == pixels
    labels = torch.cat([dataset.train["label"], dataset.test["label"]])
    assert labels.bincount().tolist() == np.bincount(digits.target).tolist()


# --- local Parquet -------------------------------------------------------------------------------------------------


def test_known_set_from_parquet_keeps_the_classes_that_occur(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path, train=(7, 2, 2, 9), test=(9, 7))
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path))
    dataset = load("mnist")
    assert dataset.name == "mnist"
    assert dataset.label_names == ("number 2", "number 7", "number 9")
    assert dataset.train["label"].tolist() == [1, 0, 0, 2]
    assert dataset.test["label"].tolist() == [2, 1]
    assert dataset.train["input"].dtype == torch.uint8
    assert dataset.train["input"][:, 0, 0, 0].tolist() == [70, 21, 22, 93]
    assert dataset.mean == (0.1307,)
    assert "3 of the 10 declared classes" in dataset.note


def test_what_is_known_is_known_by_name_by_hub_id_and_together() -> None:
    for name, known in {"digits": True, "ylecun/mnist": True, "mnist + cifar10": True, "mnist+photos": False}.items():
        assert is_known(name) is known


def test_a_known_set_with_more_classes_than_it_has_is_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        rows = {"image": [image(i) for i in range(12)], "label": [*range(11), 77]}
        write(tmp_path / "ylecun" / "mnist" / f"{split}.parquet", rows, {})
    with pytest.raises(DataError, match=r"MNIST has 10 classes, but this copy has 12: 0, 1.*77.*Correct its labels"):
        load("mnist", data_dir=tmp_path)


def test_hub_id_of_a_known_set_and_the_argument_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path / "right")
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path / "wrong"))
    assert load("ylecun/mnist", data_dir=tmp_path / "right").name == "mnist"
    with pytest.raises(DataError, match=r"FEDKEEP_DATA is .*wrong, which is no folder"):
        load("mnist")


def test_any_hub_id_below_the_data_folder_in_shards(tmp_path: Path) -> None:
    location = tmp_path / "someone" / "shapes" / "data"
    for shard, labels in enumerate(([0, 1], [1, 0, 1])):
        rows = {"picture": [image(i, mode="RGB") for i in labels], "kind": labels}
        write(location / f"train-0000{shard}-of-00002.parquet", rows, {"kind": ["round", "square"]})
    rows = {"picture": [image(5), image(6)], "kind": [1, 0]}
    write(location / "validation-00000-of-00001.parquet", rows, {"kind": ["round", "square"]})
    dataset = load("someone/shapes", data_dir=tmp_path)
    assert dataset.train["label"].tolist() == [0, 1, 1, 0, 1]
    assert dataset.shape == (3, 4, 4)  # greyscale test images were converted
    assert dataset.test["input"][0, :, 0, 0].tolist() == [5, 5, 5]
    assert "'validation' is the test set" in dataset.note


def test_folders_may_have_any_name_and_files_may_be_links(tmp_path: Path) -> None:
    """A copy of a Hub repository in the Hub's own cache is made of links."""
    location = write_mnist(tmp_path / "store")
    folder = tmp_path / "a [b] * {c}"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.parquet").symlink_to(location / f"{split}.parquet")
    assert (
        load(str(folder)).train["input"].tolist() == load("mnist", data_dir=tmp_path / "store").train["input"].tolist()
    )


def test_shards_with_other_columns_or_broken_are_refused(tmp_path: Path) -> None:
    classes = {"label": ["a", "b"]}
    write(tmp_path / "train-0.parquet", {"image": [image(i) for i in range(4)], "label": [0, 1, 0, 1]}, classes)
    write(tmp_path / "train-1.parquet", {"picture": [image(i) for i in range(4)], "label": [0, 1, 0, 1]}, classes)
    with pytest.raises(DataError, match=r"train-1.parquet has no column 'image', which .*train-0.parquet has"):
        load(str(tmp_path))
    (tmp_path / "train-1.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"train-1.parquet cannot be read as Parquet .*Copy it again"):
        load(str(tmp_path))


def test_plain_parquet_without_metadata(tmp_path: Path) -> None:
    table = pyarrow.table({"image": [encoded(i) for i in range(20)], "label": ["cat", "dog"] * 10})
    parquet.write_table(table, tmp_path / "train.parquet")
    dataset = load(str(tmp_path))
    assert dataset.label_names == ("cat", "dog")
    assert (len(dataset.train["label"]), len(dataset.test["label"])) == (16, 4)
    assert "20% of each class held out" in dataset.note


def test_femnist_writers_are_numbered_alike_in_both_splits(tmp_path: Path) -> None:
    write_femnist(tmp_path, {"train": 62, "test": 4})
    dataset = load("femnist", data_dir=tmp_path)
    assert dataset.train["writer"][:4].tolist() == [1, 0, 2, 1]
    assert dataset.test["writer"].tolist() == [1, 0, 2, 1]
    assert dataset.num_classes == 62


def test_femnist_without_test_is_split_inside_each_writer(tmp_path: Path) -> None:
    write_femnist(tmp_path, {"train": 300})
    dataset = load("femnist", data_dir=tmp_path)
    assert dataset.train["writer"].bincount().tolist() == [90, 90, 90]
    assert dataset.test["writer"].bincount().tolist() == [10, 10, 10]
    assert "10% of each writer held out" in dataset.note


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"images": [image(1), image(2)], "label": [0, 1]}, "'image' is missing. Did you mean 'images'"),
        ({"image": [image(1), image(2)], "label": [0, 11]}, "row 1 has 'label' = 11, but 10 declared"),
        ({"image": [image(1), image(2)], "label": [0, -1]}, "hides its labels"),
        ({"image": [image(1), image(2)], "label": [0, None]}, "row 1 has no 'label'"),
        (
            {"image": [image(1), image(2, (4, 5))], "label": [0, 1]},
            "row 1 of 4 x 5 pixels differs in size from the first image, of 4 x 4 pixels. Let all be resized",
        ),
        ({"image": [image(1), {"bytes": b"no", "path": None}], "label": [0, 1]}, "row 1 is not an image"),
        ({"image": [image(1), {"bytes": None, "path": None}], "label": [0, 1]}, "row 1 has no image"),
        ({"image": [image(1), image(900, mode="I;16")], "label": [0, 1]}, "more than 8 bits"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, columns: dict[str, Any], says: str) -> None:
    location = write_mnist(tmp_path)
    write(location / "train.parquet", columns, {"label": [f"number {i}" for i in range(10)]})
    with pytest.raises(DataError) as caught:
        load("mnist", data_dir=tmp_path)
    assert says in str(caught.value)


def test_broken_and_missing_files(tmp_path: Path) -> None:
    location = write_mnist(tmp_path)
    (location / "test.parquet").unlink()
    with pytest.raises(DataError, match=r"no test\.parquet"):
        load("mnist", data_dir=tmp_path)
    (location / "test.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load("mnist", data_dir=tmp_path)


# --- folders of images ---------------------------------------------------------------------------------------------


def write_folder(root: Path, sizes: Mapping[str, int], **options: Any) -> None:
    for location, (name, count) in enumerate(sizes.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            (root / name / f"{i:03}.png").write_bytes(encoded(40 * location + i, **options))


def test_folder_with_train_and_test(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 3, "ant": 2, ".hidden": 1})
    write_folder(tmp_path / "val", {"cat": 1, "bee": 2})
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    dataset = load(str(tmp_path))
    assert dataset.label_names == ("ant", "bee", "cat")
    assert dataset.train["label"].tolist() == [0, 0, 2, 2, 2]
    assert dataset.test["label"].tolist() == [1, 1, 2]
    assert dataset.train["input"][:, 0, 0, 0].tolist() == [40, 41, 0, 1, 2]
    assert dataset.name == tmp_path.name


def test_folder_of_classes_alone_is_split_by_class_always_alike(tmp_path: Path) -> None:
    write_folder(tmp_path / "mine", {"a": 10, "b": 20})
    first = load("mine", data_dir=tmp_path)
    (tmp_path / "cache").rename(tmp_path / "old cache")
    again = load(str(tmp_path / "mine"))
    assert first.test["label"].bincount().tolist() == [2, 4]
    assert torch.equal(first.test["input"], again.test["input"])


def test_folder_mixing_grey_and_colour_becomes_colour(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 10})
    write_folder(tmp_path, {"b": 10}, mode="RGB")
    dataset = load(str(tmp_path))
    assert dataset.shape == (3, 4, 4)
    grey, colour = (dataset.train["input"][dataset.train["label"] == label] for label in (0, 1))
    assert torch.equal(grey[:, 0], grey[:, 2])
    assert int(colour[:, 2].min()) == 255


def test_classes_come_in_the_order_of_their_names_also_where_one_begins_like_another(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat-2": 5, "cat": 5})  # as paths, "cat-2/" sorts before "cat/"
    dataset = load(str(tmp_path))
    assert dataset.label_names == ("cat", "cat-2")
    assert dataset.train["input"][:, 0, 0, 0].tolist() == [
        v for v in (*range(40, 45), *range(5)) if v in pixels(dataset)
    ]


def pixels(dataset: DataSet) -> list[int]:
    return [int(value) for value in dataset.train["input"][:, 0, 0, 0]]


def test_folder_with_mixed_sizes_or_nothing(tmp_path: Path) -> None:
    write_folder(tmp_path / "mixed", {"a": 10})
    write_folder(tmp_path / "mixed", {"b": 10}, size=(6, 4))
    with pytest.raises(DataError, match=r"(?s)000\.png\) of 6 x 4 pixels.*data\.size = \[4, 4\]"):
        load(str(tmp_path / "mixed"))
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"train/CLASS/\*\.png"):
        load(str(tmp_path / "empty"))


# --- names ---------------------------------------------------------------------------------------------------------


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(DataError, match="Did you mean 'fashion-mnist'"):
        load("Fashion_MNIST")


def test_missing_packages_get_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtra, match=r"pip install .*pillow"):
        load("mnist", data_dir=tmp_path)


def test_known_says_what_is_here(tmp_path: Path) -> None:
    location = write_mnist(tmp_path, train=(0, 1, 1))
    found = known_datasets(tmp_path)
    assert set(found) == set(CATALOG)
    assert found["mnist"].location == str(location)
    assert found["mnist"].num_local_classes == 2
    assert found["cifar10"].location == ""
    assert found["cifar10"].num_local_classes is None
    assert found["digits"].location
    assert found["femnist-digits"].location == "", "femnist, which it is made from, is not here"
    (location / "test.parquet").unlink()
    assert known_datasets(tmp_path)["mnist"].damage == "there is no test.parquet"
    (location / "train.parquet").write_bytes(b"broken")
    broken = known_datasets(tmp_path)["mnist"]
    assert broken.num_local_classes is None
    assert "parquet" in broken.damage


@pytest.mark.parametrize("entry", CATALOG.values(), ids=lambda entry: entry.name)
def test_known_entries_fit_together(entry: Any) -> None:
    assert entry.hub or entry.folder or entry.location or entry.made_from, "where it comes from"
    if entry.normalisation is not None:
        assert [len(constants) for constants in entry.normalisation] == [entry.shape[0]] * 2
    assert entry.schema.channels == entry.shape[0]


@shared
@pytest.mark.parametrize(
    ("name", "shape", "classes", "rows"),
    [
        ("femnist", (1, 28, 28), 62, (14708, 1685)),
        ("ham10000", (3, 32, 32), 7, (8070, 1945)),
        ("emnist-letters-a-to-j", (1, 28, 28), 10, (6000, 2000)),
        ("tiny-imagenet", (3, 64, 64), 12, (6000, 600)),
    ],
)
def test_shared_copies(name: str, shape: tuple[int, ...], classes: int, rows: tuple[int, int]) -> None:
    dataset = load(name, data_dir=SHARED)
    assert dataset.shape == shape
    assert dataset.num_classes == classes
    assert (len(dataset.train["label"]), len(dataset.test["label"])) == rows
    if name == "femnist":
        assert int(dataset.train["writer"].max()) == 104
    if name == "ham10000":  # what was computed when the copy was made
        assert dataset.mean == pytest.approx((0.7634, 0.5381, 0.5611), abs=1e-4)
        assert dataset.std == pytest.approx((0.1367, 0.1574, 0.1750), abs=1e-4)
        assert "balanced accuracy" in dataset.note


@shared
def test_pixels_agree_with_datasets(tmp_path: Path) -> None:
    library = pytest.importorskip("datasets")
    files = {split: str(SHARED / "emnist_letters_a_to_j" / f"{split}.parquet") for split in ("test",)}
    theirs = library.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path))["test"]
    mine = load("emnist-letters-a-to-j", data_dir=SHARED).test
    assert theirs["label"][:] == mine["label"].tolist()
    for row in range(0, 2000, 97):
        assert np.array_equal(np.asarray(theirs[row]["image"]), mine["input"][row, 0].numpy())
