"""Tables of one's own: what a column holds, what is told, what is refused, and what leaves with a model."""

from __future__ import annotations

import datetime
import json
import re
import shlex
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_sources import encoded, own_folders, pillow, pyarrow

from fedkeep.data import DataOptions, DataSet, from_arrays, load
from fedkeep.data.columns import TableColumn, columns_from_json, columns_to_json
from fedkeep.data.loading import assemble_own
from fedkeep.data.own_files import OwnSplits
from fedkeep.data.python_data import dataset_of
from fedkeep.data.readers import Problems
from fedkeep.data.tables import hash_words, read_lists
from fedkeep.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")
pandas = pytest.importorskip("pandas")


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)


def written(tmp_path: Path, header: str, rows: list[str], *, name: str = "t.csv", encoding: str = "utf-8") -> str:
    path = tmp_path / name
    path.write_bytes(("\n".join([header, *rows]) + "\n").encode(encoding))
    return str(path)


def both(dataset: DataSet) -> torch.Tensor:
    return torch.cat((dataset.train["input"], dataset.test["input"]))


def test_spreadsheet_that_is_called_csv_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "patients.csv"
    path.write_bytes(b"PK\3\4" + bytes(range(200)))
    with pytest.raises(DataError, match=r"patients.csv is a spreadsheet or another archive by another name"):
        load(str(path))


def test_text_beside_parquet_is_refused(tmp_path: Path) -> None:
    columns = {"age": list(range(40)), "label": ["x", "y"] * 20}
    (tmp_path / "train.csv").write_text("age,label\n" + "\n".join(map("{},{}".format, *columns.values())))
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "test.parquet")
    with pytest.raises(DataError, match=r"train.csv is text and .*test.parquet Parquet"):
        load(str(tmp_path))


def test_classes_of_false_and_true_have_the_names_that_they_have_in_a_csv(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(
        pyarrow.table({"age": list(range(40)), "label": [True, False] * 20}), tmp_path / "t.parquet"
    )
    dataset = load(str(tmp_path / "t.parquet"))
    assert dataset.label_names == ("False", "True")
    assert sorted(dataset.train["label"].tolist() + dataset.test["label"].tolist()) == [0] * 20 + [1] * 20


def test_flags_in_one_split_may_be_numbers_in_the_other(tmp_path: Path) -> None:
    for split, labels in (("train", [True, False]), ("test", [1, 0])):
        table = pyarrow.table({"age": list(range(40)), "label": labels * 20})
        pyarrow.parquet.write_table(table, tmp_path / f"{split}.parquet")
    dataset = load(str(tmp_path))
    assert dataset.label_names == ("0", "1")
    assert dataset.train["label"][0] == dataset.test["label"][0] == 1


def test_separator_is_found_out_where_lines_are_long(tmp_path: Path) -> None:
    """The sample that is looked at ends within a line, whose cells after the cut are not there."""
    lines = [f"{row},5;{'a word, and another ' * 300};{'xy'[row % 2]}" for row in range(40)]
    path = tmp_path / "notes.csv"
    path.write_text("\n".join(["age;note;label", *lines]))
    assert load(str(path), options=DataOptions(exclude=("note",))).columns[0].name == "age"


@pytest.mark.parametrize("name", ["patients.xlsx", "patients.csv.gz"])
def test_file_of_another_kind_is_not_asked_for_at_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(b"PK")
    with pytest.raises(DataError, match=rf"data/{name} is a file of a kind that is not read \(.parquet, .csv"):
        load(f"data/{name}")
    monkeypatch.chdir("/")
    with pytest.raises(DataError, match="is a file of a kind that is not read"):
        load(f"data/{name}", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("label", ["3", "03", "4"]),
        ("label", ["TRUE", "FALSE"]),
        ("label", ["1.0", "2.0"]),
        ("label", ["31.12.2020", "01.01.2021"]),
        ("client", ["0", "00"]),
        ("client", ["98765432109876543210", "98765432109876543211"]),
        ("client", ["2020-12-31", "2020-12-30"]),
    ],
)
def test_names_of_classes_and_clients_stay_as_they_are_written(tmp_path: Path, column: str, values: list[str]) -> None:
    rows = [f"{row / 7},{values[row % len(values)]},{'uv'[row % 2]}" for row in range(60)]
    other = "label" if column == "client" else "client"
    dataset = load(written(tmp_path, f"a,{column},{other}", rows))
    assert set(dataset.label_names if column == "label" else dataset.values["client"]) == set(values)


def test_clients_whose_rows_are_all_held_out_are_told(tmp_path: Path) -> None:
    rows = [f"{row / 3},{'xy'[row % 2]},{'big' if row else 'one'}" for row in range(40)]
    assert "train nothing" not in load(written(tmp_path, "a,label,client", [*rows, *(rows[:1] * 9)])).note
    dataset = load(written(tmp_path, "a,label,client", [f"{r / 3},{'xy'[r % 2]},site {r}" for r in range(40)]))
    gone = sorted(set(range(40)) - set(dataset.train["client"].tolist()))
    assert len(gone) == 8
    names = ", ".join(repr(dataset.values["client"][client]) for client in gone[:5])
    assert (
        f"Clients whose examples were all held out for the test: 8 ({names}, ...). With partition.scheme"
        in dataset.note
    )


def test_classes_that_are_whole_numbers_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    dataset = load(written(tmp_path, "a,label", [f"{row / 3},{row % 12}" for row in range(120)]))
    assert dataset.label_names == tuple(map(str, range(12)))


def test_a_word_with_a_full_stop_makes_no_decimals_of_codes(tmp_path: Path) -> None:
    rows = [f"{('01', '12', '13', 'E.R.')[min(row % 30, 3)]},{row / 3},{'xy'[row % 2]}" for row in range(60)]
    rows = [
        row if row.startswith("E") and number == 3 else row.replace("E.R.", "12") for number, row in enumerate(rows)
    ]
    (tmp_path / "wards.csv").write_text("\n".join(["ward,a,y", *rows]))
    dataset = load(str(tmp_path / "wards.csv"), options=DataOptions(label="y"))
    assert [column.kind for column in dataset.columns] == ["category", "number"]


