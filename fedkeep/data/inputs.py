"""Inputs without labels, as a trained network takes them: rows of a table, texts, lists, arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.data.arrays import read_inputs_of_npz
from fedkeep.data.data_options import DataOptions
from fedkeep.data.own_files import TABLE_SUFFIXES, find_data_files
from fedkeep.data.readers import read_column
from fedkeep.data.tables import is_list, read_lists, read_values
from fedkeep.data.tokens import tokenise
from fedkeep.errors import DataError, did_you_mean, in_one_line

SUFFIXES = (*TABLE_SUFFIXES, ".npz", ".txt")
"""The suffixes of the files that are read."""


def read_rows(path: Path, about: Mapping[str, Any], options: DataOptions) -> Tensor:
    """Return the rows of a file as inputs of a trained network.

    ``path``: A table (.csv, .tsv, .parquet), a text in each line (.txt), or arrays (.npz) of which ``x`` is the input.
    ``about``: ``"shape"``, ``"type"``, ``"features"``, ``"mean"`` and ``"std"`` of the inputs in training.
    ``options``: How the training data were read.
    Returns: ``[n, *shape]``.
    """
    suffix = path.suffix.lower()
    if suffix == ".npz":
        inputs = read_inputs_of_npz(path)
    elif suffix == ".txt":
        inputs = tokenise(_lines(path, options), str(path), options.length, options.vocabulary)
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
    # A column that was text in training is text here too, such as a code of which only the digits occur.
    as_text = {feature[:place] for feature in about["features"] for place, sign in enumerate(feature) if sign == "="}
    table, where = find_data_files(path, as_text).read()["train"], str(path)
    if about["features"]:
        return _features(table, where, about)
    if options.text:
        _check_column(options.text, table.features, where)
        return tokenise(read_column(table, options.text, where), where, options.length, options.vocabulary)
    lists = [name for name in options.columns or table.features if name in table.features and is_list(table, name)]
    if len(lists) != 1:
        raise DataError(f"{where}: one column of lists is the input, and there are {len(lists)}.")
    return read_lists(read_column(table, lists[0], where), where, options.length)


def _features(table: Any, where: str, about: Mapping[str, Any]) -> Tensor:
    """Return a table's features in the order and with the scaling of training."""
    names: Sequence[str] = about["features"]
    columns: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
    known: dict[str, set[str]] = {}
    for name in names:
        column = name if name in table.features else _column_of(name, table.features)
        _check_column(column, table.features, where)
        columns.setdefault(column, read_values(table, column, where))
        if column != name:
            known.setdefault(column, set()).add(name.removeprefix(f"{column}="))
    for column, values in columns.items():
        is_text = column in known
        if (values.dtype.kind == "O") != is_text:
            raise DataError(f"{where}: the column {column!r} held {'text' if is_text else 'numbers'} in training.")
        row = next((row for row, value in enumerate(values) if value not in known[column]), None) if is_text else None
        if row is not None:
            hint = did_you_mean(values[row], known[column])
            raise DataError(f"{where}: row {row} has {column!r} = {values[row]!r}, which no training row had.{hint}")
    numbers = []
    for name in names:
        column = name if name in columns else _column_of(name, columns)
        numbers.append(columns[column] if column == name else columns[column] == name.removeprefix(f"{column}="))
    stacked = torch.from_numpy(np.stack([np.asarray(values, np.float64) for values in numbers], 1))
    mean, std = (torch.tensor(about[key], dtype=torch.float64) for key in ("mean", "std"))
    return ((stacked - mean) / std).float()


def _column_of(feature: str, columns: Any) -> str:
    """Return the column of a feature ``"column=value"``; the feature itself if there is none."""
    found = [name for name in columns if feature.startswith(f"{name}=")]
    return max(found, key=len) if found else feature


def _check_column(column: str, columns: Any, where: str) -> None:
    if column not in columns:
        raise DataError(f"{where}: there is no column {column.split('=')[0]!r}.{did_you_mean(column, columns)}")
