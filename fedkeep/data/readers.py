"""Splits as they are stored: Parquet files, folders of images and the Hugging Face Hub, opened as `datasets` tables.

Problems of a data set are collected, so that one error tells all of them, with the lines of the file.
"""

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fedkeep.errors import DataError, first_line, in_one_line, require_optional

SINGLE_LABEL = "FedKeep does single-label classification only: one class for each example, an integer or a text."
_SHOWN = 5
_SHARD = re.compile(r"-of-(\d+)\.parquet$")


@dataclass(frozen=True)
class Where:
    """What errors call a split; with `lines`, the line of a file on which each row stands."""

    name: str
    lines: Sequence[str] = ()

    def __str__(self) -> str:
        return self.name


def at(where: Where | str, rows: Sequence[int]) -> str:
    """Return the places of rows in words: the first few, and how many more."""
    lines = where.lines if isinstance(where, Where) else ()
    shown = [lines[row] if lines else f"row {row}" for row in rows[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else "")


@dataclass
class Problems:
    """Errors about one data set, raised as one; and notes on what was changed."""

    found: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep a `DataError` for later."""
        try:
            yield
        except DataError as error:
            self.found.append(str(error))

    def check(self, where: Where | str) -> None:
        """Raise all that was collected, if anything was; what collects that error has each problem once."""
        found, self.found = list(dict.fromkeys(self.found)), []
        if len(found) == 1:
            raise DataError(found[0])
        if found:
            listed = "".join(f"\n- {one.removeprefix(f'{where}: ')}" for one in found)
            raise DataError(f"{where}: {len(found)} problems.{listed}")


RawSplits: TypeAlias = Mapping[str, Any]
"""Tables by split name, each a ``datasets.Dataset`` whose images are still encoded."""

TEST_NAMES = ("test", "validation", "valid", "val")
"""The names that a test split may have, the preferred one first."""

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""The suffixes of the files that are read as images."""
_OTHER_IMAGES = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".svg", ".ico", ".tga", ".psd",
                 ".dng", ".cr2", ".nef", ".arw")  # fmt: skip
_DANGLING = "links to nothing"
_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")

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


def read_batches(split: Any, columns: Sequence[str], where: str) -> Iterator[list[list[Any]]]:
    """Yield the values of each column, batch by batch, in row order.

    ``columns``: Columns of it. An encoded image is bytes, a path, or a dict of ``"bytes"`` and ``"path"``.
    ``where``: What errors call the table.
    """
    column = next(iter(columns), "")
    try:
        for batch in split.select_columns([*columns]).with_format("arrow").iter(batch_size=_BATCH):
            yield [batch[column := name].to_pylist() for name in columns]
    except Exception as error:  # damaged files make pyarrow and `datasets` raise almost anything
        raise DataError(
            f"{where}: the column {column!r} cannot be read ({in_one_line(error, 300)}). Copy the data again."
        ) from error


def read_column(split: Any, column: str, where: str) -> list[Any]:
    """Return one column as a list; see `read_batches`."""
    return read_columns(split, [column], where)[column]