def test_leading_zeros_make_a_column_of_names(tmp_path: Path) -> None:
    rows = [f"{('01234', '04711', '12345')[row % 3]},{row / 3},{'xy'[row % 2]}" for row in range(60)]
    dataset = load(written(tmp_path, "zip,a,label", rows))
    assert dataset.features == ("zip=01234", "zip=04711", "zip=12345", "a")
    assert "'zip' has leading zeros" in dataset.note


@pytest.mark.parametrize(
    "cells", [("038", "250.01", "410.9", "008.45", "428"), ("01", "02", "03", "-1"), ("012", "034", "12E4", "777")]
)
def test_a_decimal_among_codes_makes_no_numbers_of_them(cells: tuple[str, ...], tmp_path: Path) -> None:
    rows = [f"{cells[row % len(cells)]},{row / 3},{'xy'[row % 2]}" for row in range(60)]
    dataset = load(written(tmp_path, "icd9,a,label", rows))
    assert [column.kind for column in dataset.columns] == ["category", "number"]
    assert "'icd9' has leading zeros" in dataset.note


def test_one_zero_before_a_digit_among_decimals_makes_no_names(tmp_path: Path) -> None:
    odd = {7: "05", 9: "00.00", 11: "00"}
    rows = [f"{odd.get(row, 1 + row * 0.37)},{'xy'[row % 2]}" for row in range(60)]
    assert load(written(tmp_path, "a,label", rows)).features == ("a",)


ALIKE = [("1", "1.0"), ("+1", "1"), ("1e3", "1000"), ("a b", "a\N{NO-BREAK SPACE}b"), ("a  b", "a b"), ("a\u200b", "a"),
         ("\N{FULLWIDTH DIGIT ONE}", "1"), ("\N{ARABIC-INDIC DIGIT THREE}", "3"), ("Yes", "yes")]  # fmt: skip


@pytest.mark.parametrize("pair", ALIKE)
def test_names_that_look_alike_are_refused_in_files_and_arrays(tmp_path: Path, pair: tuple[str, str]) -> None:
    values = [*pair, "other"]
    rows = [f"{row / 7},{values[row % 3]}" for row in range(30)]
    with pytest.raises(DataError, match="names that differ in upper"):
        load(written(tmp_path, "a,label", rows))
    for test in (values, values[1:] * 2):  # also where each split writes it in one way
        with pytest.raises(DataError, match="names that differ in upper"):
            from_arrays(np.ones((4, 2)), [pair[0], "other"] * 2, np.ones((len(test), 2)), test)
    with pytest.raises(DataError, match="client has names that differ"):
        from_arrays(np.ones((30, 2)), [0, 1] * 15, client=values * 10)


def test_folders_of_classes_that_look_alike_are_refused(tmp_path: Path) -> None:
    for name in ("Cat", "cat", "dog"):
        (tmp_path / "d" / name).mkdir(parents=True)
        for row in range(5):
            (tmp_path / "d" / name / f"{row}.png").write_bytes(encoded(row))
    with pytest.raises(DataError, match="'Cat' and 'cat'"):
        load(str(tmp_path / "d"))


@pytest.mark.parametrize("found", ["label", "client"])
def test_what_was_found_by_its_name_is_no_input(tmp_path: Path, found: str) -> None:
    path = written(tmp_path, "a,label,client", [f"{row / 3},{'xy'[row % 2]},{'uv'[row % 2]}" for row in range(40)])
    for options in ({"columns": ("a", found)}, {"text": found}):
        with pytest.raises(DataError, match=f"'{found}' says .* is among the inputs"):
            load(path, options=DataOptions(**options))
    with pytest.raises(ConfigError, match="for two purposes"):
        DataOptions(label="b", exclude=("b",))


def test_two_columns_that_may_be_the_classes_are_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, "a,class,target", [f"{row / 3},{'xy'[row % 2]},{row % 2}" for row in range(40)])
    with pytest.raises(DataError, match=r"'target' and 'class' could all be .*data\.exclude=\['class'\]"):
        load(path)
    assert load(path, options=DataOptions(label="class", exclude=("target",))).features == ("a",)


@pytest.mark.parametrize(("dtype", "kind"), [("uint8", "numbers"), ("float32", "numbers"), ("int64", "")])
def test_no_number_of_a_list_is_cut_off(tmp_path: Path, dtype: str, kind: str) -> None:
    lists = pyarrow.array(
        np.arange(40 * 100).reshape(40, 100).__mod__(200).tolist(), pyarrow.list_(getattr(pyarrow, dtype)())
    )
    folder = tmp_path / dtype
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"x": lists, "label": ["a", "b"] * 20}), folder / "train.parquet")
    if kind:
        dataset = load(str(folder))
        assert (dataset.kind, dataset.shape) == (kind, (100,))
        return
    with pytest.raises(DataError, match=r"list of 100 whole numbers.*data\.length=100"):
        load(str(folder))
    assert load(str(folder), options=DataOptions(length=100)).kind == "token ids"


def test_texts_and_lists_that_are_cut_are_counted(tmp_path: Path) -> None:
    rows = [f"{'good ' * (row % 4 + 1)},{'xy'[row % 2]}" for row in range(40)]
    dataset = load(written(tmp_path, "review,label", rows), options=DataOptions(text="review", length=2))
    assert "20 of 40 rows have more than 2 token ids and were cut" in dataset.note
    lists = [[1] * (1 + row % 4) for row in range(40)]
    pyarrow.parquet.write_table(pyarrow.table({"x": lists, "label": ["a", "b"] * 20}), tmp_path / "ids.parquet")
    note = load(str(tmp_path / "ids.parquet"), options=DataOptions(length=3)).note
    assert "10 of 40 rows have more than 3 token ids" in note


def test_a_word_has_one_id_in_every_form_of_unicode() -> None:
    for word in ("naïveté", "Łódź", "tiếng", "ñandú"):
        assert hash_words(unicodedata.normalize("NFD", word), 5000) == hash_words(
            unicodedata.normalize("NFC", word), 5000
        )


