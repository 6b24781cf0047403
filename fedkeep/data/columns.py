"""How a table's columns become features: imputed, scaled, one feature for each value; plain numbers and names."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedkeep.data.readers import to_nfc
from fedkeep.errors import DataError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

OTHER, MISSING = "(other)", "(missing)"
"""The value that stands for rare and unknown ones, and the value of an empty cell."""
MIN_ROWS = 5
"""A value of fewer training rows is no feature of its own, and so in no exported file."""
MAX_VALUES = 1000
"""The most features of one column; rarer values are together."""


@dataclass(frozen=True)
class TableColumn:
    """A column of a table as a network takes it; it tells nothing about single rows.

    fill, mean, scale : what an empty cell gets, and what numbers (of dates: days since 1970) are scaled with.
    values : the values of a category that are a feature each; `other` says whether all others are one together.
    unit, date : the sign that is cut off numbers, such as %; the format of dates, empty for ISO 8601.
    """

    name: str
    kind: Literal["number", "date", "category"] = "number"
    fill: float = 0.0
    mean: float = 0.0
    scale: float = 1.0
    values: tuple[str, ...] = ()
    other: bool = False
    unit: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) for text in (self.name, self.unit, self.date, *self.values)):
            raise DataError(f"the column {self.name!r} must have texts as its name, unit, date and values.")
        numbers = (self.fill, self.mean, self.scale)
        if not all(map(math.isfinite, numbers)) or self.scale <= 0:
            raise DataError(f"the column {self.name!r} must have finite numbers and a scale above 0, not {numbers}.")

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its features."""
        if self.kind != "category":
            return (self.name,)
        return tuple(f"{self.name}={value}" for value in (*self.values, *([OTHER] if self.other else [])))

    def transform(self, values: Array, result: Array) -> None:
        """Write the features of parsed values into zeros ``[n, features]``; an unknown value is the other, or none."""
        if self.kind != "category":
            result[:, 0] = (np.where(np.isnan(values), self.fill, values) - self.mean) / self.scale
            return
        place = {value: number for number, value in enumerate(self.values)}
        unknown = len(self.values) if self.other else -1
        names = (MISSING if value is None else value for value in values)
        found = np.asarray([place.get(name, unknown) for name in names], np.int64)
        known = np.flatnonzero(found >= 0)
        result[known, found[known]] = 1


def fit_columns(columns: Sequence[TableColumn], values: Mapping[str, Array], scaling: str) -> tuple[TableColumn, ...]:
    """Return columns with the numbers and values of training rows, by scikit-learn's imputer, scaler and encoder."""
    from sklearn import config_context  # its import takes as long as that of PyTorch
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    fitted: dict[str, dict[str, Any]] = {}
    numbers, categories = ([c.name for c in columns if (c.kind == "category") is kind] for kind in (False, True))
    with config_context(transform_output="default", array_api_dispatch=False, assume_finite=False):
        if numbers:
            imputer, scaler = SimpleImputer(keep_empty_features=True), StandardScaler()
            # A column's numbers lie side by side in memory: in another order their sum would differ in the last bits.
            scaler.fit(imputer.fit_transform(np.stack([values[name] for name in numbers]).T))
            for name, fill, mean, scale in zip(numbers, imputer.statistics_, scaler.mean_, scaler.scale_, strict=True):
                fitted[name] = {"fill": float(fill)}
                if scaling == "standard":
                    fitted[name] |= {"mean": float(mean), "scale": float(scale)}
        if categories:
            encoder = OneHotEncoder(min_frequency=MIN_ROWS, max_categories=MAX_VALUES)
            texts = np.stack([values[name] for name in categories], axis=1)
            encoder.fit(np.where(texts == None, MISSING, texts))  # noqa: E711 - of each item
            for name, found, rare in zip(categories, encoder.categories_, encoder.infrequent_categories_, strict=True):
                hidden = () if rare is None else set(rare)
                kept = tuple(value for value in found if value not in hidden)
                fitted[name] = {"values": kept, "other": rare is not None}
    return tuple(replace(column, **fitted[column.name]) for column in columns)


def transform(columns: Sequence[TableColumn], values: Mapping[str, Array]) -> Tensor:
    """Return the features of parsed values, float32 ``[n, features]``."""
    ends = np.cumsum([len(column.features) for column in columns])
    result: Array = np.zeros((len(values[columns[0].name]), ends[-1]), np.float32)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, which is refused later
        for column, part in zip(columns, np.split(result, ends[:-1], axis=1), strict=True):
            column.transform(values[column.name], part)
    return torch.from_numpy(result)


def unknown_values(
    columns: Sequence[TableColumn], splits: Iterable[Mapping[str, Array]], of_run: bool = False
) -> list[str]:
    """Return a note for each category with values that are 0 in all features, since no row of training had them.

    ``of_run``: The columns are a run's, and not fitted on these rows: values that count as "other" are noted too.
    """
    notes, splits = [], list(splits)
    for column in columns:
        known = {*column.values, *([None] if MISSING in column.values else [])}
        if column.kind != "category" or (column.other and not of_run):
            continue
        cells = [value for values in splits for value in values[column.name] if value is not None or not of_run]
        if count := sum(value not in known for value in cells):
            what = "no row of training has" if not of_run else "is rare in the run, or unknown to it"
            of = f" of {len(cells)}" if of_run else ""
            notes.append(f"{count}{of} cells of {column.name!r} have a value that {what}.")
    return notes


def scale_again(
    columns: Sequence[TableColumn], train: Tensor, test: Tensor
) -> tuple[tuple[TableColumn, ...], Tensor, Tensor]:
    """Return columns and inputs scaled by the training rows that there are now; what empty cells got stays."""
    result, train, test, place = [], train.double(), test.double(), 0
    for column in columns:
        if column.kind != "category" and (column.mean, column.scale) != (0.0, 1.0):
            shift, factor = float(train[:, place].mean()), float(train[:, place].std(correction=0))
            if factor <= 1e-6:  # constant now; float32 has made it no exact 0
                factor = 1.0
                if bool((train[:, place] != train[0, place]).any()) and bool((test[:, place].abs() > 1).any()):
                    raise DataError(
                        f"the column {column.name!r} has a number that is so far from the others that they look "
                        "alike, in a row that is held out. Is it a sign of a missing value? Empty such cells."
                    )
            for data in (train, test):
                data[:, place] = (data[:, place] - shift) / factor
            column = replace(column, mean=column.mean + column.scale * shift, scale=column.scale * factor)
        result.append(column)
        place += len(column.features)
    return tuple(result), train.float(), test.float()


def columns_to_json(columns: Sequence[TableColumn]) -> list[dict[str, Any]]:
    """Return columns as tables of JSON, without what has its default value."""
    plain = asdict(TableColumn(""))
    return [
        {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(column).items()
         if key == "name" or value != plain[key]}
        for column in columns
    ]  # fmt: skip


def columns_from_json(about: Mapping[str, Any]) -> tuple[TableColumn, ...]:
    """Return the columns of a described input; none for one that is no table.

    Raises `DataError` if they are no columns, as in a message that somebody changed.
    """
    try:
        tables = about.get("columns", ())
        names = (to_nfc(table["name"]) for table in tables)  # earlier versions kept names as they came
        return tuple(
            TableColumn(**{**table, "name": name, "values": tuple(table.get("values", ()))})
            for name, table in zip(names, tables, strict=True)
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"this is no description of columns ({error}).") from None
