"""A user's own files: tables, text, arrays, photos of any size, a column or a file for each client."""

from __future__ import annotations

import hashlib
import io
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from small_sources import encoded, own_folders, pillow, write

from fedkeep.data import DataOptions, DataSet, from_arrays, load
from fedkeep.data.columns import columns_from_json
from fedkeep.data.decode import decode
from fedkeep.data.holdout import hold_out, validated, with_held_out
from fedkeep.data.partition import ByColumn
from fedkeep.data.python_data import dataset_of
from fedkeep.data.readers import images_by_path
from fedkeep.errors import DataError
from fedkeep.experiment.build import load_data
from fedkeep.experiment.initial_model import _check_features
from fedkeep.flower.views import describe_dataset, match_dataset

HEADER = "age,sex,stage,label,site\n"
ROWS = """30,f,1,well,north
50,m,2,ill,south
40,m,1,well,south
60,f,3,ill,west
20,f,1,well,north
70,x,3,ill,west
35,m,2,well,south
45,f,2,ill,north
"""
TABLE = HEADER + 5 * ROWS  # a value of fewer than five rows is no feature of its own


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)


def table(tmp_path: Path, text: str = TABLE, name: str = "people.csv") -> str:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


DIRTY = "age,dose,label\n" + "".join(f"{row},{'<0.5' if row == 11 else 5},{'xy'[row % 2]}\n" for row in range(20))


def site(*rows: str) -> str:
    return "\n".join(["age,sex,label", *rows]) + "\n"


def split(path: str, **options: Any) -> DataSet:
    """Load a table whose test split is its own training split, so that all of it can be looked at."""
    folder = Path(path).with_suffix("")
    folder.mkdir(exist_ok=True)
    for name in ("train.csv", "test.csv"):
        (folder / name).write_bytes(Path(path).read_bytes())
    return load(str(folder), options=DataOptions(**options))


def test_columns_of_numbers_are_scaled_and_columns_of_text_are_one_feature_for_each_value(tmp_path: Path) -> None:
    dataset = split(table(tmp_path), client="site")
    assert dataset.features == ("age", "sex=f", "sex=m", "sex=x", "stage")
    assert dataset.label_names == ("ill", "well")
    age = torch.tensor([30.0, 50, 40, 60, 20, 70, 35, 45])
    scaled = dataset.train["input"][:8, 0].tolist()
    assert scaled == pytest.approx(((age - age.mean()) / age.std(correction=0)).tolist())
    assert (dataset.columns[0].mean, dataset.columns[0].scale) == pytest.approx((43.75, age.std(correction=0).item()))
    assert dataset.train["input"][:, 1:4].tolist()[:3] == [[1, 0, 0], [0, 1, 0], [0, 1, 0]], "not scaled"
    assert dataset.kind == "numbers"
    raw = split(table(tmp_path), client="site", scaling="none", columns=("age",))
    assert raw.train["input"][:8].flatten().tolist() == age.tolist()


def test_only_training_rows_decide_the_scaling(tmp_path: Path) -> None:
    table(tmp_path, "a,label\n0,x\n2,y\n", "d/train.csv")
    table(tmp_path, "a,label\n100,x\n4,y\n", "d/test.csv")
    dataset = load(str(tmp_path / "d"))
    assert dataset.train["input"].flatten().tolist() == [-1, 1]
    assert dataset.test["input"].flatten().tolist() == [99, 3]