@pytest.mark.parametrize("shape", [(24, 20, 3), (20, 24, 4), (16, 16, 1)])
@pytest.mark.parametrize("dtype", ["float64", "uint8", "int32"])
def test_channels_that_come_last_are_refused(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(DataError, match=r"channels last.*transpose\(0, 3, 1, 2\)"):
        from_arrays(np.zeros((20, *shape), dtype), [0, 1] * 10)


def nullable(dtype: str) -> Any:
    return pandas.DataFrame({"a": [1, 2] * 20, "b": [3, 4] * 20}, dtype=dtype)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.ma.masked_less(np.ones((20, 3)), 2), "y": [0, 1] * 10}, "masked"),
        ({"x": np.ones((20, 3)), "y": np.ma.masked_equal([0, 1] * 10, 0)}, "masked"),
        ({"x": np.ones((20, 3)), "y": [0, 1] * 10, "client": np.ma.masked_equal([0, 1] * 10, 0)}, "masked"),
        ({"x": np.ones((20, 3)), "y": [0.0, -np.inf] * 10}, "single-label classification only"),
        ({"x": np.full((20, 3), 2**63, np.uint64), "y": [0, 1] * 10}, "int64 cannot hold"),
        ({"x": np.full((20, 3), 1e300), "y": [0, 1] * 10}, r"x has 1e\+300, which float32 cannot hold"),
        ({"x": 1.7e9 + np.arange(40.0).reshape(20, 2), "y": [0, 1] * 10}, "float32 makes one of all"),
        ({"x": np.ones((20, 3)), "y": [b"\xff", b"a"] * 10}, "no text in UTF-8"),
        ({"x": np.ones((20, 3)), "y": np.eye(2)[[0, 1] * 10]}, "single-label classification only"),
        ({"x": np.ones((20, 3)), "y": np.zeros((20, 4, 4), int)}, "single-label classification only"),
        ({"x": np.ones((40, 3)), "y": np.arange(40)}, "single-label classification only"),
        ({"x": np.ones((40, 3)), "y": np.array([1, "1"] * 20, dtype=object)}, "has numbers and text"),
        ({"x": np.ones(40, np.uint8), "y": [0, 1] * 20}, r"uint8 inputs are images"),
        ({"x": np.ones((40, 3)), "y": ["\ud800", "b"] * 20}, "no Unicode text"),
        ({"x": np.ones((40, 3)), "y": [["a", "b"], ["a"]] * 20}, "single-label classification only"),
        ({"x": np.ones((40, 3)), "y": ["1e999", "0.5"] * 20}, "holds '0.5': a number to be predicted"),
        ({"x": nullable("Int64"), "y": [0, 1] * 20}, r"to_numpy\('float64'\)"),
        ({"x": nullable("Float64"), "y": [0, 1] * 20}, r"to_numpy\('float64'\)"),
        ({"x": np.zeros((0, 3)), "y": [], "label_names": ["a", "b"]}, "there are no inputs"),
        (
            {"x": np.ones((40, 3)), "y": np.array([2**63, 1] * 20, np.uint64), "label_names": ["a", "b"]},
            "y has the class 9223372036854775808, and label_names names the classes 0 to 1",
        ),
    ],
)
def test_arrays_that_would_become_something_else_are_refused(arrays: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        from_arrays(**arrays)


def test_noise_in_a_constant_column_and_numbers_next_to_zero_are_no_loss() -> None:
    noisy, tiny = np.where(np.arange(20) % 2, 0.1 + 0.2, 0.3), np.arange(20) * 1e-50
    columns = np.stack((noisy, tiny), 1)
    taken = from_arrays(columns, [0, 1] * 10, columns, [0, 1] * 10)
    assert np.array_equal(taken.test["input"], columns.astype(np.float32))
    close = np.linspace([0.1] * 20, [0.1 + 1e-9] * 20, 2)  # test rows alone tell nobody which column varies
    assert np.array_equal(from_arrays(np.eye(20), [0, 1] * 10, close, [0, 1]).test["input"], close.astype(np.float32))


def test_numbers_above_int64_and_bytes_are_names(tmp_path: Path) -> None:
    big = [2**64 - 1 - row % 2 for row in range(40)]
    dataset = from_arrays(np.ones((40, 2)), np.array(big, np.uint64), client=np.array([b"caf\xc3\xa9", b"bar"] * 20))
    assert dataset.label_names == (str(2**64 - 2), str(2**64 - 1))
    assert dataset.values["client"] == ("bar", "café")
    columns = {"a": np.arange(40) / 3, "client": pyarrow.array(big, pyarrow.uint64()), "label": ["x", "y"] * 20}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    assert load(str(tmp_path / "t.parquet")).values["client"] == dataset.label_names


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([f"{row / 7:.3f}" for row in range(40)], "a number to be predicted"),
        ([str(int(row**1.5)) for row in range(40)], "different values in 40 rows"),
        ([str(row % 3 if row < 50 else row) for row in range(64)], "a count to be predicted"),
        (["a", "b", "a|b", "b"] * 10, "several labels"),
        (["a", "b", "a;b", "b"] * 10, "several labels"),
    ],
)
def test_what_is_no_single_class_is_refused(tmp_path: Path, values: list[str], says: str) -> None:
    path = written(tmp_path, "a,label", [f"{row / 3},{value}" for row, value in enumerate(values)])
    with pytest.raises(DataError, match=f"{says}.*single-label classification only"):
        load(path)
    with pytest.raises(DataError, match=f"{says}.*single-label classification only"):
        dataset_of(pandas.DataFrame({"a": np.arange(len(values)) / 3, "label": values}))


HEADER = "patient_id,age,sex,seen,weight,note,label,hospital"


def hospital(rows: int = 200) -> list[str]:
    """Rows of a table as hospitals write them: ids, empty cells, dates."""
    draw = np.random.default_rng(0)
    lines = []
    for row in range(rows):
        age = "" if row % 10 == 3 else f"{draw.integers(20, 90)}"
        sex = "" if row % 20 == 7 else "fmd"[0 if row % 3 else 1 + (row < 12)]
        seen = f"20{draw.integers(10, 24)}-0{1 + row % 9}-11"
        lines.append(
            f"P{row:05},{age},{sex},{seen},{draw.normal(70, 9):.1f},{'abc'[row % 3]},{'yn'[row % 2]},h{row % 4}"
        )
    return lines


def test_all_problems_are_told_at_once_with_the_lines_of_the_file(tmp_path: Path) -> None:
    rows = hospital()
    rows[4] = rows[4].replace(",y,", ",,")
    cells = rows[9].split(",")
    rows[9] = ",".join([*cells[:4], "?", *cells[5:]])
    with pytest.raises(DataError) as raised:
        load(written(tmp_path, HEADER, [rows[0], "", *rows[1:]]), options=DataOptions(client="hospital"))
    message = str(raised.value)
    assert "3 problems" in message
    assert "line 7 has no 'label'" in message, "the empty line counts"
    assert "line 12: 'weight' = '?' is no number" in message
    assert "'patient_id' has 200 different values in 200 rows" in message
    assert """--set 'data.exclude=["patient_id"]'""" in message


