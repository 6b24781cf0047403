"""Splits as they were read, to a `DataSet`: labels numbered, images decoded, a test split where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.data.dataset import DataSet, channel_statistics
from fedkeep.data.decode import decode
from fedkeep.data.holdout import hold_out
from fedkeep.data.layout import Layout
from fedkeep.data.splits import Split
from fedkeep.errors import DataError, did_you_mean

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]


def assemble(
    name: str,
    splits: Mapping[str, Split],
    layout: Layout,
    normalisation: Normalisation | None = None,
    note: str = "",
) -> DataSet:
    """Read, decode and check a data set.

    Parameters
    ----------
    name : the data set's name.
    splits : by name; the layout says which of them count.
    layout : which columns and splits play which part.
    normalisation : mean and standard deviation per channel; None computes them from the training images.
    note : what is known about the data set; what was found in this copy is added.

    Raises
    ------
    DataError
        For whatever is missing, mixed or out of range.
    """
    present = [split for split in (layout.train, layout.test) if split in splits]
    if layout.train not in splits or (layout.test not in splits and not layout.share):
        missing = layout.train if layout.train not in splits else layout.test
        raise DataError(f"{name}: the split {missing!r} is missing.{did_you_mean(missing, splits)}")
    used = [splits[split] for split in present]
    for split in used:
        layout.check(split)
        if split.rows == 0:
            raise DataError(f"{split.where}: there are no rows.")
    labels, names, declared = number(used, layout.label)
    notes = [note]
    if len(names) < declared:
        notes.append(f"{len(names)} of the {declared} declared classes occur in this copy; labels are renumbered.")
    further = {name: number(used, source)[0] for source, name in layout.columns}
    halves: list[dict[str, Tensor]] = []
    for place, split in enumerate(used):
        images = decode(split.read(layout.image), split.rows, split.where, layout.channels, layout.side)
        columns = {column: values[place] for column, values in further.items()}
        halves.append({"image": images, "label": labels[place], **columns})
    if len(halves) == 1:
        halves, found = _halve(halves[0], layout)
        notes.append(found)
    elif layout.test not in ("", "test"):
        notes.append(f"The split {layout.test!r} is the test set.")
    train, test = _one_depth(halves)
    mean, std = normalisation or channel_statistics(train["image"])
    return DataSet(name, train, test, names, mean, std, " ".join(filter(None, notes)))


def number(splits: Sequence[Split], column: str) -> tuple[list[Tensor], tuple[str, ...], int]:
    """Number a column's values 0, 1, ... over all splits together.

    Values that a ClassLabel feature declares keep their order and lose those that do not occur; others are sorted.

    Returns
    -------
    The numbers of each split (int64), the names of the numbers, and how many names were declared.

    Raises
    ------
    DataError
        For values that are missing, are neither integers nor text, or lie outside the declared classes.
    """
    columns = [_plain(split, column) for split in splits]
    if len({values.dtype.kind for values in columns}) > 1:
        raise DataError(f"{splits[0].where}: the column {column!r} holds numbers in one split and text in another.")
    occurring, inverse = np.unique(np.concatenate(columns), return_inverse=True)
    feature = splits[0].features[column]
    declared = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    if declared is not None and occurring.dtype.kind == "i":
        for split, values in zip(splits, columns, strict=True):
            _check_range(split, column, values, len(declared))
            if list(split.features[column].get("names") or ()) != list(declared):
                raise DataError(
                    f"{split.where}: the column {column!r} declares other classes than {splits[0].where}. Write both "
                    "splits with the same class names in the same order."
                )
        names = tuple(str(declared[value]) for value in occurring)
    else:
        names = tuple(str(value) for value in occurring)
    cuts = np.cumsum([len(values) for values in columns])[:-1]
    numbers = [torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in np.split(inverse, cuts)]
    return numbers, names, len(declared) if declared is not None else len(names)


def _plain(split: Split, column: str) -> np.ndarray[Any, np.dtype[Any]]:
    values = split.values(column)
    missing = sum(value is None or value != value for value in values)
    if missing:
        raise DataError(f"{split.where}: {missing} rows have no {column!r} (empty or NaN). Remove or fill them.")
    array = np.asarray(values)
    if array.dtype.kind in "biu" and array.ndim == 1:
        return array.astype(np.int64)
    if array.dtype.kind == "U":
        return array
    raise DataError(
        f"{split.where}: the column {column!r} must hold integers or text, not {split.features[column]} such as "
        f"{values[0]!r}."
    )


def _check_range(split: Split, column: str, values: np.ndarray[Any, np.dtype[Any]], classes: int) -> None:
    wrong = np.flatnonzero((values < 0) | (values >= classes))
    if len(wrong):
        hint = " A Hub test split with -1 hides its labels; use another split." if values[wrong[0]] == -1 else ""
        raise DataError(
            f"{split.where}: row {wrong[0]} has {column!r} = {values[wrong[0]]}, but {classes} declared classes allow "
            f"0..{classes - 1} only.{hint}"
        )


def _halve(data: Mapping[str, Tensor], layout: Layout) -> tuple[list[dict[str, Tensor]], str]:
    chosen = hold_out(data[layout.group or "label"], layout.share)
    if not bool(chosen.any()):
        raise DataError(
            f"There is no test split, and with {len(data['label'])} images there are too few to hold one out. Add a "
            "folder or a file 'test'."
        )
    halves = [{name: column[rows] for name, column in data.items()} for rows in (~chosen, chosen)]
    return halves, f"No test split in the source: {layout.share:.0%} of each {layout.group or 'class'} held out."


def _one_depth(halves: Sequence[dict[str, Tensor]]) -> Sequence[dict[str, Tensor]]:
    """Give greyscale images three channels where the other split has colour."""
    depth = max(half["image"].shape[1] for half in halves)
    return [{**half, "image": half["image"].expand(-1, depth, -1, -1).contiguous()} for half in halves]
