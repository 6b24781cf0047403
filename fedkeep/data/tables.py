"""Tables as inputs: columns of numbers are scaled, columns of text become one feature for each value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedkeep.data.data_options import DataOptions
from fedkeep.data.features import Features, standardise
from fedkeep.data.readers import check_filled, read_column, to_nfc
from fedkeep.data.schema import Schema
from fedkeep.data.tokens import pad, tokenise
from fedkeep.errors import DataError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MOSTLY_NUMBERS = 0.9
"""The share of numbers from which on a column of text is taken for one of numbers with something wrong in it."""

_NUMBER = re.compile(r"\s*[-+]?(\d+[.,]?\d*|[.,]\d+)([eE][-+]?\d+)?\s*")

MAX_VALUES = 1000
"""The most values of a column of text; a column with more is a name or a free text, and no feature."""


def read_inputs(
    tables: Sequence[Any], wheres: Sequence[str], schema: Schema, options: DataOptions, held_out: Tensor | None = None
) -> tuple[list[Tensor], dict[str, tuple[Any, ...]]]:
    """Return the inputs of each split of a table: token ids, or numbers.

    ``tables``: The training split, and the test split if there is one.
    ``wheres``: What errors call each of them.
    ``schema``: Which columns are the label, the input and something else.
    ``options``: Text, scaling and length.
    ``held_out``: bool ``[n]``: the rows of the only split that will be test rows; numbers are scaled by the others.
    Returns: Of each split: int64 ``[n, length]`` or float32 ``[n, features]``.
    Returns: The fields ``features``, ``mean`` and ``std`` of a `DataSet`, if there are features.
    """
    pairs = list(zip(tables, wheres, strict=True))
    if options.text:
        texts = (read_column(table, options.text, where) for table, where in pairs)
        lengths = {"length": options.length, "vocabulary": options.vocabulary}
        return [tokenise(rows, where, **lengths) for rows, where in zip(texts, wheres, strict=True)], {}
    if len(schema.inputs) == 1 and is_list(tables[0], schema.inputs[0]):
        columns = [read_column(table, schema.inputs[0], where) for table, where in pairs]
        floats = _holds_floats(columns[0])
        return [
            _vectors(rows, where) if floats else pad(rows, where, options.length)
            for rows, where in zip(columns, wheres, strict=True)
        ], {}
    parts = list(_features(pairs, schema.inputs))
    if options.scaling == "none":
        numbers = [part.numbers.float() for part in parts]
        mean, std = [0.0] * len(parts[0].names), [1.0] * len(parts[0].names)
    else:
        train, test, mean, std = standardise(parts[0], parts[1] if len(parts) > 1 else None, held_out)
        numbers = [train] if test is None else [train, test]
    return numbers, {"features": parts[0].names, "mean": tuple(mean), "std": tuple(std)}


def is_list(table: Any, column: str) -> bool:
    """Return whether a column of a table holds lists."""
    feature = table.features[column]
    return hasattr(feature, "feature") or isinstance(feature, list)


def read_lists(rows: Sequence[Any], where: str, length: int) -> Tensor:
    """Return lists of numbers as float32 ``[n, numbers]``, lists of token ids as int64 ``[n, length]``.

    ``where``: What errors call them.
    """
    return _vectors(rows, where) if rows and _holds_floats(rows) else pad(rows, where, length)


def _holds_floats(rows: Sequence[Any]) -> bool:
    return isinstance(rows[0], list) and any(isinstance(one, float) for one in rows[0])


def _vectors(rows: Sequence[Any], where: str) -> Tensor:
    """Return lists of numbers of one length as float32 ``[n, length]``."""
    for row, numbers in enumerate(rows):
        if not isinstance(numbers, list) or not all(isinstance(one, int | float) for one in numbers):
            raise DataError(f"{where}: row {row} must be a list of numbers, not {str(numbers)[:80]}.")
        if len(numbers) != len(rows[0]):
            raise DataError(f"{where}: row {row} has {len(numbers)} numbers, the first has {len(rows[0])}.")
    return torch.tensor(np.asarray(rows, np.float64), dtype=torch.float32)


def _features(pairs: Sequence[tuple[Any, str]], names: Sequence[str]) -> Iterator[Features]:
    """Yield the features of each split, the same ones in all."""
    columns = [[read_values(table, name, where) for name in names] for table, where in pairs]
    kept: list[tuple[str, list[Array]]] = []
    for place, name in enumerate(names):
        of_splits = [split[place] for split in columns]
        if len({values.dtype.kind for values in of_splits}) > 1:
            raise DataError(f"{pairs[0][1]}: the column {name!r} holds numbers in one split and text in another.")
        if of_splits[0].dtype.kind == "f":
            kept.append((name, of_splits))
            continue
        _check_text(name, of_splits, [where for _, where in pairs])
        found = np.unique(np.concatenate(of_splits))
        if len(found) > MAX_VALUES:
            raise DataError(
                f"{pairs[0][1]}: the column {name!r} has {len(found)} different texts, too many to be one feature "
                f"each. Leave it out with data.columns, or read it as text: data.text={name!r}."
            )
        kept += [(f"{name}={value}", [(values == value).astype(np.float64) for values in of_splits]) for value in found]
    titles = tuple(title for title, _ in kept)
    is_value = tuple(title not in names for title in titles)
    for split in range(len(pairs)):
        yield Features(titles, torch.from_numpy(np.stack([values[split] for _, values in kept], 1)), is_value)


def _check_text(name: str, of_splits: Sequence[Array], wheres: Sequence[str]) -> None:
    """Raise `DataError` if a column of text is one of numbers but for some values, such as ``?`` or ``<0.5``."""
    share = np.mean([bool(_NUMBER.fullmatch(value)) for values in of_splits for value in values])
    if share < MOSTLY_NUMBERS:
        return
    for values, where in zip(of_splits, wheres, strict=True):
        for row, value in enumerate(values):
            if "," in value or not _NUMBER.fullmatch(value):
                raise DataError(
                    f"{where}: row {row} has {name!r} = {value!r}, which is no number, but {share:.0%} of the column "
                    "look like numbers. Write a number there (3.5, not 3,5), remove the row, or leave the column out "
                    "with data.columns. If its values are categories, let each begin with a letter."
                )


def read_values(table: Any, name: str, where: str) -> Array:
    """Return a column as float64 or as text.

    ``where``: What errors call the table.
    """
    values = read_column(table, name, where)
    check_filled(values, name, where)
    if all(isinstance(value, str) for value in values):
        return np.asarray([to_nfc(value) for value in values], dtype=object)
    if not all(isinstance(value, bool | int | float) for value in values):
        odd = next(value for value in values if not isinstance(value, bool | int | float))
        raise DataError(
            f"{where}: the column {name!r} must hold numbers or text, not {table.features[name]} such as "
            f"{str(odd)[:80]!r}. Name the columns that are the input: data.columns."
        )
    try:
        numbers: Array = np.asarray(values, np.float64)
    except OverflowError:
        numbers = np.asarray([np.inf])
    wrong = np.flatnonzero(~(np.abs(numbers) <= np.finfo(np.float32).max))
    if len(wrong):
        raise DataError(f"{where}: row {wrong[0]} has {name!r} = {values[wrong[0]]}, which float32 cannot hold.")
    return numbers