@pytest.mark.parametrize(
    ("factor", "ids"), [(1, True), (10, True), (0.05, False)], ids=["seven", "eight", "five or six"]
)
def test_whole_numbers_of_one_length_are_ids_whatever_their_column_is_called(
    factor: float, ids: bool, tmp_path: Path
) -> None:
    numbers = [int(factor * (1_000_003 + row * 44_987 % 8_999_993)) for row in range(100)]
    path = written(tmp_path, "mrn,label", [f"{number},{'xy'[row % 2]}" for row, number in enumerate(numbers)])
    if ids:
        with pytest.raises(DataError, match="'mrn' has 100 different values in 100 rows"):
            load(path)
        dataset = load(path, options=DataOptions(columns=("mrn",)))
    else:
        dataset = load(path)
    assert dataset.features == ("mrn",)


def test_empty_cells_dates_and_rare_values_of_a_hospitals_table(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER, hospital())
    dataset = load(path, options=DataOptions(client="hospital", exclude=("patient_id",)))
    assert dataset.features[:5] == ("age", "sex=(missing)", "sex=f", "sex=m", "sex=(other)")
    assert "'seen' are dates" in dataset.note
    assert "20 empty cells of 'age' got the column's mean" in dataset.note
    age, sex, seen = dataset.columns[:3]
    assert int((both(dataset)[:, 0].abs() < 1e-6).sum()) >= 20, "the mean, scaled"
    assert age.fill == pytest.approx(age.mean)
    assert (sex.values, sex.other) == (("(missing)", "f", "m"), True)
    assert 365 * 40 < seen.mean < 365 * 55
    assert bool(both(dataset).isfinite().all())


def test_features_are_those_of_scikit_learn(tmp_path: Path) -> None:
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    draw = np.random.default_rng(1)
    frame = pandas.DataFrame(
        {"n": draw.normal(5, 2, 300), "c": draw.choice(list("pqrs"), 300, p=[0.5, 0.3, 0.19, 0.01])}
    )
    frame.loc[::9, "n"] = np.nan
    frame["label"] = draw.choice(["x", "y"], 300)
    train, test = frame[:200], frame[200:]
    dataset = dataset_of((train, test))
    theirs = make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), ["n"]),
        (OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=5, sparse_output=False), ["c"]),
    ).fit(train)
    for ours, part in ((dataset.train, train), (dataset.test, test)):
        assert ours["input"].numpy() == pytest.approx(theirs.transform(part), abs=1e-5)


@pytest.mark.parametrize("changed", [{"transform_output": "polars"}, {"assume_finite": True}])
def test_what_the_program_has_set_in_scikit_learn_changes_nothing(tmp_path: Path, changed: dict[str, Any]) -> None:
    sklearn = pytest.importorskip("sklearn")
    path = written(tmp_path, "a,b,label", [f"{row / 3},{'uv'[row % 3 % 2]},{row % 2}" for row in range(40)])
    with sklearn.config_context(**changed):
        found = load(path)
    (tmp_path / "cache").rename(tmp_path / "other")
    assert torch.equal(both(found), both(load(path)))


@pytest.mark.parametrize(
    ("separator", "encoding", "noted"),
    [
        (";", "utf-8-sig", "decimal commas"),
        (";", "cp1252", "Windows-1252"),
        ("\t", "utf-16", "UTF-16"),
        ("|", "utf-16-le", "UTF-16"),
    ],
)
def test_separator_encoding_and_decimal_comma_are_found_out(
    tmp_path: Path, separator: str, encoding: str, noted: str
) -> None:
    rows = [
        separator.join([f"{row},{row % 7}5", ("Köln", "Münster")[row % 2], "ja" if row % 3 else "nein"])
        for row in range(60)
    ]
    dataset = load(written(tmp_path, separator.join(["größe", "ort", "label"]), rows, encoding=encoding))
    assert dataset.features == ("größe", "ort=Köln", "ort=Münster")
    numbers = both(dataset)[:, 0].double() * dataset.columns[0].scale + dataset.columns[0].mean
    expected = sorted(row + (row % 7) / 10 + 0.05 for row in range(60))
    assert sorted(numbers.tolist()) == pytest.approx(expected, abs=1e-4)
    assert noted in dataset.note
    assert "'größe' has decimal commas" in dataset.note


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"'])
def test_a_line_that_names_the_separator_is_no_row(tmp_path: Path, first: str) -> None:
    rows = ["a;label", *(f"{row / 2};{'xy'[row % 2]}".replace(".", ",") for row in range(60))]
    dataset = load(written(tmp_path, first, rows))
    assert dataset.features == ("a",)
    rows[7] = "1;2;x"
    with pytest.raises(DataError, match="line 9 has 3"):
        load(written(tmp_path, first, rows))
    rows = ["weight, in kg;label", *(f"{row};{'xy'[row % 2]}" for row in range(60))]
    assert load(written(tmp_path, first, rows)).features == ("weight, in kg",)


def test_a_ragged_line_is_named_by_the_separator_of_the_others(tmp_path: Path) -> None:
    rows = [f"{row}\t{'xy'[row % 2]}" for row in range(60)]
    rows[7] = "7\t8\tx"
    with pytest.raises(DataError, match="names 2 columns, and line 9 has 3"):
        load(written(tmp_path, "pressure, systolic, mmHg\tlabel", rows, name="t.tsv"))


def test_commas_that_may_be_thousands_are_no_decimal_commas(tmp_path: Path) -> None:
    rows = [f"{1 + row % 9},{100 + row}\t{'xy'[row % 2]}" for row in range(60)]
    with pytest.raises(DataError, match="'income' = '1,100' is no number"):
        load(written(tmp_path, "income\tlabel", rows, name="t.tsv"))


@pytest.mark.parametrize(
    "values",
    [
        ["1,234,567", "2,345,678"], ["1,234.5", "12.25"], ["1'234", "2'345"], ["1_000", "20"], ["(5)", "3"],
        ["1 234", "23"], ["\N{MINUS SIGN}5", "3"], ["5%", "0.05"], ["$1,234", "$5"], ["-$5", "$6"],
    ],
)  # fmt: skip
def test_numbers_in_another_form_are_no_categories(tmp_path: Path, values: list[str]) -> None:
    rows = [f'"{values[row % 2]}",{"xy"[row % 3 % 2]}' for row in range(60)]
    with pytest.raises(DataError, match=r"'income' = .* is no number"):
        load(written(tmp_path, "income,label", rows))