def read_columns(split: Any, columns: Sequence[str], where: str) -> dict[str, list[Any]]:
    """Return columns as lists, all in one pass; see `read_batches`."""
    found: dict[str, list[Any]] = {column: [] for column in columns}
    for batch in read_batches(split, columns, where):
        for values, more in zip(found.values(), batch, strict=True):
            values += more
    return found


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
        have = "has" if len(missing) == 1 else "have"
        raise DataError(
            f"{where}: {at(where, missing)} {have} no {column!r} (empty or NaN; in text files also NA or none); rows "
            f"without it: {len(missing)}. Fill or remove them. Where NA or none is a name, write another word, such as "
            "'nothing'."
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
    announced = {int(found[1]) for path in shards if (found := _SHARD.search(path.name))}
    if announced and announced != {len(shards)}:
        raise DataError(
            f"{folder}: {len(shards)} of {max(announced)} files of the split {split!r} are there. Copy all of them."
        )
    return shards


def parquet_table(path: Path) -> Any:
    """Return a Parquet file as a pyarrow table."""
    parquet = require_optional("pyarrow.parquet", "Reading Parquet files", "data")
    try:
        return parquet.ParquetFile(path).read()
    except Exception as error:  # pyarrow raises errors of many kinds for damaged files
        raise DataError(f"{path} cannot be read as Parquet ({in_one_line(error, 300)}). Copy it again.") from error


class LeftOut:
    """Counts what a folder holds and nobody reads, and why."""

    def __init__(self) -> None:
        self.paths: dict[str, dict[Path, None]] = {}

    def add(self, why: str, *paths: Path) -> None:
        """Count paths, if there are any."""
        if paths:
            self.paths.setdefault(why, {}).update(dict.fromkeys(paths))

    def note(self) -> str:
        """Return numbers and reasons; no names, since those of files may say whose they are. Empty if nothing is."""
        found = [f"{len(paths)} {why}" for why, paths in self.paths.items()]
        return f"Left out: {'; '.join(found)}." if found else ""

    def examples(self) -> str:
        """Return the first path of each reason, for the person who has the files; empty if there is none."""
        return ", ".join(in_one_line(next(iter(paths)), 300) for paths in self.paths.values())


class ImageFile(NamedTuple):
    """An image of a class, and whose it is; the name is empty if nobody's."""

    split: str
    client: str
    label: str
    path: Path


def image_files(root: Path, left_out: LeftOut, client: str = "") -> tuple[list[ImageFile], list[str]]:
    """Return the images of a folder by split and class, all in sorted order, and the classes without images.

    The folder holds ``train/CLASS/*.png`` and ``test/CLASS/*.png`` (or ``valid``, ``val``, ``validation``), or
    ``CLASS/*.png`` alone. What is not read is counted in ``left_out``.
    """
    folders = _subfolders(root, left_out)
    of_classes = [path for path in folders.values() if any(entry.is_dir() for entry in path.iterdir())]
    named = {path.name.lower().removesuffix("ing"): path for path in of_classes} | folders  # Train, testing
    splits = {"train": root}
    if "train" in named:
        test = [named[name] for name in TEST_NAMES if name in named][:1]
        splits = dict(zip(("train", "test"), [named["train"], *test], strict=False))
        beside = [path for path in folders.values() if path not in splits.values()]
        left_out.add("folders beside train and test", *beside)
        left_out.add("files beside train and test", *(path for path in unused_entries(root, ()) if path.is_file()))
    found: list[ImageFile] = []
    empty: list[str] = []
    for split, folder in splits.items():
        loose = [path for path in unused_entries(folder, ()) if not path.is_dir()]
        images = [path for path in loose if path.suffix.lower() in (*IMAGE_SUFFIXES, *_OTHER_IMAGES)]
        left_out.add("images outside the folders of classes", *images)
        left_out.add("other files outside the folders of classes", *(path for path in loose if path not in images))
        for name, path in sorted((to_nfc(path.name), path) for path in _subfolders(folder, left_out).values()):
            unread = {file: _unread(file) for file in sorted(path.iterdir())}
            for why, files in unread.values():
                left_out.add(why, *files)
            of_class = [ImageFile(split, client, name, file) for file, (why, _) in unread.items() if not why]
            found += of_class
            empty += [] if of_class else [path.relative_to(root).as_posix()]
    if dangling := list(left_out.paths.pop(_DANGLING, {})):
        raise DataError(
            f"{root}: {len(dangling)} of {len(dangling) + len(found)} images are links to files that are not there, "
            f"such as {dangling[0]}. Fetch the files (git annex get, dvc pull, git lfs pull), or remove the links."
        )
    if without := [split for split in splits if not any(file.split == split for file in found)]:
        raise DataError(
            f"{root}: the split {without[0]!r} has no images. Expected are train/CLASS/*.png and test/CLASS/*.png, or "
            f"CLASS/*.png alone (file types: {', '.join(IMAGE_SUFFIXES)}), or the Parquet files train.parquet and "
            f"test.parquet (or .csv). {left_out.note()}".rstrip()
        )
    return found, empty


def _unread(path: Path) -> tuple[str, list[Path]]:
    """Return why what lies in the folder of a class is not read, and which files these are; no reason for an image."""
    suffix = path.suffix.lower()
    if is_hidden(path.name):
        return "hidden images", _images_in(path)
    if path.is_dir():
        return "images in subfolders of classes: move them up, into the folder of their class", _images_in(path, "**/*")
    if suffix not in IMAGE_SUFFIXES:
        unread = "images that are not read here: save them as JPEG or PNG"
        return f"{suffix} {unread if suffix in _OTHER_IMAGES else 'other files'}".lstrip(), [path]
    if path.is_file():
        return "", []
    return _DANGLING if path.is_symlink() else "that are no files, such as pipes", [path]


def _images_in(path: Path, pattern: str = "*") -> list[Path]:
    """Return the images in a folder, or the image itself."""
    files = sorted(path.glob(pattern)) if path.is_dir() else [path]
    return [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is the system's, such as what macOS adds to archives."""
    return name.startswith(".") or name in _SYSTEM_FOLDERS


def unused_entries(folder: Path, used: Iterable[Path]) -> list[Path]:
    """Return what a folder holds beside the used files and may hold examples; no texts such as README.md, LICENSE."""
    known = {part for path in used for part in (path, path.parent)}
    return [path for path in sorted(folder.iterdir()) if not is_hidden(path.name) and path not in known
            and (path.is_dir() or path.suffix.lower() not in ("", ".md"))]  # fmt: skip


def check_links(folder: Path) -> None:
    """Raise `DataError` if a folder has links to nothing: they may stand for a class, a client or a test split."""
    gone = [path for path in sorted(folder.iterdir()) if not is_hidden(path.name) and not path.exists()]
    if gone:
        raise DataError(
            f"{folder}: {', '.join(path.name for path in gone[:_SHOWN])} {'are links' if gone[1:] else 'is a link'} to "
            "what is not there. Fetch it (git annex get, dvc pull), or remove the link."
        )


def check_utf8(paths: Iterable[Path]) -> None:
    """Raise `DataError` for a path that is no UTF-8, as in archives of old systems."""
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise DataError(
                f"the name {os.fsencode(path)!r} is not UTF-8. Rename it; convmv -r -f latin1 -t utf8 --notest does so."
            ) from None


def leave_out_system_folders(root: Path, left_out: LeftOut) -> None:
    """Count what systems add to folders and archives."""
    of_system = (root / name for name in _SYSTEM_FOLDERS if (root / name).is_dir())
    left_out.add("folders of the system (__MACOSX and such)", *of_system)


def _subfolders(root: Path, left_out: LeftOut) -> dict[str, Path]:
    check_links(root)
    leave_out_system_folders(root, left_out)
    folders = {path.name: path for path in sorted(root.iterdir()) if path.is_dir()}
    hidden = [path for name, path in folders.items() if name.startswith(".")]
    left_out.add("hidden images", *(image for path in hidden for image in _images_in(path)))
    return {name: path for name, path in folders.items() if not is_hidden(name)}


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
        raise ConnectionError(first_line(error)) from error


def read_hub(hub_id: str, commit: str | None) -> dict[str, Any]:
    """Download a data set, or take it from the cache of `datasets`.

    ``commit``: The version; None for the latest in the cache.
    """
    library = datasets_library("Loading from the Hugging Face Hub")
    try:
        return dict(library.load_dataset(hub_id, revision=commit))
    except (ConnectionError, TimeoutError) as error:
        raise ConnectionError(first_line(error)) from error
    except (OSError, ValueError, RuntimeError, library.exceptions.DatasetsError) as error:
        raise DataError(f"The data set {hub_id!r} cannot be loaded from the Hugging Face Hub: {error}") from error
