"""Files of `datasets` in which numbers stand for names: joined by the names, whatever each file calls 0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedkeep.data import DataOptions, load
from fedkeep.data.python_data import dataset_of
from fedkeep.errors import DataError

datasets = pytest.importorskip("datasets")
pandas = pytest.importorskip("pandas")


def write(path: Path, labels: Sequence[str], names: Sequence[str], **columns: Any) -> None:
    """Write a file of ``datasets`` whose labels are numbers of these names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_dict({"x": [row / 3 for row in range(len(labels))], "label": [*labels]} | columns)
    table.cast_column("label", datasets.ClassLabel(names=[*names])).to_parquet(path)


def test_files_that_declare_other_names_are_joined_by_name(tmp_path: Path) -> None:
    write(tmp_path / "clients" / "a.parquet", ["benign", "malignant"] * 20, ["benign", "malignant"])
    write(tmp_path / "clients" / "b.parquet", ["malignant"] * 40, ["malignant"])
    found = load(str(tmp_path))
    assert found.label_names == ("benign", "malignant")
    counts = [
        sum(split["label"][split["client"] == c].bincount(minlength=2) for split in (found.train, found.test)).tolist()
        for c in (0, 1)
    ]
    assert counts == [[20, 20], [0, 40]]


def test_names_of_one_file_meet_texts_of_another(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", ["benign", "malignant"] * 20, ["benign", "malignant"])
    test = pandas.DataFrame({"x": [row / 7 for row in range(20)], "label": ["malignant", "benign"] * 10})
    test.to_parquet(tmp_path / "test.parquet")
    found = load(str(tmp_path))
    assert found.label_names == ("benign", "malignant")
    assert found.test["label"].tolist() == [1, 0] * 10


def test_files_that_declare_the_same_keep_its_order(tmp_path: Path) -> None:
    for number in (0, 1):
        write(tmp_path / f"train-0000{number}-of-00002.parquet", ["sick", "fit"] * 20, ["sick", "fit"])
    assert load(str(tmp_path)).label_names == ("sick", "fit")


def test_a_number_without_a_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.parquet", ["sick", "fit"] * 20, ["sick", "fit"])
    plain = datasets.Dataset.from_dict({"x": [row / 3 for row in range(40)], "label": [0, 7] * 20})
    features = plain.features | {"label": datasets.ClassLabel(names=["fit"])}
    table = plain.data.table.replace_schema_metadata(datasets.Features(features).arrow_schema.metadata)
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "train-00001-of-00002.parquet")
    with pytest.raises(DataError, match=r"00001-of-00002.*'label' has the number 7, and declares 1 classes"):
        load(str(tmp_path))


def test_an_input_column_of_declared_names_or_categories_is_one_of_names(tmp_path: Path) -> None:
    rows = 60
    table = datasets.Dataset.from_dict(
        {"sex": ["f", "m", "x"] * 20, "x": [row / 3 for row in range(rows)], "label": ["a", "b"] * 30}
    ).cast_column("sex", datasets.ClassLabel(names=["m", "f", "x"]))
    assert dataset_of(table, DataOptions(label="label")).features == ("sex=f", "sex=m", "sex=x", "x")
    frame = pandas.DataFrame({"ward": [7, 8, 12] * 20, "x": [row / 3 for row in range(rows)], "label": [2, 10] * 30})
    frame = frame.astype({"ward": "category", "label": "category"})
    found = dataset_of(frame)
    assert found.features == ("ward=12", "ward=7", "ward=8", "x")
    assert found.label_names == ("2", "10"), "classes stay in the order of numbers"


