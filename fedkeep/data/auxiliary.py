"""A small labelled set that the server holds, a few images of each class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedkeep._utils import seeds
from fedkeep.data.dataset import Data, DataSet
from fedkeep.errors import DataError
from fedkeep.options import Options, option


@dataclass(frozen=True)
class Auxiliary(Options):
    """Where the server's auxiliary set comes from.

    FedCAD's paper says "can be acquired from public data" and no more. ``train_holdout`` draws it from the training
    images, which the clients then do not have; ``train_shared`` takes the first of each class in file order and leaves
    them with the clients too, as the code that the paper builds on does; ``test_subset`` draws it from the test images,
    which then do not count for accuracy.
    """

    per_class: int = option(0, "images of each class; 0: the server has no such set", low=0)
    source: Literal["train_holdout", "train_shared", "test_subset"] = option(
        "train_holdout", "training images taken from the clients, or left with them too, or test images"
    )

    def split(self, dataset: DataSet, seed: int) -> tuple[DataSet, Data]:
        """Return the data set with what is taken from it left out, and the auxiliary set, sorted by class.

        Raises
        ------
        DataError
            If a class has too few images.
        """
        if not self.per_class:
            return dataset, {}
        name: Literal["train", "test"] = "test" if self.source == "test_subset" else "train"
        columns = dataset.test if name == "test" else dataset.train
        order = torch.arange(len(columns["label"]))
        if self.source != "train_shared":
            order = torch.randperm(len(order), generator=seeds.generator(seed, "auxiliary"))
        labels = columns["label"].cpu()[order]
        taken = torch.cat([order[self._first(labels, c, dataset)] for c in range(dataset.classes)])
        if self.source != "train_shared":
            left = torch.ones(len(order), dtype=torch.bool)
            left[taken] = False
            rest = _rows(columns, left.nonzero().flatten())
            dataset = replace(dataset, test=rest) if name == "test" else replace(dataset, train=rest)
        return dataset, _rows(columns, taken)

    def _first(self, labels: Tensor, c: int, dataset: DataSet) -> Tensor:
        found = (labels == c).nonzero().flatten()[: self.per_class]
        if len(found) < self.per_class:
            raise DataError(
                f"[auxiliary] asks for {self.per_class} images of each class, and {dataset.name} has only {len(found)} "
                f"of {dataset.label_names[c]!r} to draw from. Lower auxiliary.per_class."
            )
        return found


def _rows(columns: Data, rows: Tensor) -> Data:
    return {name: column[rows.to(column.device)] for name, column in columns.items()}
