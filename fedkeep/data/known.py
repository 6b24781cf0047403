"""The data sets that are known by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fedkeep.data.assemble import Normalisation
from fedkeep.data.layout import Layout
from fedkeep.data.lesions import by_lesion
from fedkeep.data.splits import Split, parquet_files, parquet_split
from fedkeep.errors import DataError, FedKeepError


@dataclass(frozen=True)
class Known:
    """Describe a known data set.

    Parameters
    ----------
    name : what a recipe calls it.
    title : what people call it.
    classes : in the complete data set.
    shape : channels, height and width of its images.
    layout : its columns and splits.
    normalisation : mean and standard deviation per channel, of pixels scaled to 0..1; None where they are computed from
        the training images.
    hub : its Hugging Face Hub id; empty where the Hub has none like it.
    folder : its folder below the data folder; the Hub id if empty.
    note : what a reader of results has to know.
    where : where the local copy is; empty if there is none.
    local_classes : how many classes the local copy holds; None if there is none.
    prepare : makes the Hub's splits like the local copy's.
    """

    name: str
    title: str
    classes: int
    shape: tuple[int, int, int]
    layout: Layout
    normalisation: Normalisation | None
    hub: str = ""
    folder: str = ""
    note: str = ""
    where: str = ""
    local_classes: int | None = None
    prepare: Callable[[Mapping[str, Split]], Mapping[str, Split]] | None = None

    @property
    def place(self) -> str:
        """The folder below the data folder that holds its Parquet files."""
        return self.folder or self.hub

    def files(self, root: Path | None) -> dict[str, list[Path]]:
        """Return the local Parquet files by split name; empty where the training split is not there."""
        if root is None:
            return {}
        found = {split: parquet_files(root / self.place, split) for split in (self.layout.train, self.layout.test)}
        return {split: files for split, files in found.items() if files} if found[self.layout.train] else {}


_GREY, _COLOUR, _LARGE = (1, 28, 28), (3, 32, 32), (3, 64, 64)
_ONE, _THREE = Layout(channels=1), Layout(channels=3)
_WRITERS: Normalisation = ((0.0,), (1.0,))
_LESIONS = (
    "Two thirds of the images are of class nv: read the balanced accuracy too. Middle square at {side} x {side} "
    "pixels; own split by lesion, not stratified, since there is no official one."
)
_CIFAR = Layout(image="img", channels=3)

_TABLE = (
    Known(
        "digits", "Handwritten digits of scikit-learn", 10, (1, 8, 8), _ONE, None, where="inside scikit-learn",
        local_classes=10, note="Needs no download; a stratified fifth is the test split.",
    ),
    Known(
        "fashion-mnist", "Fashion-MNIST", 10, _GREY, _ONE, ((0.2860,), (0.3530,)), "zalando-datasets/fashion_mnist",
    ),
    Known("mnist", "MNIST", 10, _GREY, _ONE, ((0.1307,), (0.3081,)), "ylecun/mnist"),
    Known(
        "cifar10", "CIFAR-10", 10, _COLOUR, _CIFAR, ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        "uoft-cs/cifar10",
    ),
    Known(
        "cifar100", "CIFAR-100", 100, _COLOUR, replace(_CIFAR, label="fine_label"),
        ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)), "uoft-cs/cifar100",
    ),
    Known(
        "cinic10", "CINIC-10", 10, _COLOUR, _THREE, ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)),
        "flwrlabs/cinic10", note="The validation split is not used.",
    ),
    Known(
        "femnist", "FEMNIST (LEAF)", 62, _GREY,
        Layout(label="character", columns=(("writer_id", "writer"),), group="writer", share=0.1, channels=1),
        _WRITERS, "flwrlabs/femnist",
        note="The column 'writer' numbers the writers. Pixels are only divided by 255.",
    ),
    Known("femnist-digits", "FEMNIST's digits", 10, _GREY, _ONE, _WRITERS, where="made from femnist"),
    Known(
        "femnist-alphabet", "FEMNIST's letters, capital and small ones as one", 26, _GREY, _ONE, _WRITERS,
        where="made from femnist",
    ),
    Known(
        "ham10000", "HAM10000", 7, _COLOUR, replace(_THREE, side=32), None, "marmal88/skin_cancer", "ham10000_32x32",
        note=_LESIONS.format(side=32), prepare=by_lesion,
    ),
    Known(
        "ham10000-64", "HAM10000, larger", 7, _LARGE, replace(_THREE, side=64), None, "marmal88/skin_cancer",
        "ham10000_64x64", note=_LESIONS.format(side=64), prepare=by_lesion,
    ),
    Known(
        "tiny-imagenet", "Tiny-ImageNet", 200, _LARGE, replace(_THREE, test="valid"),
        ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)), "zh-plus/tiny-imagenet",
    ),
    Known(
        "femnist-letters", "FEMNIST's letters from K on, as EMNIST has them", 32, _GREY, _ONE, None,
        where="made from femnist", note="Scaled and centred as EMNIST's letters.",
    ),
    Known(
        "emnist-letters-a-to-j", "EMNIST Letters, A to J", 10, _GREY, _ONE, ((0.1696,), (0.3289,)),
        folder="emnist_letters_a_to_j",
        note="Made from the official test split only: not comparable with published EMNIST results.",
    ),
)  # fmt: skip

KNOWN: Mapping[str, Known] = {known.name: known for known in _TABLE}


def known(data_dir: str | Path | None = None) -> Mapping[str, Known]:
    """Return the known data sets by name, each with where its local copy is and how many classes that holds.

    Parameters
    ----------
    data_dir : the data folder; the environment variable ``FEDKEEP_DATA`` if None.

    Raises
    ------
    DataError
        For a data folder that does not exist.
    """
    root = data_folder(data_dir)
    return {name: _located(entry, root) for name, entry in KNOWN.items()}


def data_folder(data_dir: str | Path | None) -> Path | None:
    """Return the folder of local data sets, or None where none is set.

    Raises
    ------
    DataError
        For one that does not exist.
    """
    source = "The data folder" if data_dir is not None else "FEDKEEP_DATA"
    chosen = os.environ.get("FEDKEEP_DATA") or None if data_dir is None else data_dir
    if chosen is None:
        return None
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise DataError(f"{source} is {folder}, which is no folder. Give one that holds data sets, or leave it out.")
    return folder


def _located(entry: Known, root: Path | None) -> Known:
    files = entry.files(root)
    if root is None or not files:
        return entry
    try:
        labels = parquet_split(files[entry.layout.train], entry.layout.train).values(entry.layout.label)
        count = len(set(labels))
    except (FedKeepError, OSError, KeyError):  # a list of data sets must not fail for one broken file
        count = None
    return replace(entry, where=str(root / entry.place), local_classes=count)