def test_rows_that_are_held_out_do_not_decide_the_scaling(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [f"{age},{'fmx'[row % 3]},{'xy'[row % 2]}" for row, age in enumerate(draw.normal(5, 3, 60))]
    path = table(tmp_path, site(*rows))
    dataset = load(path)
    for known in (dataset, validated(dataset, 0.25)):
        age, values = known.train["input"][:, 0], known.train["input"][:, 1:]
        assert (age.mean().item(), age.std(correction=0).item()) == pytest.approx((0, 1), abs=1e-6)
        assert set(values.unique().tolist()) == {0, 1}
        both = torch.cat((known.train["input"][:, 0], known.test["input"][:, 0])).double()
        written = {round(float(row.split(",")[0]), 4) for row in rows}
        assert {
            round(value, 4) for value in (both * known.columns[0].scale + known.columns[0].mean).tolist()
        } <= written
    raw = load(path, options=DataOptions(scaling="none"))
    assert validated(raw, 0.25).columns == raw.columns
    assert [(column.mean, column.scale) for column in raw.columns] == [(0, 1), (0, 1)]


def test_whole_groups_are_held_out_for_test_and_for_validation(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = []
    for patient in range(60):
        for age in draw.normal(5, 3, 1 + patient % 4):
            rows.append(f"{age},p{patient:02},{'xy'[patient % 2]}")
    path = table(tmp_path, "\n".join(["age,patient,label", *rows]) + "\n")
    dataset = load(path, options=DataOptions(group="patient"))
    part = validated(dataset, 0.25)
    for known, share, among in ((dataset, 0.2, "in the source: 20%"), (part, 0.25, "Evaluated on 25%")):
        assert known.features == ("age",)
        assert not set(known.train["group"].tolist()) & set(known.test["group"].tolist())
        sizes = [known.test["label"].bincount(), known.train["label"].bincount()]
        assert (sizes[0] / (sizes[0] + sizes[1])).tolist() == pytest.approx([share] * 2, abs=0.04)
        assert f"{among} of each class" in known.note
        assert "in whole groups" in known.note
    assert "group" not in dataset.values, "a patient's name is not kept"
    alone = load(path, options=DataOptions(columns=("age",)))
    assert "group" not in alone.train
    table(tmp_path, "age,patient,label\n1,a,x\n2,b,y\n", "d/train.csv")
    table(tmp_path, "age,label\n1,x\n2,y\n", "d/test.csv")
    given = load(str(tmp_path / "d"), options=DataOptions(group="patient"))
    assert (given.train["group"].tolist(), given.test["group"].tolist()) == ([0, 1], [-1, -1])
    table(tmp_path, "age,patient,label\n1,b,x\n2,c,y\n", "d/test.csv")
    assert "1 test examples are of groups" in load(str(tmp_path / "d"), options=DataOptions(group="patient")).note
    table(tmp_path, "age,patient,label\n1,a,x\n2,a,y\n3,a,x\n", "one.csv")
    with pytest.raises(DataError, match="too few to hold one out in whole groups"):
        load(str(tmp_path / "one.csv"), options=DataOptions(group="patient"))


def test_images_of_a_group_are_held_out_together(tmp_path: Path) -> None:
    columns = {
        "image": [{"bytes": encoded(row), "path": None} for row in range(40)],
        "label": ["a", "b"] * 20,
        "patient": [f"p{row // 4}" for row in range(40)],
    }
    write(tmp_path / "d" / "train.parquet", columns, {})
    dataset = load(str(tmp_path / "d"), options=DataOptions(group="patient"))
    assert not set(dataset.train["group"].tolist()) & set(dataset.test["group"].tolist())
    assert len(dataset.test["label"]) == 8


def test_held_out_examples_that_are_copies_of_training_examples_are_counted(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "d" / name).mkdir(parents=True)
        for row in range(20):
            (tmp_path / "d" / name / f"{row:02}.png").write_bytes(
                encoded(50 if row < 10 else 60 + row + 90 * (name == "b"))
            )
    dataset = load(str(tmp_path / "d"))
    copies = int((dataset.test["input"][:, 0, 0, 0] == 50).sum())
    assert copies > 0
    assert f"{copies} of 8 held-out examples are exact copies of training examples" in dataset.note
    part = load_data(str(tmp_path / "d"), validation=0.25)
    copies = int((part.test["input"][:, 0, 0, 0] == 50).sum())
    assert f"{copies} of {len(part.test['label'])} held-out examples are exact copies" in part.note
    apart = load(table(tmp_path, site(*(f"{row},f,{'xy'[row % 2]}" for row in range(20)))))
    assert "copies" not in apart.note + load_data("digits", validation=0.1).note


def test_a_column_of_clients_is_the_natural_partition(tmp_path: Path) -> None:
    dataset = split(table(tmp_path), client="site")
    assert dataset.values == {"client": ("north", "south", "west")}
    partition = ByColumn().split(dataset.train, dataset.num_classes, 0)
    assert [partition[client].tolist()[:3] for client in range(3)] == [[0, 4, 7], [1, 2, 6], [3, 5, 11]]
    assert split(table(tmp_path, TABLE.replace("site", "client"))).values == dataset.values, "found by its name"


def test_the_natural_partition_is_flower_datasets_own(tmp_path: Path) -> None:
    library = pytest.importorskip("datasets")
    partitioner = pytest.importorskip("flwr_datasets.partitioner").NaturalIdPartitioner(partition_by="site")
    dataset = split(table(tmp_path), client="site")
    sites = [dataset.values["client"][number] for number in dataset.train["client"].tolist()]
    partitioner.dataset = library.Dataset.from_dict({"site": sites, "row": list(range(len(sites)))})
    theirs = {tuple(partitioner.load_partition(number)["row"]) for number in range(partitioner.num_partitions)}
    partition = ByColumn().split(dataset.train, dataset.num_classes, 0)
    assert {tuple(partition[client].tolist()) for client in range(len(partition))} == theirs


def test_test_rows_need_not_be_anybodys(tmp_path: Path) -> None:
    table(tmp_path, "a,label,client\n0,x,n\n2,y,m\n", "d/train.csv")
    table(tmp_path, "a,label\n1,x\n4,y\n", "d/test.csv")
    dataset = load(str(tmp_path / "d"))
    assert (dataset.train["client"].tolist(), dataset.test["client"].tolist()) == ([1, 0], [-1, -1])
    assert load(str(tmp_path / "d")).values == dataset.values, "from the cache"


@pytest.mark.parametrize("nested", [False, True])
def test_a_file_or_a_folder_for_each_client(tmp_path: Path, nested: bool) -> None:
    for name, rows in {"b": site("30,f,x", "40,m,y"), "a": site("20,m,x", "50,m,y", "60.5,f,y")}.items():
        table(tmp_path, rows, f"d/clients/{name}/train.csv" if nested else f"d/clients/{name}.csv")
    table(tmp_path, site("1,f,x", "2,f,y"), "d/test.csv")
    dataset = load(str(tmp_path / "d"))
    assert dataset.values["client"] == ("a", "b")
    assert dataset.train["client"].tolist() == [0, 0, 0, 1, 1]
    assert len(dataset.test["label"]) == 2


def test_a_folder_of_images_for_each_client(tmp_path: Path) -> None:
    for client, classes in {"ann": "xy", "bob": "yz"}.items():
        for number, name in enumerate(classes):
            folder = tmp_path / "d" / "clients" / client / name
            folder.mkdir(parents=True)
            for row in range(5):
                (folder / f"{row}.png").write_bytes(encoded(100 * number + row))
    (tmp_path / "d" / "clients" / "bob" / "empty").mkdir()
    dataset = load(str(tmp_path / "d"))
    assert dataset.label_names == ("x", "y", "z")
    labels, clients = dataset.train["label"].tolist(), dataset.train["client"].tolist()
    owners = {(dataset.label_names[c], dataset.values["client"][k]) for c, k in zip(labels, clients, strict=True)}
    assert owners == {("x", "ann"), ("y", "ann"), ("y", "bob"), ("z", "bob")}
    assert "clients/bob/empty" in dataset.note


def test_a_parquet_file_of_images_keeps_its_column_of_clients(tmp_path: Path) -> None:
    image = [{"bytes": encoded(i), "path": None} for i in range(20)]
    columns = {"image": image, "label": ["cat", "dog"] * 10, "client": [f"c{i % 3}" for i in range(20)]}
    write(tmp_path / "d" / "train.parquet", columns, {})
    dataset = load(str(tmp_path / "d"))
    assert dataset.has_images
    assert dataset.values["client"] == ("c0", "c1", "c2")
    partition = ByColumn().split(dataset.train, 2, 0)
    assert len(partition) == 3


def test_photos_of_any_size_are_resized_while_they_are_read(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name in "ab":
        for row in range(6):
            path = tmp_path / "photos" / name / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            height, width = (12, 8) if row % 2 else (30, 50)
            pillow.fromarray(generator.integers(256, size=(height, width, 3), dtype=np.uint8)).save(path)
    every = sorted((tmp_path / "photos").rglob("*.png"))
    before = [hashlib.sha256(path.read_bytes()).hexdigest() for path in every]
    with pytest.raises(DataError, match=r"data\.size = \[30, 50\].*The files do not change"):
        load(str(tmp_path / "photos"))
    dataset = load(str(tmp_path / "photos"), options=DataOptions(size=(10, 16)))
    assert dataset.shape == (3, 10, 16)
    assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in every] == before
    assert load(str(tmp_path / "photos"), options=DataOptions(size=(8, 8))).shape == (3, 8, 8), "another cache entry"


def test_photos_for_which_there_is_no_memory_are_refused_with_advice() -> None:
    """No machine has the address space for a thousand million photos."""
    photo = encoded(1, (4000, 3000), mode="RGB", kind="JPEG")
    with pytest.raises(DataError, match=r"1,000,000,000 images of 4000 x 3000 pixels take 33,527,612.*data.size"):
        decode([[photo]], 10**9, "photos")


def test_photos_are_turned_as_the_camera_was(tmp_path: Path) -> None:
    stored = pillow.fromarray(np.array([[0, 0, 0, 0], [255, 255, 255, 255]], dtype=np.uint8))
    turned = pillow.Exif()
    turned[0x0112] = 6  # to be shown a quarter turn clockwise
    for name in "ab":
        (tmp_path / "d" / name).mkdir(parents=True)
        for row in range(5):
            stored.save(tmp_path / "d" / name / f"{row}.png", exif=turned)
    dataset = load(str(tmp_path / "d"), options=DataOptions(size=(4, 2)))
    assert dataset.train["input"][0, 0].tolist() == [[255, 0]] * 4
    assert torch.equal(load(str(tmp_path / "d")).train["input"], dataset.train["input"]), "also if none is resized"


def test_text_becomes_token_ids_that_every_client_computes_alike(tmp_path: Path) -> None:
    text = 'text,label\n"Good, good day",1\nbad,0\n"a bad day",0\ngood,1\n'
    dataset = split(table(tmp_path, text), text="text", length=5, vocabulary=50)
    rows = dataset.train["input"].tolist()
    good, comma, day, bad = rows[0][0], rows[0][1], rows[0][3], rows[1][0]
    assert rows[0] == [good, comma, good, day, 0]
    assert rows[1:] == [[bad, 0, 0, 0, 0], [rows[2][0], bad, day, 0, 0], [good, 0, 0, 0, 0]]
    assert dataset.kind == "token ids"
    assert int(dataset.train["input"].max()) < 50
    alone = split(table(tmp_path, 'text,label\n"bad",0\ngood,1\n', "other.csv"), text="text", length=5, vocabulary=50)
    assert alone.train["input"][:, 0].tolist() == [bad, good]


def test_lists_of_token_ids_and_of_numbers(tmp_path: Path) -> None:
    for values, kind, shape in (([[1, 2], [3], [4, 5, 6]], "token ids", (4,)), ([[0.5, 1.0]] * 3, "numbers", (2,))):
        path = tmp_path / kind / "train.parquet"
        path.parent.mkdir()
        pyarrow.parquet.write_table(pyarrow.table({"x": values * 4, "label": ["a", "b", "c"] * 4}), path)
        dataset = load(str(tmp_path / kind), options=DataOptions(length=4))
        assert (dataset.kind, dataset.shape) == (kind, shape)


def test_arrays(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    x, y = noise.normal(size=(20, 3, 7)), np.array(["up", "down"] * 10)
    dataset = from_arrays(x, y, x[:4], y[:4], client=[1, 2] * 10)
    assert (dataset.shape, dataset.kind, dataset.label_names) == ((3, 7), "numbers", ("down", "up"))
    assert dataset.values["client"] == ("1", "2")
    np.savez(tmp_path / "signals.npz", x=x, y=y)
    held = load(str(tmp_path / "signals.npz"))
    assert (len(held.train["label"]), len(held.test["label"])) == (16, 4)
    images = from_arrays(noise.integers(256, size=(20, 8, 8), dtype=np.uint8), [0, 1] * 10, label_names=["zero", "one"])
    assert (images.shape, images.label_names) == ((1, 8, 8), ("zero", "one"))
    assert len(images.mean) == 1
    assert from_arrays(torch.ones(10, 6).long(), [0, 1] * 5).kind == "token ids"


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": [[1.0]], "y": [0], "x_test": [[1.0]]}, "give both or none"),
        ({"x": [["a"]], "y": [0]}, "must hold numbers, not text"),
        ({"x": [[1.0], [2.0, 3.0]], "y": [0, 1]}, "is no array"),
        ({"x": [[1.0]] * 4, "y": [0, 1]}, "for each of the 4 examples"),
        ({"x": [[1.0]] * 4, "y": [0.5, 1, 0, 1]}, "one integer or text.*single-label classification only"),
        ({"x": [[1.0]] * 4, "y": [0, 1, 0, 1], "client": [0, 1]}, "client must be"),
        ({"x": [[1.0]] * 4, "y": ["a", "b", "", "b"]}, "row 2 has no 'y'"),
        ({"x": np.zeros((10, 8, 8, 3), np.uint8), "y": [0, 1] * 5}, "channels last"),
        ({"x": [[float("nan")]] * 10, "y": [0, 1] * 5}, "NaN"),
        ({"x": [[1.0]] * 10, "y": [object()] * 10}, "must hold numbers or text"),
        ({"x": [[1.0]] * 10, "y": [0, 1] * 5, "label_names": ["only"]}, r"0\.\.1, but 1 classes"),
    ],
)
def test_arrays_that_do_not_fit(arrays: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        from_arrays(**arrays)


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (TABLE.replace("2,ill", "2,none"), {}, "line 3, .* have no 'label'.* write another word, such as 'nothing'"),
        (TABLE.replace("2,ill", "2,"), {}, "line 3, line 9, .* and 5 more have no 'label'.*rows without it: 10"),
        (TABLE.replace("1,well", "1,NA"), {}, "line 2, .* have no 'label'"),
        (TABLE.replace("well,south", "well, "), {"client": "site"}, "line 4, .* have no 'site'"),
        (TABLE.replace("label", "diagnosis"), {}, "no column says which class.*data.label"),
        (TABLE, {"label": "lable"}, "no column 'lable'. Did you mean 'label'"),
        (TABLE, {"client": "place"}, "no column 'place'"),
        (TABLE.replace("sex", "age"), {}, "two columns that are called 'age'"),
        (TABLE + "1,2\n", {}, "people/train.csv: the first line names 5 columns, and line 42 has 2"),
        (DIRTY, {}, "line 13: 'dose' = '<0.5' is no number, but 95 % of the column look like one"),
        (
            DIRTY.replace("<0.5", "5").replace(",5,", ',"0,5",'),
            {},
            "line 2, .*'dose' = '0,5' is no number.*3.5, not 3,5",
        ),
        ("label\nx\ny\n", {}, "besides 'label' there is no column"),
        ("", {}, "is empty. Its first line must name the columns"),
        ("a,label\n1e300,x\n2,y\n", {}, "line 2: 'a' = 1e300, which float32 cannot hold"),
        (f"a,label\n{'9' * 5000},x\n2,y\n", {}, "float32 cannot hold"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, text: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=f"(?s){says}"):
        split(table(tmp_path, text), **options)


@pytest.mark.parametrize("column", ["label", "client"])
def test_blank_text_in_parquet_is_missing(tmp_path: Path, column: str) -> None:
    columns = {"sex": ["f", "m"] * 5, "label": ["x", "y"] * 5, "client": ["a", "b"] * 5}
    columns[column][3] = " "
    path = tmp_path / "d" / "train.parquet"
    path.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(DataError, match=f"row 3 has no '{column}'"):
        load(str(tmp_path / "d"))


def test_a_name_is_one_name_however_its_accents_are_written(tmp_path: Path) -> None:
    one, two = ("m\u00e4nnlich", "ma\u0308nnlich")  # as Linux and as macOS write it
    rows = [f"{row},{(one, two, 'x')[row % 3]}," for row in range(12)]
    table(tmp_path, site(*(row + one for row in rows), "9,x,z"), f"d/clients/{one}.csv")
    table(tmp_path, site(*(row + two for row in rows), "9,x,z"), "d/clients/b.csv")
    dataset = load(str(tmp_path / "d"))
    assert dataset.label_names == (one, "z")
    assert dataset.features == ("age", f"sex={one}", "sex=x")
    assert dataset.values["client"] == ("b", one)
    for split_name, names in {"train": (one, "x"), "test": (two, "x")}.items():
        for name in names:
            (tmp_path / "images" / split_name / name).mkdir(parents=True)
            (tmp_path / "images" / split_name / name / "0.png").write_bytes(encoded(5))
    assert load(str(tmp_path / "images")).label_names == (one, "x")
    assert from_arrays([[1.0]] * 10, [one, two] * 4 + ["x"] * 2).label_names == (one, "x")


def test_digits_that_are_no_numbers_stay_categories(tmp_path: Path) -> None:
    some = [f"{row},{('1', '2', '3', 'x')[row % 4]},{'xy'[row % 2]}" for row in range(40)]
    assert load(table(tmp_path, site(*some))).features[1:] == ("sex=1", "sex=2", "sex=3", "sex=x")
    columns = {"code": ["1", "2"] * 10, "label": ["x", "x", "y", "y"] * 5}  # text by the type of the column
    path = tmp_path / "d" / "train.parquet"
    path.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    assert load(str(tmp_path / "d")).features == ("code=1", "code=2")


def test_the_index_that_pandas_writes_is_no_input(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": range(20), "label": ["x", "y"] * 10}, index=range(5, 25))
    frame.to_csv(tmp_path / "a.csv")
    pandas.read_csv(tmp_path / "a.csv").to_csv(tmp_path / "b.csv", index=False)
    frame.set_index(pandas.Index([f"{row}" for row in range(20)])).to_parquet(tmp_path / "c.parquet")
    for name, index in (("a.csv", ""), ("b.csv", "Unnamed: 0"), ("c.parquet", "__index_level_0__")):
        dataset = load(str(tmp_path / name))
        assert dataset.features == ("age",), name
        assert f"Left out as numbers of rows: the column '{index}'" in dataset.note
    named = load(str(tmp_path / "b.csv"), options=DataOptions(columns=("age", "Unnamed: 0")))
    assert named.features == ("age", "Unnamed: 0"), "where it is asked for"


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_digits_in_one_clients_file_and_letters_in_anothers_are_text(tmp_path: Path, suffix: str) -> None:
    for name, stages, labels in (("a", 3 * "1212121212", 3 * "0101010101"), ("b", 3 * "xyxy121212", 3 * "kkkkkkkkkk")):
        rows = [f"{row},0{stage},{label}" for row, (stage, label) in enumerate(zip(stages, labels, strict=True))]
        path = Path(table(tmp_path, site(*rows), f"d/clients/{name}.csv"))
        if suffix == "parquet":
            pyarrow.parquet.write_table(pyarrow.csv.read_csv(path), path.with_suffix(".parquet"))
            path.unlink()
    dataset = load(str(tmp_path / "d"))
    first = "sex=01" if suffix == "csv" else "sex=1"
    assert (dataset.features[0], dataset.label_names) == ("age", ("0", "1", "k"))
    assert {first, "sex=01"} <= set(dataset.features)


def test_files_of_clients_need_the_same_columns(tmp_path: Path) -> None:
    table(tmp_path, site("30,f,x"), "d/clients/a.csv")
    table(tmp_path, "age,label\n3,x\n", "d/clients/b.csv")
    with pytest.raises(DataError, match=r"b\.csv has no column 'sex', which .*a\.csv has"):
        load(str(tmp_path / "d"))


def test_files_of_several_separators_have_no_decimal_commas(tmp_path: Path) -> None:
    rows = [f"{row},{'fm'[row % 2]},{'xy'[row % 2]}" for row in range(20)]
    table(tmp_path, site(*rows), "d/clients/a.csv")
    table(tmp_path, site(*rows).replace(",", ";"), "d/clients/b.csv")
    assert load(str(tmp_path / "d")).features == ("age", "sex=f", "sex=m")
    tags = [("age", "sex", "label"), *((str(row), ("1,2", "a,b")[row % 2], "xy"[row % 2]) for row in range(20))]
    table(tmp_path, "".join(f'{age},"{tag}",{label}\n' for age, tag, label in tags), "d/clients/a.csv")
    table(tmp_path, "".join(";".join(row) + "\n" for row in tags), "d/clients/b.csv")
    assert load(str(tmp_path / "d")).features == ("age", "sex=1,2", "sex=a,b"), "tags"
    table(tmp_path, site(*rows), "d/clients/a.csv")
    table(tmp_path, site(*rows).replace(",", ";").replace("7;", "7,5;"), "d/clients/b.csv")
    with pytest.raises(DataError, match=r"b\.csv separates cells by ';' and .*a\.csv by ',', .* '7,5' has"):
        load(str(tmp_path / "d"))


def test_nobody_twice(tmp_path: Path) -> None:
    table(tmp_path, site("30,f,x"), "d/clients/a.csv")
    table(tmp_path, site("30,f,x"), "d/clients/a/train.csv")
    with pytest.raises(DataError, match="two sources of client 'a'"):
        load(str(tmp_path / "d"))


def test_classes_that_nobody_can_learn_and_empty_folders_are_named(tmp_path: Path) -> None:
    for split_name, classes in {"train": "xy", "test": "xyz"}.items():
        for number, name in enumerate(classes):
            folder = tmp_path / "d" / split_name / name
            folder.mkdir(parents=True)
            (folder / "0.png").write_bytes(encoded(50 * number))
    (tmp_path / "d" / "train" / "blank").mkdir()
    note = load(str(tmp_path / "d")).note
    assert "Nobody can learn 'z': the test split has 1 such examples, training none." in note
    assert "No images in" in note
    assert "train/blank" in note


def test_a_sites_table_is_read_as_the_run_does_and_nothing_leaves_it(tmp_path: Path) -> None:
    rows = "0,f,x\n10,m,y\n5,u,y\n" * 5
    server = split(table(tmp_path, f"a,sex,label\n{rows}", "server.csv"))
    own = table(tmp_path, "sex,a,label,more\n" + 5 * "m,100,x,7\nq,,y,7\nu,5,x,7\n", "site.csv")
    found = load(own, columns=server.columns)
    both = torch.cat((found.train["input"], found.test["input"]))
    mean, scale = server.columns[0].mean, server.columns[0].scale
    assert found.features == ("a", "sex=f", "sex=m", "sex=u")
    rounded = {tuple(round(float(value), 4) for value in row) for row in both}
    assert rounded == {(round((100 - mean) / scale, 4), 0, 1, 0), (0, 0, 0, 0), (round((5 - mean) / scale, 4), 0, 0, 1)}
    assert "'more'" in found.note, "what the run does not use is named"
    matched = match_dataset(found, describe_dataset(server, False, ""))
    assert torch.equal(matched.train["input"], found.train["input"])
    for text, says in (
        ("a,label\n1,x\n2,y\n", "no column 'sex'"),
        ("a,sex,label\nx,f,x\n2,f,y\n", "line 2: 'a' = 'x'"),
    ):
        with pytest.raises(DataError, match=says):
            load(table(tmp_path, text, "other.csv"), columns=server.columns)


def bomb() -> bytes:
    buffer = io.BytesIO()
    pillow.new("1", (20_000, 20_000)).save(buffer, "PNG")
    return buffer.getvalue()


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n{} loop\nshowpage\n"


def deep_png(colour_type: int, channels: int) -> bytes:
    """A PNG of 2 x 2 pixels with 16 bits a channel, in the lower 12 of which the values are."""
    rows = (b"\0" + np.full(2 * channels, 4000, ">u2").tobytes()) * 2
    parts = (
        b"IHDR" + struct.pack(">IIBBBBB", 2, 2, 16, colour_type, 0, 0, 0),
        b"IDAT" + zlib.compress(rows),
        b"IEND",
    )
    chunks = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def tiff(mode: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pillow.new(mode, (4, 4)).save(buffer, "TIFF", **options)
    return buffer.getvalue()


def paged_tiff() -> bytes:
    buffer = io.BytesIO()
    first, second = (pillow.new("L", (4, 4), value) for value in (1, 2))
    first.save(buffer, "TIFF", save_all=True, append_images=[second])
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (deep_png(0, 1), r"more than 8 bits a channel \(Pillow mode I;16"),
        (deep_png(2, 3), r"more than 8 bits a channel \(stored as RGB;16B\).*Convert the images to 8 bits"),
        (deep_png(4, 2), "more than 8 bits a channel"),
        (deep_png(6, 4), "more than 8 bits a channel"),
        (b"P6\n1 1\n65535\n" + bytes(6), r"more than 8 bits a channel \(values up to 65535\)"),
        (paged_tiff(), "2 pages, of which only the first would be used. Save each page"),
        (tiff("RGBX"), "4 channels, of which only 3 would be used"),
        (tiff("LA").replace(*(struct.pack("<HHIHH", 338, 3, 1, alpha, 0) for alpha in (2, 0))), "2 channels, of which"),
        (tiff("L", tiffinfo={339: 2}), "numbers below 0"),
    ],
    ids=["grey", "RGB", "grey with alpha", "RGBA", "PPM", "TIFF", "RGB and infrared", "grey and one more", "signed"],
)
def test_images_of_which_a_part_would_be_lost_are_refused_by_name(tmp_path: Path, data: bytes, says: str) -> None:
    for name in "ab":
        (tmp_path / "d" / name).mkdir(parents=True)
        for row in range(2):
            (tmp_path / "d" / name / f"{row}.png").write_bytes(encoded(1, mode="RGB"))
    (tmp_path / "d" / "b" / "1.png").write_bytes(data)
    with pytest.raises(DataError, match=rf"(?s)row 3 \(.*d/b/1\.png\) has {says}"):
        load(str(tmp_path / "d"), options=DataOptions(size=(4, 4)))


def test_all_images_that_cannot_be_used_are_told_at_once(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "d" / name).mkdir(parents=True)
        for row in range(5):
            pillow.new("L", (4, 4 + row // 4)).save(tmp_path / "d" / name / f"{row}.png")
    (tmp_path / "d" / "a" / "1.png").write_bytes(deep_png(0, 1))
    for row in range(4):
        (tmp_path / "d" / "b" / f"{row}.png").write_bytes(b"no image")
    with pytest.raises(DataError) as raised:
        load(str(tmp_path / "d"))
    message = str(raised.value)
    assert "3 problems" in message
    assert "a/1.png) has more than 8 bits" in message
    assert re.search(
        r"row 5 \(.*b/0\.png\), .*b/2\.png\) and 1 more are not an image .*: cannot identify image file\. ", message
    )
    assert re.search(r"row 4 \(.*\) of 4 x 5 pixels, row 9 \(.*\) of 4 x 5 pixels differ in .* of 4 x 4", message)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK"])
def test_tiffs_with_one_page_of_8_bits_are_read(tmp_path: Path, mode: str) -> None:
    for name in "ab":
        (tmp_path / "d" / name).mkdir(parents=True)
        for row in range(5):
            pillow.new("RGB", (4, 4)).convert(mode).save(tmp_path / "d" / name / f"{row}.tif", compression="tiff_lzw")
    assert load(str(tmp_path / "d")).shape[1:] == (4, 4)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (POSTSCRIPT, "cannot identify"),
        (bomb(), "pixels"),
        (encoded(7)[:45], "truncated|broken|Truncated|cannot identify"),
        (b"", "cannot identify"),
        (b"\xff\xd8\xff\xe0" + bytes(40), "cannot identify|truncated|broken"),
    ],
)
def test_what_is_no_image_is_named_by_its_row_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, says: str
) -> None:
    def run(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr("subprocess.Popen", run)
    images = [{"bytes": encoded(1), "path": None}, {"bytes": data, "path": None}] * 2
    write(tmp_path / "d" / "train.parquet", {"image": images, "label": ["a", "b"] * 2}, {})
    with pytest.raises(DataError, match=f"row 1.*({says})"):
        load(str(tmp_path / "d"))


def test_a_truncated_image_is_refused_whatever_the_program_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest.importorskip("PIL.ImageFile"), "LOAD_TRUNCATED_IMAGES", True)
    buffer = io.BytesIO()
    pillow.effect_noise((64, 64), 50).save(buffer, "JPEG")
    images = [{"bytes": data, "path": None} for data in (buffer.getvalue(), buffer.getvalue()[:900])] * 2
    write(tmp_path / "d" / "train.parquet", {"image": images, "label": ["a", "b"] * 2}, {})
    with pytest.raises(DataError, match=r"row 1.*truncated"):
        load(str(tmp_path / "d"))


def test_photos_of_phones_are_jpegs_of_several_images(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    first, second = (pillow.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    first.save(buffer, "MPO", save_all=True, append_images=[second])
    images = [{"bytes": data, "path": None} for data in (buffer.getvalue(), encoded(1, mode="RGB"))] * 2
    write(tmp_path / "d" / "train.parquet", {"image": images, "label": ["a", "b"] * 2}, {})
    write(tmp_path / "d" / "test.parquet", {"image": images, "label": ["a", "b"] * 2}, {})
    assert load(str(tmp_path / "d")).shape == (3, 4, 4)


def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    images = [{"bytes": None, "path": str(tmp_path / "pipe")}] * 4
    write(tmp_path / "d" / "train.parquet", {"image": images, "label": ["a", "b"] * 2}, {})
    with pytest.raises(DataError, match=r"row 0 \(.*\), row 1 .* and 1 more name the image .*pipe', which is no file"):
        load(str(tmp_path / "d"))


@pytest.mark.parametrize(
    "metadata",
    [
        "{", "[]", "null", '{"info": []}', '{"info": {"features": 7}}', '{"info": {"features": {"image": {}}}}',
        '{"info": {"features": {"image": {"_type": "Nothing"}}}}', '{"info": {"features": {"image": {"_type": 3}}}}',
        '{"info": {"features": {"label": {"_type": "ClassLabel", "names": 9}}}}', "[" * 100_000,
    ],
)  # fmt: skip
def test_odd_metadata_of_parquet_is_an_error_that_names_the_file_or_is_ignored(tmp_path: Path, metadata: str) -> None:
    path = tmp_path / "d" / "train.parquet"
    write(path, {"image": [{"bytes": encoded(i), "path": None} for i in range(20)], "label": [0, 1] * 10}, {})
    stored = pyarrow.parquet.read_table(path).replace_schema_metadata({"huggingface": metadata})
    pyarrow.parquet.write_table(stored, path)
    output = ""
    try:
        assert load(str(tmp_path / "d")).has_images
    except DataError as error:
        output = str(error)
    assert not output or str(tmp_path / "d") in output


def test_a_column_of_text_is_text_in_every_split(tmp_path: Path) -> None:
    """Codes such as 1, 2 and x, of which only the digits occur among the test rows."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.csv").write_text("code,label\n" + 5 * "1,a\n02,b\nx,a\n1,b\n")
    (tmp_path / "own" / "test.csv").write_text("code,label\n1,a\n02,b\n")
    dataset = load(str(tmp_path / "own"))
    assert dataset.features == ("code=02", "code=1", "code=x")
    assert dataset.test["input"].argmax(1).tolist() == [1, 0]


def test_the_suffix_of_a_file_may_be_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "OWN.CSV").write_text("a,label\n" + "".join(f"{row},{'pq'[row % 2]}\n" for row in range(20)))
    assert load(str(tmp_path / "OWN.CSV")).features == ("a",)


def test_a_sign_of_a_missing_value_in_a_held_out_row_is_named(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=400)

    def loaded() -> DataSet:
        rows = [f"{number},{'xy'[row % 2]}" for row, number in enumerate(numbers)]
        return load(table(tmp_path, "\n".join(["age,label", *rows]) + "\n"))

    part = validated(loaded(), 0.2)
    column, unseen = part.columns[0], float(part.test["input"][0, 0])
    numbers[np.abs(numbers - (column.mean + column.scale * unseen)).argmin()] = 999_999_999
    with pytest.raises(DataError, match="'age' has a number that is so far from the others that they look alike"):
        validated(loaded(), 0.2)


def write_images(folder: Path, classes: str = "xy", seed: int = 0) -> None:
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(6):
            pixels = np.random.default_rng([seed, number, ord(name)]).integers(0, 256, (4, 4), dtype=np.uint8)
            pillow.fromarray(pixels).save(folder / name / f"{number}.png")


def test_images_that_a_parquet_file_only_names_are_read_again(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    named = sorted((tmp_path / "images").rglob("*.png"))
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    images = pyarrow.array([{"bytes": None, "path": str(path)} for path in named], kind)
    table = pyarrow.table({"image": images, "label": [path.parent.name for path in named]})
    pyarrow.parquet.write_table(table, tmp_path / "all.parquet")
    before = load(str(tmp_path / "all.parquet")).train["input"]
    write_images(tmp_path / "images", seed=1)
    assert not torch.equal(load(str(tmp_path / "all.parquet")).train["input"], before)
    named[0].unlink()
    with pytest.raises(DataError, match="which is no file"):
        load(str(tmp_path / "all.parquet"))


def test_joined_files_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "A")
    write_images(tmp_path / "B")
    before = load_data("A+B").train["input"]
    write_images(tmp_path / "A", seed=1)
    assert not torch.equal(load_data("A+B").train["input"], before)


def test_clients_that_a_validation_leaves_without_examples_are_named(tmp_path: Path) -> None:
    rows = [f"{row}.5,{row % 2},c{row // 2}" for row in range(60)]
    for split, count in (("train", 60), ("test", 8)):
        (tmp_path / f"{split}.csv").write_text("\n".join(["a,label,client", *rows[:count]]))
    dataset = validated(load(str(tmp_path)), 0.4)
    held = 30 - len(ByColumn().split(dataset.train, 2, 0).sizes)
    assert held
    assert f"Clients whose examples were all held out: {held} (" in dataset.note


def test_notes_on_held_out_rows_go_with_them(tmp_path: Path) -> None:
    y, client = [row % 2 for row in range(60)], [f"c{row % 3}" for row in range(60)]
    client[int(hold_out(torch.tensor(y), 0.2).nonzero()[0])] = "solo"
    rows = [f"{row % 7},{y[row]},{client[row]}" for row in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,label,client", *rows]))
    dataset = load(str(tmp_path / "t.csv"))
    assert "Clients whose examples were all held out for the test: 1 ('solo')" in dataset.note
    assert "are exact copies" in dataset.note
    assert with_held_out(dataset).note == ""


def test_two_files_of_one_client_are_refused_however_its_name_is_written(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    for name in ("cafe\u0301", "caf\u00e9", "south"):
        (tmp_path / "clients" / f"{name}.csv").write_text(HEADER.replace(",site", "") + "30,f,1,well\n50,m,2,ill\n" * 9)
    with pytest.raises(DataError, match="two sources of client 'caf\u00e9'"):
        load(str(tmp_path))


def test_a_column_is_found_however_its_name_is_composed(tmp_path: Path) -> None:
    for written, asked in (("cafe\u0301", "cafe\u0301"), ("cafe\u0301", "caf\u00e9"), ("caf\u00e9", "cafe\u0301")):
        table = pyarrow.table({"a": [row + 0.5 for row in range(20)], written: [row % 2 for row in range(20)]})
        pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
        pyarrow.csv.write_csv(table, tmp_path / "t.csv")
        for file in ("t.parquet", "t.csv"):
            assert load(str(tmp_path / file), options=DataOptions(label=asked)).num_classes == 2


def test_a_declared_column_of_two_characters_keeps_its_names(tmp_path: Path) -> None:
    name = "cafe\u0301"
    columns = {"a": [row + 0.5 for row in range(40)], name: [row % 2 for row in range(40)]}
    write(tmp_path / "t.parquet", columns, {name: ["healthy", "ill"]})
    for options in (DataOptions(label=name), DataOptions(label="caf\u00e9"), DataOptions()):
        assert load(str(tmp_path / "t.parquet"), options=options).label_names == ("healthy", "ill")


def test_whole_numbers_as_objects_are_numbers() -> None:
    x, y = np.zeros((120, 3), dtype=np.float32), np.arange(120) % 12
    named = np.array([True, False] * 60, dtype=object)
    assert from_arrays(x, named, x_test=x, y_test=named).label_names == ("False", "True")
    dataset = from_arrays(x, y.astype(object), x_test=x, y_test=y)
    assert dataset.label_names == tuple(map(str, range(12)))


def test_columns_of_two_compositions_meet(tmp_path: Path) -> None:
    two, one = "cafe\u0301", "caf\u00e9"
    numbers, labels = [row + 0.5 for row in range(40)], [row % 2 for row in range(40)]

    def table(name: str, *path: str) -> Path:
        file = tmp_path.joinpath(*path)
        file.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({name: numbers, "label": labels}), file)
        return file

    table(one, "splits", "train.parquet")
    table(two, "splits", "test.parquet")
    table(one, "own", "clients", "x", "train.parquet")
    table(two, "own", "clients", "y", "train.parquet")
    for folder in ("splits", "own"):
        assert load(str(tmp_path / folder)).features == (one,)
    frame = pandas.DataFrame({two: numbers, "label": labels})
    assert dataset_of(frame, DataOptions(columns=(two,))).features == (one,)
    written = pyarrow.table({one: numbers, "label": labels})
    pyarrow.csv.write_csv(written, tmp_path / "run.csv")
    columns = load(str(tmp_path / "run.csv")).columns
    assert load(str(table(two, "site.parquet")), columns=columns).columns == columns


def test_what_earlier_versions_wrote_of_two_compositions_is_read(tmp_path: Path) -> None:
    two, one = "cafe\u0301", "caf\u00e9"
    (column,) = columns_from_json({"columns": [{"name": two, "mean": 1.0, "scale": 2.0}]})
    assert column.name == one
    _check_features({"input": {"features": [two]}}, [one], "the weights")
    frame = pandas.DataFrame({"x": [row + 0.5 for row in range(40)], two: pandas.Categorical([*range(10)] * 4)})
    assert dataset_of(frame, DataOptions(label=one)).label_names == tuple(map(str, range(10)))
    indexed = frame[["x"]].set_index(pandas.Index([row % 2 for row in range(40)], name=two))
    assert dataset_of(indexed, DataOptions(label=one)).num_classes == 2


def test_two_columns_of_one_name_are_refused_however_it_is_composed(tmp_path: Path) -> None:
    table = pyarrow.table({"caf\u00e9": [1.5] * 40, "cafe\u0301": [2.5] * 40, "label": [0, 1] * 20})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    for given in (lambda: load(str(tmp_path / "t.parquet")), lambda: dataset_of(table.to_pandas(), DataOptions())):
        with pytest.raises(DataError, match="has two columns that are called caf\u00e9"):
            given()


def test_a_path_that_is_no_text_names_no_file(tmp_path: Path) -> None:
    cells = pyarrow.array([{"bytes": None, "path": 1}], pyarrow.struct([("bytes", "binary"), ("path", "int64")]))
    pyarrow.parquet.write_table(pyarrow.table({"image": cells}), tmp_path / "x.parquet")
    assert images_by_path(tmp_path / "x.parquet") == []
