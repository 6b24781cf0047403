"""The form of the sites' data for a server that has none: their classes and shape, and statistics over all sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedkeep.data import DataSet
from fedkeep.data.columns import TableColumn, columns_from_json
from fedkeep.data.dataset import describe_input
from fedkeep.data.schema import number_names
from fedkeep.errors import DataError

NO_DATA = "none"
"""What the run configuration's ``data`` is for a server without data of its own."""
MOST_NUMBERS = 10**8
"""The most numbers in one input that a site is believed to have."""
_TYPES = {"images": torch.uint8, "token ids": torch.int64, "numbers": torch.float32}


def data_of_form(about: Mapping[str, Any], name: str = "the sites' data") -> DataSet:
    """Return a data set of the form that `fedkeep.flower.views.describe_dataset` tells, with one example of zeros."""
    try:
        shape = tuple(map(int, about["shape"]))
        if not 0 < math.prod(shape) <= MOST_NUMBERS:
            raise ValueError(f"inputs of the shape {list(shape)[:8]}")
        row = {"input": torch.zeros(1, *shape, dtype=_TYPES[about["kind"]]), "label": torch.zeros(1, dtype=torch.int64)}
        columns = columns_from_json({"columns": about["columns"]})
        names, mean, std = (tuple(about[key]) for key in ("label_names", "mean", "std"))
        return DataSet(name, row, row, tuple(map(str, names)), mean, std, columns=columns)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DataError(f"{name}: this is no description of data ({type(error).__name__}: {error}).") from None


def pool(described: Mapping[str, Any], examples: Mapping[str, int]) -> DataSet:
    """Return a data set of the form of all sites together, from what each describes, weighted by its examples."""
    sites = {site: data_of_form(described[site], f"site {site}") for site in sorted(described)}
    first, *others = sites.values()
    for other in others:  # the features of a table follow from its columns, of which sites may know other values
        is_table = bool(first.columns and other.columns)
        if other.kind != first.kind or (other.shape != first.shape and not is_table):
            raise DataError(
                f"{first.name} has {describe_input(first.train['input'])}, and {other.name} "
                f"{describe_input(other.train['input'])}. Bring them to one form."
            )
    weights = np.asarray([examples[site] for site in sites], dtype=np.float64)
    weights = weights / weights.sum() if weights.sum() else np.full(len(sites), 1 / len(sites))
    every = [dataset.label_names for dataset in sites.values()]
    _, names = number_names([name for of_site in every for name in of_site], as_text=True)
    means, deviations = (zip(*(getattr(one, name) for one in sites.values()), strict=True) for name in ("mean", "std"))
    channels = [_pooled(*of, weights) for of in zip(means, deviations, strict=True)]
    columns = _columns(list(sites.values()), weights)
    return replace(
        first,
        name="the sites' data",
        label_names=every[0] if all(one == every[0] for one in every) else tuple(names),
        mean=tuple(mean for mean, _ in channels),
        std=tuple(std for _, std in channels),
        columns=columns,
        **_zeros(first, sum(len(column.features) for column in columns)),
    )


def _zeros(dataset: DataSet, features: int) -> dict[str, Any]:
    """Return both splits with so many features, where these are a table's."""
    row = {**dataset.train, "input": torch.zeros(1, features)} if features else dataset.train
    return {"train": row, "test": row}


def _pooled(means: Sequence[float], deviations: Sequence[float], weights: Any) -> tuple[float, float]:
    """Return the mean and the standard deviation of all examples, from those of each site."""
    of_sites, spread = np.asarray(means), np.asarray(deviations)
    mean = float(weights @ of_sites)
    return mean, math.sqrt(float(weights @ (spread**2 + (of_sites - mean) ** 2))) or 1.0


def _columns(sites: Sequence[DataSet], weights: Any) -> tuple[TableColumn, ...]:
    """Return a table's columns over all sites; raise `DataError` if sites read a column in different ways."""
    plain = [[replace(c, fill=0.0, mean=0.0, scale=1.0, values=(), other=False) for c in d.columns] for d in sites]
    for site, of_site in zip(sites, plain, strict=True):
        if of_site != plain[0]:
            pairs = zip(of_site, plain[0], strict=False)
            odd = next((f"{a.name!r} ({a.kind})" for a, b in pairs if a != b), f"{len(of_site)} columns")
            raise DataError(
                f"{site.name} reads {odd} otherwise than {sites[0].name}, which has "
                f"{', '.join(f'{c.name!r} ({c.kind})' for c in plain[0])}. Give all sites the same columns of one kind."
            )
    found = []
    for of_sites in zip(*(site.columns for site in sites), strict=True):
        mean, scale = _pooled([c.mean for c in of_sites], [c.scale for c in of_sites], weights)
        fill = float(weights @ np.asarray([c.fill for c in of_sites]))
        values = tuple(sorted({value for c in of_sites for value in c.values}))
        other = any(c.other for c in of_sites)
        found.append(replace(of_sites[0], fill=fill, mean=mean, scale=scale, values=values, other=other))
    return tuple(found)
