"""The data sets that are known by name, with their columns, normalisation and Hub ids."""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedkeep.data.own_files import split_files
from fedkeep.data.readers import datasets_library, read_column
from fedkeep.data.schema import Normalisation, Schema, Splits
from fedkeep.errors import DataError, MissingExtra, in_one_line, require_optional

DIAGNOSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")

_SHORT_NAMES = {
    "actinic_keratoses": "akiec",
    "basal_cell_carcinoma": "bcc",
    "benign_keratosis-like_lesions": "bkl",
    "dermatofibroma": "df",
    "melanoma": "mel",
    "melanocytic_nevi": "nv",
    "vascular_lesions": "vasc",
}


def split_by_lesion(splits: Splits) -> dict[str, Any]:
    """Pool all splits, keep each image once, and split again by lesion.

    The splits on the Hub repeat images: most of its test images are training images too. A lesion goes to test if the
    first byte of the SHA-256 of its id is below 51: a fifth of the lesions, the same ones on every machine.

    Returns: The splits ``"train"`` and ``"test"`` with the columns ``"image"`` and ``"label"``.
    """
    library = datasets_library("Loading HAM10000")
    pooled = library.concatenate_datasets(list(splits.values()))
    image_ids, lesions, diagnoses = (read_column(pooled, name, "HAM10000") for name in ("image_id", "lesion_id", "dx"))
    features = library.Features({"label": library.ClassLabel(names=list(DIAGNOSES))})
    labels = library.Dataset.from_dict({"label": [_label(dx) for dx in diagnoses]}, features=features)
    table = library.concatenate_datasets([pooled.select_columns(["image"]), labels], axis=1)
    rows: dict[str, list[int]] = {"train": [], "test": []}
    seen: set[str] = set()
    for row, (image_id, lesion) in enumerate(zip(image_ids, lesions, strict=True)):
        if image_id not in seen:
            is_test = hashlib.sha256(lesion.encode()).digest()[0] < 51
            rows["test" if is_test else "train"].append(row)
            seen.add(image_id)
    return {name: table.select(chosen) for name, chosen in rows.items()}


def _label(diagnosis: str) -> int:
    short = _SHORT_NAMES.get(diagnosis.lower(), diagnosis.lower())
    if short not in DIAGNOSES:
        raise DataError(f"HAM10000: {diagnosis!r} is none of the diagnoses {', '.join(DIAGNOSES)}.")
    return DIAGNOSES.index(short)


@dataclass(frozen=True)
class CatalogEntry:
    """Describe a known data set.

    ``title``: Its usual name.
    ``shape``: Channels, height and width of its images.
    ``schema``: Its columns and splits.
    ``normalisation``: Mean and standard deviation per channel, of pixels scaled to 0..1; None computes them from the
        training images.
    ``hub``: Its Hugging Face Hub id; empty if the Hub has none like it.
    ``folder``: Its folder below the data folder; the Hub id if empty.
    ``note``: What a reader of results has to know.
    ``location``: Where the local copy is; empty if there is none.
    ``num_local_classes``: Number of classes of the local copy; None if there is none.
    ``damage``: What is wrong with the local copy; empty if it can be used.
    ``made_from``: The known data set whose images these are; empty for most.
    ``prepare``: Makes the Hub's splits equal to the local copy's.
    """

    name: str
    title: str
    num_classes: int
    shape: tuple[int, int, int]
    schema: Schema
    normalisation: Normalisation | None
    hub: str = ""
    folder: str = ""
    note: str = ""
    location: str = ""
    num_local_classes: int | None = None
    damage: str = ""
    made_from: str = ""
    prepare: Callable[[Splits], Splits] | None = None

    @property
    def path(self) -> str:
        """The folder of its Parquet files, relative to the data folder."""
        return self.folder or self.hub

    def files(self, root: Path | None) -> dict[str, list[Path]]:
        """Return the local Parquet files by split name; an empty dict if the training split is missing."""
        if root is None:
            return {}
        splits = (self.schema.train, self.schema.test)
        found = {split: split_files(root / self.path, split, (".parquet",)) for split in splits}
        return {split: files for split, files in found.items() if files} if found[self.schema.train] else {}


_GREY_28, _COLOUR_32, _COLOUR_64 = (1, 28, 28), (3, 32, 32), (3, 64, 64)
_GREY, _COLOUR = Schema(channels=1), Schema(channels=3)
_ONLY_SCALED: Normalisation = ((0.0,), (1.0,))
_HAM10000_NOTE = (
    "Two thirds of the images are of class nv: read the balanced accuracy too. Middle square at {side} x {side} "
    "pixels; own split by lesion, not stratified, since there is no official one."
)
_CIFAR = Schema(image="img", channels=3)