def test_old_names_of_shards_announce_how_many_there_are(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00003-a09b74b3ef9c3b56.parquet", ["a", "b"] * 20, ["a", "b"])
    with pytest.raises(DataError, match="1 of 3 files of the split 'train' are there"):
        load(str(tmp_path))


def test_capitals_in_the_names_of_files(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"x": [row / 3 for row in range(60)], "label": ["a", "b"] * 30})
    frame.to_csv(tmp_path / "train.csv", index=False)
    frame[:10].to_csv(tmp_path / "TEST.CSV", index=False)
    found = load(str(tmp_path))
    assert (len(found.train["label"]), len(found.test["label"])) == (60, 10)
    frame[:10].to_csv(tmp_path / "test.csv", index=False)
    with pytest.raises(DataError, match=r"'test' more than once: TEST.CSV, test.csv"):
        load(str(tmp_path))


def test_numbers_that_are_written_as_text_are_told(tmp_path: Path) -> None:
    few = pandas.DataFrame({"b": [str(row % 10 / 2) for row in range(200)], "label": ["a", "b"] * 100})
    assert "'b' has numbers that are written as text: make them numbers" in dataset_of(few).note
    many = few.assign(b=[f"{row * 0.7:.2f}" for row in range(200)])
    with pytest.raises(DataError, match=r"'b' has 200 different values.*make them numbers \(astype\(float\)\), if"):
        dataset_of(many)
    odd = few.assign(b=["?", *few["b"][1:]])
    with pytest.raises(DataError, match=r"'b' = '\?' is no number.* Make the column numbers \(astype\(float\)\)"):
        dataset_of(odd)


def test_a_zero_before_a_digit_among_decimals_is_a_number(tmp_path: Path) -> None:
    cells = ["00" if row == 7 else str(row % 8 + 0.5) for row in range(60)]
    pandas.DataFrame({"dose": cells, "label": ["a", "b"] * 30}).to_csv(tmp_path / "doses.csv", index=False)
    assert load(str(tmp_path / "doses.csv")).features == ("dose",)


def test_a_client_whose_name_means_an_empty_cell(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    frame = pandas.DataFrame({"x": [row / 3 for row in range(60)], "label": ["a", "b"] * 30})
    for name in ("NA", "EU"):
        frame.to_csv(tmp_path / "clients" / f"{name}.csv", index=False)
    with pytest.raises(DataError, match=r"NA.csv: a client called 'NA' would be an empty cell. Rename the file"):
        load(str(tmp_path))


def test_plain_numbers_beside_files_that_declare_other_names_are_refused(tmp_path: Path) -> None:
    for number, names in enumerate((["sick", "fit"], ["fit", "sick"])):
        write(tmp_path / f"train-0000{number}-of-00003.parquet", ["sick", "fit"] * 20, names)
    plain = pandas.DataFrame({"x": [row / 3 for row in range(40)], "label": [0, 1] * 20})
    plain.to_parquet(tmp_path / "train-00002-of-00003.parquet")
    with pytest.raises(DataError, match=r"00002-of-00003.*'label' has numbers, and another file says which names"):
        load(str(tmp_path))


def test_a_runs_column_of_numbers_reads_numbers_whatever_a_file_declares(tmp_path: Path) -> None:
    rows = {"grade": [0, 1, 2] * 20, "x": [row / 3 for row in range(60)], "label": ["a", "b"] * 30}
    pandas.DataFrame(rows).to_csv(tmp_path / "run.csv", index=False)
    run = load(str(tmp_path / "run.csv"))
    table = datasets.Dataset.from_dict(rows)
    table.cast_column("grade", datasets.ClassLabel(names=["I", "II", "III"])).to_parquet(tmp_path / "site.parquet")
    site = load(str(tmp_path / "site.parquet"), options=DataOptions(label="label"), columns=run.columns)
    assert site.features == run.features == ("grade", "x")
    digits = table.cast_column("grade", datasets.ClassLabel(names=["0", "1", "2"]))
    assert dataset_of(digits, DataOptions(label="label")).features == ("grade", "x")


def test_two_files_of_one_name_in_other_capitals_are_refused(tmp_path: Path) -> None:
    for name in ("train", "Train"):
        write(tmp_path / f"{name}.parquet", ["a", "b"] * 20, ["a", "b"])
    with pytest.raises(DataError, match=r"'train' more than once: Train.parquet, train.parquet"):
        load(str(tmp_path))