def test_points_that_may_be_thousands_are_told_and_merged_numbers_refused(tmp_path: Path) -> None:
    rows = [f"{1 + row % 9}.{100 + row};{'xy'[row % 2]}" for row in range(60)]
    assert "Points in 'income' were read as decimal points" in load(written(tmp_path, "income;label", rows)).note
    rows = [f"{2**60 + row % 2},{'xy'[row % 2]}" for row in range(60)]
    with pytest.raises(DataError, match="float64 makes one"):
        load(written(tmp_path, "a,label", rows))


@pytest.mark.parametrize("wrap", ["{}%", "${}", "{} €"])
def test_units_are_cut_off_and_told(tmp_path: Path, wrap: str) -> None:
    rows = [f"{wrap.format(row / 3)},{'xy'[row % 2]}" for row in range(60)]
    dataset = load(written(tmp_path, "rate,label", rows))
    assert dataset.features == ("rate",)
    assert "'rate' are numbers; " in dataset.note
    assert dataset.columns[0].unit in wrap


def test_dates_in_other_forms(tmp_path: Path) -> None:
    for form in ("{0}.{1}.2020", "{0}/{1}/2020", "{1}/{0}/2020"):
        rows = [f"{form.format(1 + row % 28, 1 + row % 12)},{'xy'[row % 2]}" for row in range(60)]
        column = load(written(tmp_path, "seen,label", rows)).columns[0]
        assert column.kind == "date"
        assert column.mean == pytest.approx(18444, abs=60)
    rows = [f"{1 + row % 12}/{1 + row % 11}/2020,{'xy'[row % 2]}" for row in range(60)]
    with pytest.raises(DataError, match="whether the day or the month comes first"):
        load(written(tmp_path, "seen,label", rows))


@pytest.mark.parametrize("day", ["0001-01-01", "9999-12-31", "31.12.1599", "2024-02-30"])
def test_dates_that_cannot_be_are_named(tmp_path: Path, day: str) -> None:
    usual = "02.03.2024" if "." in day else "2024-03-02"
    rows = [f"{day if row == 3 else usual},{row / 3},{'xy'[row % 2]}" for row in range(60)]
    with pytest.raises(
        DataError,
        match=f"line 5: 'seen' = '{day}', where a date of 1678 to 2261, written as .* in training, is expected",
    ):
        load(written(tmp_path, "seen,a,label", rows))


def test_blanks_are_cut_off_and_told_and_other_spellings_refused(tmp_path: Path) -> None:
    rows = [f"{row / 3},{('no', 'yes', 'yes ')[row % 3]},{('ward', 'Ward')[row % 2]}" for row in range(60)]
    dataset = load(written(tmp_path, "a,label,place", rows))
    assert dataset.label_names == ("no", "yes")
    assert "Blanks around 20 values of 'label' were cut off" in dataset.note
    assert "'place' has 'Ward' and 'ward', which stay different values" in dataset.note
    for column in ("label", "client"):
        other = "client" if column == "label" else "label"
        rows = [f"{row / 3},{('No', 'yes', 'Yes')[row % 3]},{'uv'[row % 2]}" for row in range(60)]
        with pytest.raises(DataError, match=f"'{column}' has names that differ .*'Yes' and 'yes'"):
            load(written(tmp_path, f"a,{column},{other}", rows))
    letters = [f"{row / 3},{'aAbBeE'[row % 6]}" for row in range(60)]
    assert load(written(tmp_path, "a,label", letters)).num_classes == 6, "as letters of a handwriting are"
    benign = [f"{row / 3},{'m' if row == 7 else 'MB'[row % 2]}" for row in range(60)]
    with pytest.raises(DataError, match="'M' and 'm'"):
        load(written(tmp_path, "a,label", benign))


@pytest.mark.parametrize("marks", [(30,), (30, 40)], ids=["never closed", "closed rows later"])
def test_a_quotation_mark_swallows_no_rows(tmp_path: Path, marks: tuple[int, ...]) -> None:
    sides = {mark: ('"x', 'x"')[place] for place, mark in enumerate(marks)}
    rows = [f"{row / 3},{'yn'[row % 2]},{sides.get(row, 'xyz'[row % 3])}" for row in range(60)]
    with pytest.raises(DataError, match="a quotation mark in the row of line 32 opens a cell that runs on"):
        load(written(tmp_path, "a,label,place", rows))
    texts = ["\t".join(('"' * (row in marks) + f"film {row % 7} was long", "yn"[row % 2])) for row in range(60)]
    dataset = load(written(tmp_path, "review\tlabel", texts, name="t.tsv"), options=DataOptions(text="review"))
    assert len(both(dataset)) == 60
    assert "Quotation marks in t.tsv were kept as they are" in dataset.note
    quoted = ['"' + text.replace("\t", '"\t"').replace('""', '"') + '"' for text in texts[:30] + texts[41:]]
    literal = written(tmp_path, '"review"\t"label"', [*quoted, '"film was long\ty'], name="t.tsv")
    assert load(literal, options=DataOptions(text="review")).label_names == ("n", "y")


def test_cells_of_several_lines_are_cells(tmp_path: Path) -> None:
    for cell in ("x\nmore, and more", "Hello, friend\nI liked it, really", "Dear John,\nthanks, bye\nYours, Ann"):
        rows = [f'{row / 3},{"yn"[row % 2]},"{row % 3} {cell}"' for row in range(60)]
        assert len(both(load(written(tmp_path, "a,label,place", rows)))) == 60
        dataset = load(written(tmp_path, "text,label", [f'"{row} {cell}",{"yn"[row % 2]}' for row in range(60)]),
                       options=DataOptions(text="text"))  # fmt: skip
        assert len(both(dataset)) == 60


