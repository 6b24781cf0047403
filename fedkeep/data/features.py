"""The features of a table: scaled numbers, and one feature for each value of a column of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedkeep.data.dataset import Data, DataSet
from fedkeep.errors import DataError


@dataclass(frozen=True, eq=False)
class Features:
    """Named numbers, not scaled.

    ``names``: The columns of numbers, and ``"column=value"`` for each value of a column of text.
    ``numbers``: float64 ``[n, features]``.
    ``is_value``: Whether a feature is 1 for one value of a column of text and 0 for all others; such features are not
        scaled.
    """

    names: tuple[str, ...]
    numbers: Tensor
    is_value: tuple[bool, ...]


def standardise(
    train: Features, test: Features | None, held_out: Tensor | None = None
) -> tuple[Tensor, Tensor | None, list[float], list[float]]:
    """Scale numbers with the mean and the standard deviation of the training rows.

    ``train``, ``test``: The same features of both splits; no test rows are None.
    ``held_out``: bool ``[n]``: rows of the training split that will be test rows, and so have no part in mean and
        deviation.
    Returns: float32 ``[n, features]``.
    Returns: What was subtracted and divided by, for each feature: 0 and 1 for values of text. A constant feature gets
        the deviation 1.
    """
    keep = torch.tensor(train.is_value)
    known = train.numbers if held_out is None else train.numbers[~held_out]
    mean = known.mean(0).masked_fill(keep, 0.0)
    std = known.std(0, correction=0).masked_fill(keep, 1.0)
    std = std.masked_fill(std <= 1e-12 * mean.abs().clamp(min=1e-100), 1.0)
    scaled = [None if part is None else ((part.numbers - mean) / std).float() for part in (train, test)]
    assert scaled[0] is not None
    return scaled[0], scaled[1], mean.tolist(), std.tolist()


def scaled_again(dataset: DataSet) -> DataSet:
    """Return a table scaled with the mean and the standard deviation of the training rows that it has now.

    ``dataset``: The data set, of which training rows were taken; one without scaled features is returned as it is.
    """
    mean, std = torch.tensor(dataset.mean).double(), torch.tensor(dataset.std).double()
    scaled = (mean != 0) | (std != 1)  # the others are values of text, or numbers that are to stay as they are
    if not dataset.features or not bool(scaled.any()):
        return dataset
    train = dataset.train["input"].double()
    shift = train.mean(0).masked_fill(~scaled, 0.0)
    factor = train.std(0, correction=0).masked_fill(~scaled, 1.0)
    factor = factor.masked_fill(factor < 1e-6, 1.0)  # constant now; float32 has made it no exact 0

    def scale(data: Data) -> Data:
        return {**data, "input": ((data["input"].double() - shift) / factor).float()}

    return replace(
        dataset,
        train=scale(dataset.train),
        test=scale(dataset.test),
        mean=tuple((mean + std * shift).tolist()),
        std=tuple((std * factor).tolist()),
    )


def match_features(dataset: DataSet, names: Sequence[str], mean: Sequence[float], std: Sequence[float]) -> DataSet:
    """Return a site's table with the features of a run, in its order and scaled as it does.

    Nothing of the site's table leaves it: its own scaling is undone, and that of the run applied. A value of text that
    the site does not have is a feature of zeros.

    ``dataset``: The site's data set; one without named features is returned as it is.
    """
    if not dataset.features or not names:
        return dataset
    unknown = [name for name in dataset.features if name not in names]
    missing = [name for name in names if name not in dataset.features and not _is_value_of(name, dataset.features)]
    if unknown or missing:
        what = f"has {unknown[0]!r}, which the run does not have" if unknown else f"has no {missing[0]!r}"
        raise DataError(
            f"{dataset.name} {what}. The run's features are those of the server's table: {', '.join(names)}. "
            "Rename or remove columns or values, or let the server's table have all values."
        )
    position = {name: place for place, name in enumerate(dataset.features)}
    own_mean, own_std = torch.tensor(dataset.mean).double(), torch.tensor(dataset.std).double()

    def rescale(data: Data) -> Data:
        numbers = data["input"].double() * own_std + own_mean
        blank = numbers.new_zeros(len(numbers))
        columns = [numbers[:, position[name]] if name in position else blank for name in names]
        scaled = (torch.stack(columns, 1) - torch.tensor(mean).double()) / torch.tensor(std).double()
        return {**data, "input": scaled.float()}

    return replace(
        dataset,
        train=rescale(dataset.train),
        test=rescale(dataset.test),
        features=tuple(names),
        mean=tuple(mean),
        std=tuple(std),
    )


def _is_value_of(name: str, features: Sequence[str]) -> bool:
    """Tell whether a feature is a value of a column of text of which other values occur."""
    column, equals, _ = name.partition("=")
    return bool(equals) and any(feature.startswith(f"{column}=") for feature in features)
