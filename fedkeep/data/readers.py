"""Splits as they are stored: Parquet files, folders of images and the Hugging Face Hub, opened as `datasets` tables."""

from __future__ import annotations

import glob
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fedkeep._utils.libraries import require_optional
from fedkeep.data.problems import Where, at
from fedkeep.errors import DataError, in_one_line

RawSplits: TypeAlias = Mapping[str, Any]
"""Tables by split name, each a ``datasets.Dataset`` or ``datasets.IterableDataset`` whose images are still encoded."""

TEST_NAMES = ("test", "validation", "valid", "val")
"""The names that a test split may have, the preferred one first."""

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

MISSING_TEXTS = frozenset(
    ["", "#n/a", "#n/a n/a", "#na", "-nan", "n/a", "na", "nan", "null", "none", "1.#ind", "1.#qnan", "-1.#ind"]
)
"""What an empty cell of a text file looks like, in lower case."""

_HUB_TIMEOUT = 8.0  # seconds; `datasets` itself retries for half a minute before it says that there is no network
_BATCH = 500  # rows that are read at a time


def datasets_library(purpose: str) -> Any:
    """Import Hugging Face `datasets`.

    ``purpose``: What needs it; the beginning of the error's sentence.
    """
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # otherwise it reports every local file that it reads
    return require_optional("datasets", purpose, "data")


def read_batches(split: Any, column: str, where: str) -> Iterator[list[Any]]:
    """Yield the values of one column, batch by batch, in row order.

    ``column``: A column of it. An encoded image is bytes, a path, or a dict of ``"bytes"`` and ``"path"``.
    ``where``: What errors call the table.
    """
    try:
        for batch in split.select_columns([column]).with_format("arrow").iter(batch_size=_BATCH):
            yield batch[column].to_pylist()
    except Exception as error:  # damaged files make pyarrow and `datasets` raise almost anything
        raise DataError(
            f"{where}: the column {column!r} cannot be read ({in_one_line(error, 300)}). Copy the data again."
        ) from error


def read_column(split: Any, column: str, where: str) -> list[Any]:
    """Return one column as a list; see `read_batches`."""
    return [value for batch in read_batches(split, column, where) for value in batch]


def to_nfc(name: str) -> str:
    """Return text in Unicode's form NFC, in which equal-looking names are equal.

    macOS writes an accented letter of a file's name as the letter and the accent, other systems as one character.
    """
    return unicodedata.normalize("NFC", name)


def check_filled(values: Sequence[Any], column: str, where: Where | str) -> None:
    """Raise `DataError` if a value of a column is missing: nothing, NaN or blank text; it names the first such rows."""
    missing = [
        row
        for row, value in enumerate(values)
        if value is None or value != value or (isinstance(value, str) and not value.strip())
    ]
    if missing:
        raise DataError(
            f"{where}: {at(where, missing)} has no {column!r} (empty or NaN); rows without it: {len(missing)}. Fill or "
            "remove them."
        )


def parquet_files(folder: Path, split: str) -> list[Path]:
    """Return the Parquet files of a split, sorted; an empty list if there are none.

    These are ``SPLIT.parquet``, or the shards ``SPLIT-*.parquet`` in the folder or in one subfolder, as in a copy of a
    repository of the Hub.
    """
    single = folder / f"{split}.parquet"
    if single.is_file():
        return [single]
    shards = sorted(folder.glob(f"{split}-*.parquet")) or sorted(folder.glob(f"*/{split}-*.parquet"))
    parents = sorted({path.parent.name for path in shards})
    if len(parents) > 1:
        raise DataError(
            f"{folder}: the split {split!r} lies in several folders ({', '.join(parents)}), which are different "
            "versions of the data set. Name the one to load."
        )
    return shards


