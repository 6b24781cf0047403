"""Which columns and splits of a data set are inputs, labels, training and test data: given, or inferred."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.data.data_options import DataOptions
from fedkeep.data.readers import TEST_NAMES, RawSplits, check_filled, datasets_library, read_column, to_nfc
from fedkeep.errors import DataError, did_you_mean

_IMAGE_NAMES = ("image", "img")
CLIENT = "client"
"""The column of a `DataSet` that says whose an example is."""
GROUP = "group"
"""The column of a `DataSet` that says which examples belong together, such as those of a patient."""
_INDEX = re.compile(r"|Unnamed: \d+(\.\d+)?|__index_level_\d+__")  # what pandas and R call the numbers of rows
_LABEL_NAMES = ("label", "labels", "fine_label", "character", "target", "class")


@dataclass(frozen=True)
class Schema:
    """Name the columns and splits of a stored data set.

    ``image``, ``label``: The columns of images and labels; without images the first is empty.
    ``train``, ``test``: The splits; an empty test split is made from the training split (see `test_share`).
    ``columns``: Further columns: the stored name and the name in a `DataSet`. Their values are numbered in sorted
        order.
    ``group``: A name in `columns` within which a missing test split is held out; empty for within each class. `GROUP`
        is held out in whole groups.
    ``test_share``: Share of each group that is held out if there is no test split; with 0 a missing test split is an
        error.
    ``channels``: 1 or 3 converts all images; None leaves them.
    ``side``: Pixels to which the middle square of each image is resized; None leaves images as they are.
    ``note``: Which columns were left out, and why.
    """

    image: str = "image"
    label: str = "label"
    train: str = "train"
    test: str = "test"
    columns: tuple[tuple[str, str], ...] = ()
    group: str = ""
    test_share: float = 0.0
    channels: int | None = None
    side: int | None = None
    inputs: tuple[str, ...] = ()
    note: str = ""

    def check(self, split: Any, where: str, optional: Sequence[str] = ()) -> None:
        """Raise `DataError` if the table of a split lacks a column; the error names the nearest that it has."""
        further = [stored for stored, name in self.columns if name not in optional]
        for column in filter(None, (self.image, self.label, *self.inputs, *further)):
            if column not in split.features:
                raise DataError(
                    f"{where}: the column {column!r} is missing.{did_you_mean(column, split.features)} "
                    "Rename the columns, or write the file again with Hugging Face `datasets`."
                )


def infer_schema(splits: RawSplits, where: str, options: DataOptions) -> Schema:
    """Return the schema of a data set that is not in the catalog.

    ``splits``: The splits by name.
    ``where``: What errors call the data set.
    ``options``: The columns that the user names.
    """
    if "train" not in splits:
        raise DataError(
            f"{where}: there is no split 'train'.{did_you_mean('train', splits)} A data set needs 'train' and should "
            f"have one of {', '.join(map(repr, TEST_NAMES))}."
        )
    features = splits["train"].features
    test = next((name for name in TEST_NAMES if name in splits), "")
    if not features:
        raise DataError(f"{where}: it is not known which columns there are. Write the file again.")
    for column in filter(None, (options.label, options.client, options.group, options.text, *options.columns)):
        if column not in features:
            raise DataError(f"{where}: there is no column {column!r}.{did_you_mean(column, features)}")
    client = options.client or (CLIENT if CLIENT in features else "")
    others = {name: features[name] for name in features if name not in (client or None, options.group or None)}
    label = options.label or _label_column(others, where)
    columns = tuple((stored, name) for stored, name in ((client, CLIENT), (options.group, GROUP)) if stored)
    group = GROUP if options.group else ""
    images = [name for name in features if _is_image(features[name]) and name not in (label, client, options.group)]
    if images and not (options.text or options.columns):
        image = _only("Image", images, _IMAGE_NAMES, features, where)
        return Schema(image=image, label=label, test=test, columns=columns, group=group, test_share=0.2)
    chosen = (options.text,) if options.text else options.columns
    taken = {label, *(stored for stored, _ in columns)}
    rest = [name for name in features if name not in taken]
    index = [name for name in rest if _INDEX.fullmatch(name) and not chosen]
    inputs = chosen or tuple(name for name in rest if name not in index)
    if not inputs:
        raise DataError(f"{where}: besides {label!r} there is no column that could be the input.")
    note = (
        f"Left out as numbers of rows: the column {', '.join(map(repr, index))}. To use it, rename it." if index else ""
    )
    return Schema("", label, test=test, columns=columns, group=group, test_share=0.2, inputs=inputs, note=note)


def _is_image(feature: Any) -> bool:
    """Return whether a column holds images, declared or as plain bytes."""
    library = datasets_library("Reading a data set")
    plain = isinstance(feature, library.Value) and feature.dtype in ("binary", "large_binary")
    return isinstance(feature, library.Image) or plain or (isinstance(feature, dict) and "bytes" in feature)


def _class_names(feature: Any) -> list[str] | None:
    """Return the names that a ClassLabel column declares; None for another column."""
    is_label = isinstance(feature, datasets_library("Reading a data set").ClassLabel)
    return list(feature.names) if is_label else None


def _label_column(features: Mapping[str, Any], where: str) -> str:
    declared = [name for name in features if _class_names(features[name]) is not None]
    if declared:
        return _only("ClassLabel", declared, _LABEL_NAMES, features, where)
    for name in _LABEL_NAMES:
        if name in features:
            return name
    raise DataError(
        f"{where}: no column says which class an example has (columns: {', '.join(features)}). Name it: data.label, or "
        "--set data.label=COLUMN."
    )


def _only(kind: str, names: Sequence[str], usual: tuple[str, ...], features: Mapping[str, Any], where: str) -> str:
    """Return the only column of a kind, or the one of several with a usual name."""
    chosen = names[:1] if len(names) == 1 else [name for name in usual if name in names][:1]
    if chosen:
        return chosen[0]
    found = f"several ({', '.join(names)})" if names else f"none among {', '.join(features) or 'no columns'}"
    raise DataError(f"{where}: one {kind} column is needed but there is {found}. Name the one to use {usual[0]!r}.")


def number_values(
    splits: Sequence[Any], wheres: Sequence[str], column: str
) -> tuple[list[Tensor], tuple[str, ...], int]:
    """Replace a column's values by numbers 0, 1, ..., the same ones in all splits.

    Values that a ClassLabel feature declares keep their order and lose those that do not occur; others are sorted.

    ``wheres``: What errors call each of them.
    Returns: int64 ``[n]`` of each split.
    Returns: How many names the column declares.
    """
    columns = [_values(split, column, where) for split, where in zip(splits, wheres, strict=True)]
    if len({values.dtype.kind for values in columns}) > 1:
        raise DataError(f"{wheres[0]}: the column {column!r} holds numbers in one split and text in another.")
    occurring, inverse = np.unique(np.concatenate(columns), return_inverse=True)
    declared = _class_names(splits[0].features[column])
    if declared is not None and occurring.dtype.kind == "i":
        for split, where, values in zip(splits, wheres, columns, strict=True):
            _check_range(values, len(declared), column, where)
            if (_class_names(split.features[column]) or []) != declared:
                raise DataError(
                    f"{where}: the column {column!r} declares other classes than {wheres[0]}. Write both splits with "
                    "the same class names in the same order."
                )
        names = tuple(to_nfc(str(declared[value])) for value in occurring)
    else:
        names = tuple(str(value) for value in occurring)
    cuts = np.cumsum([len(values) for values in columns])[:-1]
    numbers = [torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in np.split(inverse, cuts)]
    return numbers, names, len(declared) if declared is not None else len(names)


def _values(split: Any, column: str, where: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a column as an array of int64 or of text."""
    values = read_column(split, column, where)
    if not values:
        raise DataError(f"{where}: there are no rows.")
    check_filled(values, column, where)
    array = np.asarray(values)
    if array.dtype.kind in "biu" and array.ndim == 1:
        return array.astype(np.int64)
    if array.dtype.kind == "U" and array.ndim == 1:
        return np.asarray([to_nfc(value) for value in values], dtype=str)
    raise DataError(
        f"{where}: the column {column!r} must hold integers or text, not {split.features[column]} such as "
        f"{values[0]!r}."
    )


def _check_range(values: np.ndarray[Any, np.dtype[Any]], num_classes: int, column: str, where: str) -> None:
    wrong = np.flatnonzero((values < 0) | (values >= num_classes))
    if len(wrong):
        hint = " A Hub test split with -1 hides its labels; use another split." if values[wrong[0]] == -1 else ""
        raise DataError(
            f"{where}: row {wrong[0]} has {column!r} = {values[wrong[0]]}, but {num_classes} declared classes allow "
            f"0..{num_classes - 1} only.{hint}"
        )
