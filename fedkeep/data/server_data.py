"""Examples that the server holds: a small labelled auxiliary set, or public images without labels."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedkeep._utils import seeds
from fedkeep.data.dataset import Data, DataSet, format_shape, select_rows
from fedkeep.data.schema import GROUP
from fedkeep.errors import ConfigError, DataError
from fedkeep.options import Options, option


@dataclass(frozen=True)
class Auxiliary(Options):
    """A few labelled images of each class for the server.

    FedCAD's paper says "can be acquired from public data" and no more. ``train_holdout`` draws them from the training
    images, which the clients then do not have; ``train_shared`` takes the first of each class in file order and leaves
    them with the clients too, as the code that the paper builds on does; ``test_subset`` draws them from the test
    images, which then do not count for accuracy.
    """

    images_per_class: int = option(0, "images of each class; 0: the server has no such set", low=0)
    source: Literal["train_holdout", "train_shared", "test_subset"] = option(
        "train_holdout", "training images taken from the clients, or left with them too, or test images"
    )

    def split(self, dataset: DataSet, seed: int) -> tuple[DataSet, Data]:
        """Take the auxiliary set from a data set.

        ``dataset``: The run's data set; not changed.
        Returns: The data set without the images that were taken.
        Returns: The auxiliary set, sorted by class; empty if there is none.
        """
        if not self.images_per_class:
            return dataset, {}
        name: Literal["train", "test"] = "test" if self.source == "test_subset" else "train"
        columns = dataset.test if name == "test" else dataset.train
        order = torch.arange(len(columns["label"]))
        if self.source != "train_shared":
            order = torch.randperm(len(order), generator=seeds.rng(seed, "auxiliary"))
        labels = columns["label"].cpu()[order]
        taken = torch.cat([order[self._first_of_class(labels, c, dataset)] for c in range(dataset.num_classes)])
        if self.source != "train_shared":
            left = torch.ones(len(order), dtype=torch.bool)
            left[taken] = False
            if name == "test" and GROUP in columns:  # nobody is tested on a group of which the server knows a part
                left &= ~torch.isin(columns[GROUP].cpu(), columns[GROUP].cpu()[taken])
                if not bool(left.any()):
                    raise DataError(
                        f"auxiliary.source=test_subset takes examples of all {dataset.name}'s test groups, and leaves "
                        "none to test on. Lower auxiliary.images_per_class, or take train_holdout."
                    )
            rest = select_rows(columns, left.nonzero().flatten())
            dataset = replace(dataset, test=rest) if name == "test" else replace(dataset, train=rest)
        return dataset, select_rows(columns, taken)

    def _first_of_class(self, labels: Tensor, c: int, dataset: DataSet) -> Tensor:
        found = (labels == c).nonzero().flatten()[: self.images_per_class]
        if len(found) < self.images_per_class:
            raise DataError(
                f"[auxiliary] asks for {self.images_per_class} images of each class, and {dataset.name} has only "
                f"{len(found)} of {dataset.label_names[c]!r} to draw from. Lower auxiliary.images_per_class."
            )
        return found


@dataclass(frozen=True)
class Public(Options):
    """Training images of another data set, without their labels, on which clients and server exchange predictions."""

    name: str = option("", "data set, Hub id or path, as in [data]; empty: there is no public set")
    num_images: int = option(0, "how many, drawn at random once for a seed; 0: all", low=0)
    classes: tuple[str, ...] = option((), "only images of these classes, by name; empty: of all")

    def check(self) -> None:
        """Raise `ConfigError` if the data set is not named."""
        if not self.name and (self.num_images or self.classes):
            raise ConfigError("[public] says how many images or which classes, but not of what. Give it a name.")

    def draw(self, source: DataSet, target: DataSet, seed: int) -> Data:
        """Draw the public images.

        ``source``: The data set that they are drawn from.
        ``target``: The run's data set, whose images have the same shape.
        Returns: The columns ``"input"`` and ``"label"``; all labels are 0.
        """
        if source.kind != target.kind:
            raise DataError(f"[public] {source.name} has {source.kind}, and {target.name} has {target.kind}.")
        if source.columns and target.columns and source.columns != target.columns:
            raise DataError(
                f"[public] {source.name} is not read with the columns of {target.name}, which scale numbers otherwise. "
                "Save it as one CSV or Parquet file, and name that."
            )
        if source.shape != target.shape:
            raise DataError(
                f"[public] {source.name} has images of {format_shape(source.shape)}, and {target.name} has images of "
                f"{format_shape(target.shape)}. Choose a public set with images of that size."
            )
        unknown = [name for name in self.classes if name not in source.label_names]
        if unknown:
            raise DataError(
                f"[public] {source.name} has no class {unknown[0]!r}. It has: {', '.join(source.label_names)}."
            )
        labels = source.train["label"].cpu()
        wanted = torch.tensor([source.label_names.index(name) for name in self.classes], dtype=labels.dtype)
        rows = (torch.isin(labels, wanted) if self.classes else torch.ones_like(labels).bool()).nonzero().flatten()
        if len(rows) < max(self.num_images, 1):
            raise DataError(
                f"[public] asks for {self.num_images or 'some'} images, and {source.name} has only {len(rows)} of "
                "these classes. Lower public.num_images or name more classes."
            )
        if self.num_images:
            chosen = torch.randperm(len(rows), generator=seeds.rng(seed, "public set"))[: self.num_images]
            rows = rows[chosen]
        return {"input": source.train["input"][rows], "label": torch.zeros(len(rows), dtype=torch.int64)}
