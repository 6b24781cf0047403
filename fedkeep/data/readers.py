"""Splits as they are stored: Parquet files and the Hugging Face Hub, opened as `datasets` tables.

Problems of a data set are collected, so that one error tells all of them, with the lines of the file.
"""

import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeep.errors import DataError, first_line, in_one_line, require_optional

_SHOWN = 5


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


TEST_NAMES = ("test", "validation", "valid", "val")
"""The names that a test split may have, the preferred one first."""

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


def parquet_table(path: Path) -> Any:
    """Return a Parquet file as a pyarrow table."""
    parquet = require_optional("pyarrow.parquet", "Reading Parquet files", "data")
    try:
        table = parquet.ParquetFile(path).read()
    except Exception as error:  # pyarrow raises errors of many kinds for damaged files
        raise DataError(f"{path} cannot be read as Parquet ({in_one_line(error, 300)}). Copy it again.") from error
    if all(name == to_nfc(name) for name in table.column_names):
        return table
    return with_nfc_names(datasets_library("Reading Parquet files").Dataset(table), path).data.table


def with_nfc_names(table: Any, where: object) -> Any:
    """Return a table of `datasets` whose columns have composed names, as options have them."""
    composed = [to_nfc(name) for name in table.column_names]
    if twice := [name for name, count in Counter(composed).items() if count > 1]:
        raise DataError(f"{where} has two columns that are called {twice[0]}. Rename one.")
    renamed = {old: new for old, new in zip(table.column_names, composed, strict=True) if old != new}
    return table.rename_columns(renamed) if renamed else table


def images_by_path(path: Path) -> list[Path]:
    """Return the files of images that a Parquet file names instead of holding them; empty if it cannot be read."""
    parquet = require_optional("pyarrow.parquet", "Reading Parquet files", "data")
    try:
        with parquet.ParquetFile(path) as file:
            columns = _without_bytes(file.metadata)
            cells = [cell for column in file.read(columns=columns) for cell in column.to_pylist()] if columns else []
    except Exception:  # pyarrow raises errors of many kinds for damaged files, which are told where they are read
        return []
    named = dict.fromkeys(cell["path"] for cell in cells if isinstance(cell, dict) and isinstance(cell["path"], str))
    return [Path(name) for name in named if os.path.isfile(name)]


def _without_bytes(metadata: Any) -> list[str]:
    """Return the columns of paths beside columns of bytes that are empty in some row, as far as is known."""
    found = set()
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(metadata.num_columns)):
            name, told = column.path_in_schema, column.statistics
            if name.endswith(".bytes") and (told is None or told.null_count):
                found.add(f"{name.removesuffix('.bytes')}.path")
    return sorted(found)


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