def test_whole_numbers_among_categories_have_one_spelling(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    train = pandas.DataFrame({"stage": list("12x") * 20, "label": list("yn") * 30})
    test = pandas.DataFrame({"stage": [1.0, 2.0, None, 3.0], "label": list("ynyn")})
    dataset = dataset_of((train, test))
    assert dataset.features == ("stage=1", "stage=2", "stage=x")
    assert dataset.test["input"].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert "2 cells of 'stage' have a value that no row of training has." in dataset.note
    codes = [f"{row / 3},{('250', '250.0', 'V10')[row % 3]},{'yn'[row % 2]}" for row in range(60)]
    assert load(written(tmp_path, "a,code,label", codes)).features[1:] == ("code=250", "code=250.0", "code=V10")
    mixed = (
        pandas.DataFrame({"a": range(20), "label": list("yn") * 10}),
        test.assign(a=["0", "1", "1", "2"])[["a", "label"]],
    )
    with pytest.raises(DataError, match="'a' has 20 different values"):  # text in one split is text in all
        dataset_of(mixed)


@pytest.mark.parametrize("other", [["True", "False", "x"], [0, 1, 1]], ids=["text", "numbers"])
def test_flags_beside_text_or_numbers(tmp_path: Path, other: list[Any]) -> None:
    pandas = pytest.importorskip("pandas")
    (tmp_path / "d").mkdir()
    pandas.DataFrame({"z": other * 20, "label": list("yn") * 30}).to_parquet(tmp_path / "d" / "train.parquet")
    pandas.DataFrame({"z": [True, False], "label": list("yn")}).to_parquet(tmp_path / "d" / "test.parquet")
    dataset = load(str(tmp_path / "d"))
    one, two = dataset.test["input"].tolist()
    assert dataset.features == (("z=False", "z=True", "z=x") if other[0] == "True" else ("z",))
    assert (one, two) == ([0, 1, 0], [1, 0, 0]) if other[0] == "True" else one > two


def test_flags_of_parquet_are_those_of_the_text_file_of_training(tmp_path: Path) -> None:
    rows = [f"{('true', 'false', 'unknown')[row % 3]},{'yn'[row % 2]}" for row in range(60)]
    trained = load(written(tmp_path, "smokes,label", rows))
    flags = pyarrow.table({"smokes": [True, False] * 15, "label": list("yn") * 15})
    pyarrow.parquet.write_table(flags, tmp_path / "new.parquet")
    found = load(str(tmp_path / "new.parquet"), columns=trained.columns)
    assert found.features == trained.features == ("smokes=false", "smokes=true", "smokes=unknown")
    assert sorted(map(tuple, both(found).tolist())) == [(0, 1, 0)] * 15 + [(1, 0, 0)] * 15


def test_the_index_of_a_data_frame_is_a_column_where_it_is_named(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    index = pandas.Index([row // 4 for row in range(60)], name="patient")
    frame = pandas.DataFrame({"a": [row / 3 for row in range(60)], "label": list("yn") * 30}, index=index)
    assert dataset_of(frame).features == ("a",)
    assert "Left out: the index 'patient'" in dataset_of(frame).note
    assert "in whole groups" in dataset_of(frame, DataOptions(group="patient")).note
    assert dataset_of(frame, DataOptions(exclude=("patient",))).features == ("a",)
    assert "client" in dataset_of(frame.rename_axis("client")).train
    assert dataset_of(frame.set_index("label")).label_names == ("n", "y")
    assert len(both(dataset_of((frame[["a"]], frame.label)))) == 60, "as scikit-learn takes them: x, y"


@pytest.mark.parametrize("name", ["patient_id", "sampleID", "No"])
def test_numbers_that_are_ids_are_refused_by_name(tmp_path: Path, name: str) -> None:
    rows = [f"{row * 17 % 101},{row / 3},{'xy'[row % 2]}" for row in range(60)]
    with pytest.raises(DataError, match=f"'{name}' has 60 different values"):
        load(written(tmp_path, f"{name},a,label", rows))
    assert load(written(tmp_path, f"{name},a,label", rows), options=DataOptions(exclude=(name,))).features == ("a",)
    asked = load(written(tmp_path, f"{name},a,label", rows), options=DataOptions(columns=(name, "a")))
    assert asked.features == (name, "a"), "where it is asked for"


def test_a_column_of_names_that_is_asked_for_tells_no_single_row(tmp_path: Path) -> None:
    rows = [f"ward {row % 2 if row < 100 else row},{row / 3},{'xy'[row % 2]}" for row in range(200)]
    dataset = load(written(tmp_path, "ward,a,label", rows), options=DataOptions(columns=("ward", "a")))
    assert dataset.features == ("ward=ward 0", "ward=ward 1", "ward=(other)", "a")
    assert "ward 150" not in json.dumps(columns_to_json(dataset.columns))


def test_columns_are_plain_json() -> None:
    columns = (
        TableColumn("n", fill=1.5, mean=1.0, scale=2.0, unit="%"),
        TableColumn("c", "category", values=("a", "b"), other=True),
    )
    assert columns_from_json({"columns": json.loads(json.dumps(columns_to_json(columns)))}) == columns
    with pytest.raises(DataError, match="scale above 0"):
        columns_from_json({"columns": [{"name": "n", "scale": 0.0}]})
    with pytest.raises(DataError, match="no description of columns"):
        columns_from_json({"columns": [{"name": "n", "other_key": 1}]})


def people(rows: int = 60) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {"age": draw.normal(50, 9, rows), "sex": ["f", "m"] * (rows // 2), "label": ["x", "y", "y"] * (rows // 3)}


def test_data_frames_and_tables_of_other_libraries() -> None:
    library = pytest.importorskip("datasets")
    frame = pandas.DataFrame(people())
    frame["sex"] = frame["sex"].astype("category")
    expected = dataset_of(frame)
    assert expected.features == ("age", "sex=f", "sex=m")
    dated = dataset_of(frame.assign(seen=[f"2024-01-{1 + day % 30:02}" for day in range(60)]))
    assert dated.features == ("age", "sex=f", "sex=m", "seen"), "as of a file; pandas reads dates as text"
    for table in (
        pyarrow.table(people()),
        library.Dataset.from_dict(people()),
        library.DatasetDict(train=library.Dataset.from_dict(people())),
        library.Dataset.from_dict(people()).to_iterable_dataset(),
    ):
        assert torch.equal(dataset_of(table).train["input"], expected.train["input"])
    pair = dataset_of((frame[:40], frame[40:]), DataOptions(label="label", exclude=("sex",)))
    assert (pair.features, len(pair.test["label"])) == (("age",), 20)


def test_a_stream_is_read_once_with_its_columns_of_clients_and_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)

    def rows() -> Any:
        for row in draw.permutation(200).tolist():
            part = "test" if row % 5 == 0 else "train"
            yield {"x": row / 2, "site": "ab"[row % 2], "part": part, "label": "uv"[row < 80]}

    stream = datasets.IterableDataset.from_generator(rows)
    for one in (stream, stream.map(lambda row: {"y": row["x"]}).remove_columns("y")):
        options = DataOptions(client="site", split="part", scaling="none")
        dataset = dataset_of(one, options)
        for part, owners in ((dataset.train, 2), (dataset.test, 2)):
            assert torch.equal(part["label"] == 1, part["input"][:, 0] < 40)
            assert torch.equal(part["client"], (part["input"][:, 0] * 2 % 2).long())
            assert len(part["client"].unique()) == owners
        assert (len(dataset.train["label"]), len(dataset.test["label"])) == (160, 40)
    monkeypatch.setattr("fedkeep.data.python_data.STREAM_LIMIT", 50)
    with pytest.raises(DataError, match="more than 50 examples"):
        dataset_of(stream)
    with pytest.raises(DataError, match="no examples"):
        dataset_of(datasets.IterableDataset.from_generator(lambda: iter(())))


def test_images_of_a_stream_are_those_of_its_table() -> None:
    images = [{"bytes": encoded(row, mode="RGB"), "path": None} for row in range(40)]
    for decode in (True, False):
        names = datasets.ClassLabel(names=["u", "v"])
        features = datasets.Features({"image": datasets.Image(decode=decode), "label": names})
        table = datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 20}, features=features)
        expected, found = dataset_of(table), dataset_of(table.to_iterable_dataset())
        assert torch.equal(found.train["input"], expected.train["input"])
        assert found.label_names == expected.label_names == ("u", "v")


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(3), 1


class Stored(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        return torch.full((3, 8, 8), row, dtype=torch.uint8), row % 2


@pytest.mark.parametrize(
    "columns",
    [
        {"x": pandas.Series([1, "a"] * 20, dtype=object)},
        {"x": pandas.Series([2**70, 1] * 20, dtype=object)},
        {"x": [1j] * 40},
        {"x": pandas.period_range("2024-01", periods=40, freq="M")},
        {"x": pandas.cut(range(40), 3)},
        {"x": pandas.arrays.SparseArray([0, 1] * 20)},
    ],
)
def test_columns_that_no_table_holds_are_errors(columns: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="the table cannot be read"):
        dataset_of(pandas.DataFrame({**columns, "label": [0, 1] * 20}))
    twice = pandas.DataFrame(np.ones((40, 3)), columns=["a", "a", "label"])
    with pytest.raises(DataError, match=r"the table cannot be read .*name of its own"):
        dataset_of(twice)


def test_a_data_set_may_fill_one_array_again_and_again() -> None:
    class Reused(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.buffer = torch.zeros(2)

        def __len__(self) -> int:
            return 20

        def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
            return self.buffer.fill_(row), row % 2

    assert sorted(both(dataset_of(Reused()))[:, 0].tolist()) == list(range(20))


def test_data_sets_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = torch.utils.data.TensorDataset(
        torch.rand(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    )
    assert dataset_of(tensors).shape == (5,)
    assert dataset_of((Stored(), Stored())).shape == (3, 8, 8)
    subset = torch.utils.data.Subset(Stored(), range(20))
    assert len(dataset_of(subset).train["label"]) + len(dataset_of(subset).test["label"]) == 20
    monkeypatch.setattr("fedkeep.data.python_data.STREAM_LIMIT", 50)
    with pytest.raises(DataError, match="more than 50 examples"):
        dataset_of(Endless())
    with pytest.raises(DataError, match="arrays have no columns"):
        dataset_of(Stored(), DataOptions(label="y"))
    with pytest.raises(DataError, match=r"pair \(input, class\)"):
        dataset_of(torch.utils.data.TensorDataset(torch.zeros(4, 2)))


class Pictures(torch.utils.data.Dataset[Any]):
    def __init__(self, *pictures: Any) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        return self.pictures[row % len(self.pictures)], row % 2


def test_pictures_of_pillow_are_read_as_files_are(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(256, size=(6, 8, 3), dtype=np.uint8)
    photo = pillow.fromarray(colours)
    for mode in ("RGB", "L", "P", "CMYK", "RGBA", "1"):
        one = photo.quantize(16) if mode == "P" else photo.convert(mode)
        for name in ("a/0", "a/1", "a/2", "b/0"):
            path = tmp_path / mode / f"{name}.{'tif' if mode == 'CMYK' else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            one.save(path)
        of_file, found = load(str(tmp_path / mode)).train["input"], dataset_of(Pictures(one)).train["input"]
        assert torch.equal(found[0], of_file[0]), mode
    floats = dataset_of(Pictures(pillow.fromarray(colours[..., 0] / np.float32(7)))).train["input"]
    assert floats.dtype == torch.float32
    for wrong, says in (
        (pillow.new("I;16", (8, 8)), r"example 1 of the data set has more than 8 bits a channel \(Pillow mode I;16\)"),
        (pillow.new("RGBA", (8, 8), (9, 9, 9, 0)), "example 1 of the data set has transparent pixels"),
    ):
        with pytest.raises(DataError, match=says):
            dataset_of(Pictures(photo, wrong))


@pytest.mark.parametrize("value", [datetime.timedelta(hours=5), datetime.time(13, 30)])
def test_durations_and_times_of_day_are_refused_with_advice(tmp_path: Path, value: Any) -> None:
    table = pyarrow.table({"stay": [value] * 40, "age": list(range(40)), "label": ["x", "y"] * 20})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"'stay' must hold numbers, dates or text, not .* as numbers, such as hours"):
        load(str(tmp_path / "t.parquet"))


def test_a_table_is_not_copied_for_each_of_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` copies what it knows of all columns at each access, so that wide tables took half an hour."""
    copies, make = [0], datasets.Features.__init__

    def counted(features: Any, *arguments: Any, **more: Any) -> None:
        copies[0] += 1
        make(features, *arguments, **more)

    monkeypatch.setattr(datasets.Features, "__init__", counted)
    seen = []
    for width in (3, 30):
        rows = [f"{','.join(str(row * column % 7) for column in range(width))},{'xy'[row % 2]}" for row in range(40)]
        header = ",".join([*(f"c{column}" for column in range(width)), "label"])
        assert load(written(tmp_path, header, rows, name=f"{width}.csv")).shape == (width,)
        seen.append(copies[0] - sum(seen))
    assert seen[0] == seen[1]


def test_classes_without_a_test_example_are_named(tmp_path: Path) -> None:
    """Results say nothing about them, whoever made the test split."""
    rows = [f"{row % 7},{'uv'[row % 2]}" for row in range(40)]
    says = "No test example is of 'w', and 2 training examples are"
    assert says in load(written(tmp_path, "a,label", [*rows, "1,w", "2,w"])).note
    (tmp_path / "d").mkdir()
    written(tmp_path, "a,label", [*rows, "1,w", "2,w"], name="d/train.csv")
    written(tmp_path, "a,label", rows, name="d/test.csv")
    assert says in load(str(tmp_path / "d")).note
    assert "No test example" not in load(written(tmp_path, "a,label", rows)).note


def test_a_column_that_only_test_rows_fill_is_refused_but_at_a_site_of_a_run() -> None:
    train = pandas.DataFrame({**people(), "late": [np.nan] * 60})
    test = train.assign(late=np.arange(60) * 1e5 + 0.5)
    with pytest.raises(DataError, match=r"'late' is empty in the training rows, .*exclude=\['late'\] in Python"):
        dataset_of((train, test))
    columns = (TableColumn("age", mean=50, scale=9), TableColumn("late", fill=5, mean=1, scale=2))
    splits = {name: datasets.Dataset.from_pandas(table) for name, table in (("train", train), ("test", test))}
    site = assemble_own("site", OwnSplits(splits), "site", DataOptions(), columns=columns)
    assert (site.train["input"][:, 1] == 2).all()


def test_an_excluded_client_is_nobody_also_at_a_site_of_a_run(tmp_path: Path) -> None:
    rows = [f"{row % 7},{'' if row < 9 else 'n'},{'uv'[row % 2]}" for row in range(40)]
    path = written(tmp_path, "a,client,label", rows)
    with pytest.raises(DataError, match="have no 'client'"):
        load(path)
    options = DataOptions(exclude=("client", "id"))
    with pytest.raises(DataError, match="there is no column 'id'"):
        load(path, options=options)
    found = load(path, options=DataOptions(exclude=("client",)))
    assert (found.features, "client" in found.train) == (("a",), False)
    assert "client" not in load(path, options=options, columns=found.columns).train, "others may have had an id"


def test_columns_beside_images_are_told(tmp_path: Path) -> None:
    columns = {"image": [encoded(row) for row in range(40)], "age": list(range(40)), "label": ["x", "y"] * 20}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    assert "Not used beside the images: 'age'." in load(str(tmp_path / "t.parquet")).note
    assert "Not used" not in load(str(tmp_path / "t.parquet"), options=DataOptions(exclude=("age",))).note


def test_advice_works_as_it_stands(tmp_path: Path) -> None:
    path = written(tmp_path, "Patient's id,a,label", [f"P{row},{row % 7},{'xy'[row % 2]}" for row in range(40)])
    with pytest.raises(DataError) as raised:
        load(path)
    found = re.search(r"--set (.*?), or exclude=", str(raised.value))
    assert found is not None
    assert shlex.split(found[1]) == ['data.exclude=["Patient\'s id"]']
    grid = {"x": [np.eye(3).tolist()] * 40, "label": ["x", "y"] * 20}
    features = datasets.Features({"x": datasets.Array2D((3, 3), "float32"), "label": datasets.Value("string")})
    with pytest.raises(DataError, match=r"arrays: \(x, y\) in Python"):
        dataset_of(datasets.Dataset.from_dict(grid, features=features))
    for first in ([], None, [None, 1.0]):
        lists = pyarrow.array([first, *[[0.5, 1.0]] * 39], pyarrow.list_(pyarrow.float64()))
        with pytest.raises(DataError, match=r"row 0 must be a list of numbers, not (\[\]|None|\[None, 1.0\])"):
            dataset_of(pyarrow.table({"x": lists, "label": ["x", "y"] * 20}))
    with pytest.raises(DataError, match=r"whole numbers or text, not .*, as 0.5"):
        dataset_of(pyarrow.table({"a": [1.5, 2.5] * 20, "client": [1.0] * 39 + [0.5], "label": ["x", "y"] * 20}))


def test_numbers_that_float32_merges_are_refused_where_they_are_not_scaled() -> None:
    years = {"id": [20_240_000 + 37 * row % 200 for row in range(200)], "label": ["x", "y"] * 100}
    named = DataOptions(columns=("id",), scaling="none")
    with pytest.raises(
        DataError, match=r"'id' has 160 different numbers, and float32 keeps 8\d of them.*scaling=standard"
    ):
        dataset_of(pandas.DataFrame(years), named)
    assert len(both(dataset_of(pandas.DataFrame(years), DataOptions(columns=("id",)))).unique()) == 200
    draw = np.random.default_rng(0).normal(size=20_000)
    assert len(np.unique(draw.astype(np.float32))) < len(draw)
    for kept in (draw, np.where(draw > 0, 0.1 + 0.2, 0.3)):
        dataset_of(pandas.DataFrame({"id": kept, "label": ["x", "y"] * 10_000}), named)


@pytest.mark.parametrize("sign", [1, -1])
def test_whole_numbers_of_which_float64_makes_one_are_refused(sign: int) -> None:
    frame = pandas.DataFrame({"id": [sign * (2**53 + 1 + row) for row in range(40)], "label": ["x", "y"] * 20})
    with pytest.raises(DataError, match="of which float64 makes one: ids"):
        dataset_of(frame, DataOptions(columns=("id",)))


def test_rows_of_a_test_split_may_be_alike() -> None:
    found = read_lists([[1e6 + 0.01, 0.5], [1e6 + 0.02, 0.7]], "test split", 10, Problems())
    assert found.shape == (2, 2)


def test_lists_of_numbers_that_float32_merges_are_refused(tmp_path: Path) -> None:
    lists = [[1.7e9 + row, float(row)] for row in range(40)]
    pyarrow.parquet.write_table(pyarrow.table({"x": lists, "label": ["a", "b"] * 20}), tmp_path / "times.parquet")
    with pytest.raises(DataError, match="float32 makes one of all that stand in its place"):
        load(str(tmp_path / "times.parquet"))
