"""A split of a data set before it is decoded, from Parquet files or from elsewhere."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeep.errors import DataError, MissingExtra

Features = Mapping[str, Mapping[str, Any]]
"""What each column holds, in the words of Hugging Face `datasets`: ``{"_type": "Image"}``, ``{"_type": "ClassLabel",
"names": [...]}`` or ``{"_type": "Value", "dtype": ...}``."""

_CHUNK = 2000


@dataclass(frozen=True, eq=False)
class Split:
    """Name the columns of a split and read them one at a time.

    Parameters
    ----------
    where : what it is called in an error: a file or a Hub id, and the split's name.
    rows : how many rows it has.
    features : what its columns hold.
    read : yields a column's values in chunks, in row order; an image is encoded bytes, a dict of ``"bytes"`` and
        ``"path"``, or a path.
    """

    where: str
    rows: int
    features: Features
    read: Callable[[str], Iterator[Sequence[Any]]]

    def values(self, column: str) -> list[Any]:
        """Return a whole column as a list."""
        return [value for chunk in self.read(column) for value in chunk]


def needed(module: str, what: str) -> Any:
    """Import a module of the ``data`` extra.

    Raises
    ------
    MissingExtra
        With the install line, when it is not installed. `what` begins the sentence.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(what, "data") from error


def parquet_files(folder: Path, split: str) -> list[Path]:
    """Return the Parquet files of a split in a folder; an empty list where there are none.

    Found are ``SPLIT.parquet``, and the shards ``SPLIT-*.parquet`` in the folder or in one folder below it, which is
    how a copy of a Hub repository lies.

    Raises
    ------
    DataError
        When several folders below hold shards of the split, so that several data sets would be mixed.
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


def parquet_split(files: Sequence[Path], split: str) -> Split:
    """Open a split that lies in Parquet files, with the features that `datasets` wrote into them.

    Raises
    ------
    DataError
        For a file that is not Parquet, or files whose columns differ.
    MissingExtra
        Without pyarrow.
    """
    parquet = needed("pyarrow.parquet", "Reading Parquet files")
    where = f"{files[0] if len(files) == 1 else files[0].parent} (split {split!r})"
    schemas, rows = [], 0
    for path in files:
        try:
            with parquet.ParquetFile(path) as opened:
                schemas.append(opened.schema_arrow)
                rows += opened.metadata.num_rows
        except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
            raise DataError(f"{path} cannot be read as Parquet ({error}). Copy it again.") from error
    if any(schema.names != schemas[0].names for schema in schemas):
        raise DataError(f"{where}: the Parquet files of one split must have the same columns.")

    def read(column: str) -> Iterator[Sequence[Any]]:
        for path in files:
            try:
                with parquet.ParquetFile(path) as opened:
                    for batch in opened.iter_batches(batch_size=_CHUNK, columns=[column]):
                        yield _python(batch.column(0))
            except (OSError, ValueError) as error:
                raise DataError(f"{path}: the column {column!r} cannot be read ({error}). Copy it again.") from error

    return Split(where, rows, _features(schemas[0]), read)


def _python(column: Any) -> list[Any]:
    """Return Arrow values as Python's; of an image only its bytes, where they are there."""
    if str(column.type).startswith("struct") and column.type.get_field_index("bytes") >= 0:
        encoded = column.field("bytes")
        if encoded.null_count == 0:
            return list(encoded.to_pylist())
    return list(column.to_pylist())


def _features(schema: Any) -> Features:
    """Return the features in a file's metadata; without any, what Arrow's types say."""
    described = (schema.metadata or {}).get(b"huggingface")
    features: dict[str, Mapping[str, Any]] = {}
    if described is not None:
        try:
            features = dict(json.loads(described)["info"]["features"])
        except (ValueError, KeyError, TypeError):
            features = {}
    found: dict[str, Mapping[str, Any]] = {}
    for field in schema:
        kind = str(field.type)
        image = kind.startswith("struct<bytes") or kind in ("binary", "large_binary")
        plain = {"_type": "Image"} if image else {"_type": "Value", "dtype": kind}
        declared = features.get(field.name)
        found[field.name] = declared if isinstance(declared, Mapping) and "_type" in declared else plain
    return found
