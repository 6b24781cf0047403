"""Decoded data sets on disk, so that images are decoded once.

The cache of `datasets` alone would decode them at each start: 20 seconds for CIFAR-10 instead of a hundredth of one.
"""

import hashlib
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedkeep.data.columns import columns_from_json, columns_to_json
from fedkeep.data.dataset import DataSet
from fedkeep.data.readers import images_by_path
from fedkeep.errors import DataError

log = logging.getLogger(__name__)

_VERSION = 6  # to be raised when the same files would be decoded to something else


def cache_folder() -> Path:
    """Return the folder of decoded data sets: ``FEDKEEP_CACHE``, or ``fedkeep`` in the user's cache folder."""
    named = {"win32": "LOCALAPPDATA", "darwin": ""}.get(sys.platform, "XDG_CACHE_HOME")
    below = {"win32": "AppData/Local", "darwin": "Library/Caches"}.get(sys.platform, ".cache")
    try:
        if chosen := os.environ.get("FEDKEEP_CACHE"):
            return Path(chosen).expanduser()
        if base := os.environ.get(named):
            return Path(base) / "fedkeep"
        return Path.home() / below / "fedkeep"
    except RuntimeError:  # a container's user without HOME, who is in no list of users
        return Path(tempfile.gettempdir()) / f"fedkeep-{os.getuid()}"


def file_digests(path: Path, files: Iterable[Path]) -> tuple[tuple[str, str], ...]:
    """Return names and SHA-256 of the files of a file or folder, wherever it lies: times do not tell corrected ones.

    Images that a Parquet file only names are among them.
    """
    root, found = path if path.is_dir() else path.parent, []
    listed = [*files]
    named = [image for each in listed if each.suffix.lower() == ".parquet" for image in images_by_path(each)]
    for each in (*listed, *named):
        with each.open("rb") as file:
            told = each.relative_to(root) if each.is_relative_to(root) else each
            found.append((told.as_posix(), hashlib.file_digest(file, "sha256").hexdigest()))
    return tuple(found)


def digest(dataset: DataSet) -> str:
    """Return a hash of all that is in a data set, names and examples: 16 hexadecimal digits."""
    names = dataset.name, dataset.label_names, dataset.mean, dataset.std, dataset.note, dataset.features
    columns = columns_to_json(dataset.columns)
    hashed = hashlib.sha256(repr((names, sorted(dataset.values.items()), *columns)).encode())
    for split in (dataset.train, dataset.test):
        for name, column in sorted(split.items()):
            hashed.update(f"{name} {column.dtype} {list(column.shape)} ".encode())
            hashed.update(column.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()[:16]


def entry_path(name: str, how: Any, version: Any, decoding: int = _VERSION) -> Path:
    """Return the file of a cache entry.

    ``name``: The data set's name or Hub id.
    ``how``: How the data set is decoded. Another value gives another entry.
    ``version``: The version of the source, such as `file_digests` or a commit.
    ``decoding``: The version of the code that decodes; for what is not decoded one that stays, so that the entry does
        too.
    """
    return cache_folder() / f"{_stem(name, how, decoding)}-{_digest(version)}.safetensors"


def latest_entry(name: str, how: Any) -> Path | None:
    """Return the newest entry of any version, for when the source cannot be asked for its current one."""
    found = sorted(cache_folder().glob(f"{_stem(name, how)}-*.safetensors"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def load_or_build(path: Path, build: Callable[[], DataSet], expected: str = "") -> DataSet:
    """Return the data set of a cache entry (see `read_entry`); build and save it if there is none, or a damaged one.

    If the cache cannot be written to, there is a warning and the data set is decoded again next time.
    """
    if (dataset := read_entry(path, expected)) is not None:
        return dataset
    dataset = build()
    try:
        _write_entry(path, dataset)
        return read_entry(path, expected) or dataset  # what is read back shares its memory with other processes
    except (OSError, SafetensorError) as error:
        log.warning(
            "The decoded data set %s cannot be kept in %s (%s) and is decoded again next time. Set FEDKEEP_CACHE to a "
            "folder that can be written to.",
            dataset.name,
            path.parent,
            error,
        )
        return dataset


def read_entry(path: Path, expected: str = "") -> DataSet | None:
    """Return the data set of a cache entry, or None if there is none that is whole.

    Its content must have a digest: the expected one, or else the one that was written beside it.
    """
    try:
        if not path.is_file():
            return None
        with safe_open(path, framework="pt") as opened:
            metadata = json.loads(opened.metadata()["dataset"])
            splits: dict[str, dict[str, Any]] = {"train": {}, "test": {}}
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                split, column = key.split(".", 1)
                splits[split][column] = opened.get_tensor(key)
        given: dict[str, Any] = {key: tuple(metadata[key]) for key in ("label_names", "mean", "std")}
        given |= {"name": metadata["name"], "note": metadata["note"], "columns": columns_from_json(metadata)}
        given["values"] = {column: tuple(names) for column, names in metadata["values"].items()}
        given["test_held_out"] = metadata.get("test_held_out", False)
        dataset = DataSet(train=splits["train"], test=splits["test"], **given)
        if digest(dataset) != (expected or metadata["digest"]):
            raise ValueError("its content is not what was written")
        return dataset
    except (OSError, SafetensorError, DataError, ValueError, KeyError, TypeError) as error:
        why = "is damaged" if os.access(path, os.R_OK) else "is somebody else's"
        log.warning("The cache entry %s %s (%s); it is made again.", path, why, error)
        return None


def _write_entry(path: Path, dataset: DataSet) -> None:
    tensors = {f"train.{column}": values.contiguous() for column, values in dataset.train.items()}
    for column, values in dataset.test.items():  # may be the same memory, which safetensors refuses
        tensors[f"test.{column}"] = values.clone(memory_format=torch.contiguous_format)
    metadata = {key: getattr(dataset, key) for key in ("name", "label_names", "mean", "std", "note", "test_held_out")}
    metadata |= {"columns": columns_to_json(dataset.columns), "values": dict(dataset.values), "digest": digest(dataset)}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may write the same entry: each writes its own file, and the last rename wins.
    handle, temporary = tempfile.mkstemp(prefix=path.stem, suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={"dataset": json.dumps(metadata)})
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _stem(name: str, how: Any, decoding: int = _VERSION) -> str:
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "--", name)[-60:].strip("-.") or "data"
    return f"{readable}-{_digest([decoding, name, how])}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]