_ENTRIES = (
    CatalogEntry(
        "digits", "Handwritten digits of scikit-learn", 10, (1, 8, 8), _GREY, None, location="inside scikit-learn",
        num_local_classes=10, note="Needs no download; a stratified fifth is the test split.",
    ),
    CatalogEntry(
        "fashion-mnist", "Fashion-MNIST", 10, _GREY_28, _GREY, ((0.2860,), (0.3530,)), "zalando-datasets/fashion_mnist",
    ),
    CatalogEntry("mnist", "MNIST", 10, _GREY_28, _GREY, ((0.1307,), (0.3081,)), "ylecun/mnist"),
    CatalogEntry(
        "cifar10", "CIFAR-10", 10, _COLOUR_32, _CIFAR, ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        "uoft-cs/cifar10",
    ),
    CatalogEntry(
        "cifar100", "CIFAR-100", 100, _COLOUR_32, replace(_CIFAR, label="fine_label"),
        ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)), "uoft-cs/cifar100",
    ),
    CatalogEntry(
        "cinic10", "CINIC-10", 10, _COLOUR_32, _COLOUR, ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)),
        "flwrlabs/cinic10", note="The validation split is not used.",
    ),
    CatalogEntry(
        "femnist", "FEMNIST (LEAF)", 62, _GREY_28,
        Schema(label="character", columns=(("writer_id", "writer"),), group="writer", test_share=0.1, channels=1),
        _ONLY_SCALED, "flwrlabs/femnist",
        note="The column 'writer' numbers the writers. Pixels are only divided by 255.",
    ),
    CatalogEntry("femnist-digits", "FEMNIST's digits", 10, _GREY_28, _GREY, _ONLY_SCALED, made_from="femnist"),
    CatalogEntry(
        "femnist-alphabet", "FEMNIST's letters, capital and small ones as one", 26, _GREY_28, _GREY, _ONLY_SCALED,
        made_from="femnist",
    ),
    CatalogEntry(
        "ham10000", "HAM10000", 7, _COLOUR_32, replace(_COLOUR, side=32), None, "marmal88/skin_cancer",
        "ham10000_32x32", note=_HAM10000_NOTE.format(side=32), prepare=split_by_lesion,
    ),
    CatalogEntry(
        "ham10000-64", "HAM10000, larger", 7, _COLOUR_64, replace(_COLOUR, side=64), None, "marmal88/skin_cancer",
        "ham10000_64x64", note=_HAM10000_NOTE.format(side=64), prepare=split_by_lesion,
    ),
    CatalogEntry(
        "tiny-imagenet", "Tiny-ImageNet", 200, _COLOUR_64, replace(_COLOUR, test="valid"),
        ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)), "zh-plus/tiny-imagenet",
    ),
    CatalogEntry(
        "femnist-letters", "FEMNIST's letters from K on, as EMNIST has them", 32, _GREY_28, _GREY, None,
        made_from="femnist", note="Scaled and centred as EMNIST's letters.",
    ),
    CatalogEntry(
        "emnist-letters-a-to-j", "EMNIST Letters, A to J", 10, _GREY_28, _GREY, ((0.1696,), (0.3289,)),
        folder="emnist_letters_a_to_j",
        note="Made from the official test split only: not comparable with published EMNIST results.",
    ),
)  # fmt: skip

CATALOG: Mapping[str, CatalogEntry] = {entry.name: entry for entry in _ENTRIES}


def is_known(name: str) -> bool:
    """Return whether data are those of known data sets alone.

    ``name``: The name of the data in a recipe: a data set's name or Hub id, or several with ``+`` between them.
    """
    hub_ids = {entry.hub for entry in _ENTRIES if entry.hub}
    return all(part.strip() in CATALOG or part.strip() in hub_ids for part in name.split("+"))


def known_datasets(data_dir: str | Path | None = None) -> Mapping[str, CatalogEntry]:
    """Return the known data sets by name, each with the location and the number of classes of its local copy.

    ``data_dir``: The data folder; by default the environment variable ``FEDKEEP_DATA``.
    """
    root = data_folder(data_dir)
    return {name: _locate(entry, root) for name, entry in CATALOG.items()}


def data_folder(data_dir: str | Path | None) -> Path | None:
    """Return the folder of local data sets, or None if none is set.

    ``data_dir``: The folder; None for the environment variable ``FEDKEEP_DATA``.
    """
    source = "The data folder" if data_dir is not None else "FEDKEEP_DATA"
    chosen = os.environ.get("FEDKEEP_DATA") or None if data_dir is None else data_dir
    if chosen is None:
        return None
    folder = Path(os.path.expanduser(chosen))
    if not folder.is_dir():
        raise DataError(f"{source} is {folder}, which is no folder. Give one that holds data sets, or leave it out.")
    return folder


def local_paths(name: str, data_dir: str | Path | None) -> list[Path]:
    """Return where a file or folder that a recipe names may lie: at a path from here, or in the data folder."""
    root = data_folder(data_dir)
    return [Path(os.path.expanduser(name)), *([] if root is None else [root / name])]


def _locate(entry: CatalogEntry, root: Path | None) -> CatalogEntry:
    if entry.made_from:
        source = _locate(CATALOG[entry.made_from], root)
        return replace(entry, location=source.location and f"made from {entry.made_from}", damage=source.damage)
    try:
        files = entry.files(root)
    except DataError as error:
        return replace(entry, location=str(root), damage=str(error))
    if root is None or not files:
        return entry
    label = entry.schema.label
    try:
        parquet = require_optional("pyarrow.parquet", "Reading Parquet files", "data")
        table = parquet.read_table([str(path) for path in files[entry.schema.train]], columns=[label])
        count, damage = len(table[label].unique()), ""
    except MissingExtra:
        count, damage = None, ""
    except Exception as error:  # a list of data sets must not fail for one broken file, whatever pyarrow makes of it
        count, damage = None, in_one_line(error, 200)
    if not damage and entry.schema.test not in files and not entry.schema.test_share:
        damage = f"there is no {entry.schema.test}.parquet"
    return replace(entry, location=str(root / entry.path), num_local_classes=count, damage=damage)