def read_parquet(files: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """Open Parquet files as a stream: nothing is copied to disk."""
    library = datasets_library("Reading Parquet files")
    opened = {}
    for split, paths in files.items():
        # Each split for itself, so that it keeps its own columns and class names. Escaped, since these are patterns.
        patterns = {split: [glob.escape(str(path)) for path in paths]}
        try:
            opened[split] = library.load_dataset("parquet", data_files=patterns, split=split, streaming=True)
        except Exception as error:  # odd metadata makes `datasets` raise almost anything
            raise DataError(
                f"{paths[0]} cannot be read as Parquet ({in_one_line(error, 300)}). Copy it again."
            ) from error
    return opened


def image_files(root: Path) -> tuple[dict[str, dict[str, list[Path]]], list[str]]:
    """Return the image files of a folder by split and class name, all in sorted order, and the folders without images.

    The folder holds ``train/CLASS/*.png`` and ``test/CLASS/*.png`` (or ``valid``, ``val``, ``validation``), or
    ``CLASS/*.png`` alone. Hidden folders and files that are not images are ignored.
    """
    folders = _subfolders(root)
    if "train" in folders:
        test = next((name for name in TEST_NAMES if name in folders), None)
        splits = {"train": folders["train"]} | ({} if test is None else {"test": folders[test]})
    else:
        splits = {"train": root}
    every = {split: _images_by_class(folder) for split, folder in splits.items()}
    found = {split: {name: files for name, files in classes.items() if files} for split, classes in every.items()}
    empty = [f"{splits[split] / name}" for split, classes in every.items() for name in classes if not classes[name]]
    for split, classes in found.items():
        if not classes:
            raise DataError(
                f"{root}: the split {split!r} has no images. Expected are train/CLASS/*.png and test/CLASS/*.png, or "
                f"CLASS/*.png alone (file types: {', '.join(IMAGE_SUFFIXES)}), or the Parquet files train.parquet and "
                "test.parquet (or .csv)."
            )
    return found, empty


def read_images(files: Mapping[str, Mapping[str, Sequence[Path]]]) -> dict[str, Any]:
    """Return image files as tables with the columns ``"image"`` and ``"label"``.

    The "imagefolder" reader of `datasets` is not used: it takes 0.5 ms a file to list them, 20 times as long as
    `image_files`, and orders ``cat-2/`` before ``cat/``.

    ``files``: The files by split and class name, as `image_files` returns them.
    """
    library = datasets_library("Reading a folder of images")
    names = sorted({name for classes in files.values() for name in classes})
    features = library.Features({"image": library.Image(), "label": library.ClassLabel(names=names)})
    tables = {}
    for split, classes in files.items():
        columns = {
            "image": [str(path) for paths in classes.values() for path in paths],
            "label": [names.index(name) for name, paths in classes.items() for _ in paths],
        }
        tables[split] = library.Dataset.from_dict(columns, features=features)
    return tables


def _subfolders(root: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")}


def _images_by_class(folder: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for name, path in sorted((to_nfc(name), path) for name, path in _subfolders(folder).items()):
        found.setdefault(name, []).extend(_images(path))
    return found


def _images(folder: Path) -> list[Path]:
    visible = (path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
    return sorted(path for path in visible if path.suffix.lower() in IMAGE_SUFFIXES)


def is_offline() -> bool:
    """Return whether the user has switched the Hub off (``HF_HUB_OFFLINE``), so that only its cache is read."""
    return bool(datasets_library("Loading from the Hugging Face Hub").config.HF_HUB_OFFLINE)


def hub_commit(hub_id: str) -> str:
    """Ask the Hub for the current commit of a data set: one short request, so that a missing network shows at once."""
    datasets_library("Loading from the Hugging Face Hub")
    hub = require_optional("huggingface_hub", "Loading from the Hugging Face Hub", "data")
    errors = require_optional("huggingface_hub.errors", "Loading from the Hugging Face Hub", "data")
    try:
        return str(hub.HfApi().dataset_info(hub_id, timeout=_HUB_TIMEOUT).sha)
    except (errors.RepositoryNotFoundError, errors.GatedRepoError, errors.HFValidationError) as error:
        raise DataError(
            f"The Hugging Face Hub gives no access to a data set {hub_id!r}. Check the spelling; for a private or "
            "gated one, run `hf auth login` and accept its terms on its page."
        ) from error
    except Exception as error:  # what the HTTP library raises differs between its versions
        raise ConnectionError(_first_line(error)) from error


def read_hub(hub_id: str, commit: str | None) -> dict[str, Any]:
    """Download a data set, or take it from the cache of `datasets`.

    ``commit``: The version; None for the latest in the cache.
    """
    library = datasets_library("Loading from the Hugging Face Hub")
    try:
        return dict(library.load_dataset(hub_id, revision=commit))
    except (ConnectionError, TimeoutError) as error:
        raise ConnectionError(_first_line(error)) from error
    except (OSError, ValueError, RuntimeError, library.exceptions.DatasetsError) as error:
        raise DataError(f"The data set {hub_id!r} cannot be loaded from the Hugging Face Hub: {error}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
