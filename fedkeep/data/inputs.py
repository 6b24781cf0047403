"""Inputs without labels, as a trained network takes them: rows of a table, texts, lists, arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedkeep.data.arrays import read_inputs_of_npz
from fedkeep.data.columns import columns_from_json, transform
from fedkeep.data.data_options import DataOptions
from fedkeep.data.own_files import TABLE_SUFFIXES, find_data_files
from fedkeep.data.problems import Problems, Where
from fedkeep.data.readers import read_column
from fedkeep.data.tables import is_list, parse, read_lists
from fedkeep.data.tokens import tokenise
from fedkeep.errors import DataError, did_you_mean, in_one_line

SUFFIXES = (*TABLE_SUFFIXES, ".npz", ".txt")
"""The suffixes of the files that are read."""


def read_rows(path: Path, about: Mapping[str, Any], options: DataOptions) -> Tensor:
    """Return the rows of a file as inputs of a trained network.

    ``path``: A table (.csv, .tsv, .parquet), a text in each line (.txt), or arrays (.npz) of which ``x`` is the input.
    ``about``: ``"shape"``, ``"type"`` and ``"columns"`` of the inputs in training.
    ``options``: How the training data were read.
    Returns: ``[n, *shape]``.
    """
    suffix = path.suffix.lower()
    if suffix == ".npz":
        inputs = read_inputs_of_npz(path)
    elif suffix == ".txt":
        inputs = tokenise(_lines(path, options), str(path), options.length, options.vocabulary, Problems())
    elif suffix in TABLE_SUFFIXES:
        inputs = _read_table(path, about, options)
    else:
        raise DataError(f"{path} is none of {', '.join(SUFFIXES)}, and the model takes no images.")
    shape, kind = list(about["shape"]), str(about["type"])
    found = str(inputs.dtype).removeprefix("torch.")
    if list(inputs.shape[1:]) != shape or found != kind:
        raise DataError(
            f"{path} has {found} inputs of shape {list(inputs.shape[1:])}, and the model takes {kind} of shape {shape}."
        )
    if inputs.is_floating_point() and not bool((finite := inputs.isfinite().flatten(1).all(1)).all()):
        row = int((~finite).nonzero()[0])
        raise DataError(
            f"{path}: row {row} holds a number that is not finite. Fill in what is missing, or leave it out."
        )
    return inputs


def _lines(path: Path, options: DataOptions) -> list[str]:
    if not options.text:
        raise DataError(f"{path} holds text, and the model was trained on something else.")
    try:
        text = path.read_text(encoding="utf-8-sig")  # newlines are \n by now; splitlines() would split at others too
        return text.removesuffix("\n").split("\n") if text else []
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text ({in_one_line(error, 200)}). Save it as UTF-8.") from error


def _read_table(path: Path, about: Mapping[str, Any], options: DataOptions) -> Tensor:
    own, problems = find_data_files(path).read(), Problems()
    table, where = own.splits["train"], Where(str(path), own.lines.get("train"))
    columns = columns_from_json(about)
    if columns:
        values = {}
        for column in columns:
            with problems.collect():
                _check_column(column.name, table.features, where)
                values[column.name] = parse(read_column(table, column.name, str(where)), column, where, own.separator)
        problems.check(where)
        return transform(columns, values)
    if options.text:
        _check_column(options.text, table.features, where)
        texts = read_column(table, options.text, str(where))
        return tokenise(texts, where, options.length, options.vocabulary, problems)
    lists = [name for name in options.columns or table.features if name in table.features and is_list(table, name)]
    if len(lists) != 1:
        raise DataError(f"{where}: one column of lists is the input, and there are {len(lists)}.")
    dtype = "uint8" if about["type"] == "float32" else ""
    return read_lists(read_column(table, lists[0], str(where)), where, options.length, problems, dtype)


def _check_column(column: str, columns: Any, where: Where) -> None:
    if column not in columns:
        raise DataError(f"{where}: there is no column {column!r}.{did_you_mean(column, columns)}")
