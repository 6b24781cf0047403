"""A folder of images, one folder a class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkeep.data.layout import TEST_NAMES
from fedkeep.data.splits import Features, Split
from fedkeep.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


def image_files(root: Path) -> dict[str, dict[str, list[Path]]]:
    """Return the image files of a folder by split and class name, all in sorted order.

    The folder holds ``train/CLASS/*.png`` and ``test/CLASS/*.png`` (or ``valid``, ``val``, ``validation``), or
    ``CLASS/*.png`` alone. Hidden folders and files that are no images are passed over.

    Raises
    ------
    DataError
        For a folder without images in folders named after classes.
    """
    folders = _folders(root)
    if "train" in folders:
        test = next((name for name in TEST_NAMES if name in folders), None)
        found = {"train": _classes(folders["train"])}
        if test is not None:
            found["test"] = _classes(folders[test])
    else:
        found = {"train": _classes(root)}
    for split, classes in found.items():
        if not classes:
            raise DataError(
                f"{root}: the split {split!r} has no images. Expected are train/CLASS/*.png and test/CLASS/*.png, or "
                f"CLASS/*.png alone (file types: {', '.join(SUFFIXES)}), or the Parquet files train.parquet and "
                "test.parquet."
            )
    return found


def folder_splits(root: Path, found: Mapping[str, Mapping[str, Sequence[Path]]]) -> dict[str, Split]:
    """Return image files as splits with the columns ``"image"`` and ``"label"`` (see `image_files`)."""
    names = sorted({name for classes in found.values() for name in classes})
    features: Features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
    return {split: _split(f"{root} (split {split!r})", classes, names, features) for split, classes in found.items()}


def _split(where: str, classes: Mapping[str, Sequence[Path]], names: Sequence[str], features: Features) -> Split:
    columns: dict[str, list[Any]] = {
        "image": [path for files in classes.values() for path in files],
        "label": [names.index(name) for name, files in classes.items() for _ in files],
    }

    def read(column: str) -> Iterator[Sequence[Any]]:
        yield columns[column]

    return Split(where, len(columns["label"]), features, read)


def _folders(root: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")}


def _classes(folder: Path) -> dict[str, list[Path]]:
    found = {name: _images(path) for name, path in _folders(folder).items()}
    return {name: files for name, files in found.items() if files}


def _images(folder: Path) -> list[Path]:
    visible = (path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
    return sorted(path for path in visible if path.suffix.lower() in SUFFIXES)
