"""One function for every place that data come from."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedkeep.data import cache
from fedkeep.data.assemble import assemble
from fedkeep.data.characters import alphabet, only_digits
from fedkeep.data.combine import join
from fedkeep.data.dataset import DataSet
from fedkeep.data.digits import digits
from fedkeep.data.folder import folder_splits, image_files
from fedkeep.data.hub import Unreachable, answers_offline, hub_splits, offline, revision
from fedkeep.data.ink import letters
from fedkeep.data.known import KNOWN, Known, data_folder
from fedkeep.data.layout import TEST_NAMES, Layout, guess
from fedkeep.data.splits import Split, parquet_files, parquet_split
from fedkeep.errors import DataError, did_you_mean

log = logging.getLogger(__name__)

_OF_FEMNIST = {"femnist-letters": letters, "femnist-digits": only_digits, "femnist-alphabet": alphabet}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load(name: str, *, data_dir: str | Path | None = None) -> DataSet:
    """Load a data set: a known one, one of the Hugging Face Hub, or a folder.

    What is found locally is preferred to the Hub. Decoded images are kept in the cache folder (``FEDKEEP_CACHE``).

    Parameters
    ----------
    name : a known name (see `known`), a Hub id ``"owner/name"``, or the path of a folder, from here or from the data
        folder, with the Parquet files ``train.parquet`` and ``test.parquet`` or with images, ``train/CLASS/*.png`` and
        ``test/CLASS/*.png`` or ``CLASS/*.png`` alone; or several of these as one set, with ``+`` between them (see
        `fedkeep.data.combine.join`).
    data_dir : a folder with local copies, ``OWNER/NAME/SPLIT.parquet``; the environment variable ``FEDKEEP_DATA`` if
        None.

    Raises
    ------
    DataError
        For a name that is none of these, a data set that is neither local nor on a Hub that answers, or data that
        are not what they should be.
    MissingExtra
        When packages for reading images are not installed.
    """
    if name == "digits":
        return digits()
    if name in _OF_FEMNIST:
        return _OF_FEMNIST[name](load("femnist", data_dir=data_dir))
    by_hub_id = {entry.hub: entry for entry in reversed([*KNOWN.values()]) if entry.hub}  # the first of several
    if (entry := KNOWN.get(name) or by_hub_id.get(name)) is not None:
        return _load_known(entry, data_folder(data_dir))
    path = Path(name).expanduser()
    if path.is_dir():
        return _load_folder(path, path.resolve().name)
    root = data_folder(data_dir)
    if root is not None and name and (root / name).is_dir():
        return _load_folder(root / name, name)
    if "+" in name:
        return join([load(part.strip(), data_dir=data_dir) for part in name.split("+")])
    if _HUB_ID.fullmatch(name):
        return _load_hub(name, name, None)
    near = did_you_mean(name.lower().replace("_", "-"), KNOWN)
    raise DataError(
        f"There is no data set {name!r}: it is neither a known name, nor a folder, nor a Hub id such as "
        f"'owner/name'.{near}"
    )


def _load_known(entry: Known, root: Path | None) -> DataSet:
    files = entry.files(root)
    if root is None or not files:
        if entry.hub:
            return _as_known(entry, _load_hub(entry.name, entry.hub, entry))
        raise DataError(
            f"The data set {entry.name!r} was not found locally, and the Hub has none like it. "
            f"{_put_here(entry.place, entry.layout)}"
        )
    if entry.layout.test not in files and not entry.layout.share:
        raise DataError(f"{root / entry.place} has {entry.layout.train}.parquet but no {entry.layout.test}.parquet.")
    version = cache.stamps((path for paths in files.values() for path in paths), root / entry.place)

    def build() -> DataSet:
        splits = {split: parquet_split(paths, split) for split, paths in files.items()}
        return assemble(entry.name, splits, entry.layout, entry.normalisation, entry.note)

    return _as_known(entry, cache.remembered(cache.entry(entry.name, _how(entry), version), build))


def _as_known(entry: Known, dataset: DataSet) -> DataSet:
    """Return a data set again; raise `DataError` where it has more classes than what it is called has."""
    if dataset.classes > entry.classes:
        raise DataError(
            f"{entry.title} has {entry.classes} classes, but this copy has {dataset.classes}: "
            f"{', '.join(dataset.label_names[:12])}{', ...' if dataset.classes > 12 else ''}. Correct its labels in "
            f"{entry.layout.label!r}, or load a folder of your own by its path."
        )
    return dataset


def _load_folder(folder: Path, name: str) -> DataSet:
    files = {split: parquet_files(folder, split) for split in ("train", *TEST_NAMES)}
    parquet = {split: paths for split, paths in files.items() if paths}
    images = {} if parquet else image_files(folder)
    every = [path for paths in parquet.values() for path in paths]
    every += [path for classes in images.values() for paths in classes.values() for path in paths]

    def build() -> DataSet:
        splits: Mapping[str, Split]
        if parquet:
            splits = {split: parquet_split(paths, split) for split, paths in parquet.items()}
        else:
            splits = folder_splits(folder, images)
        return assemble(name, splits, guess(splits, str(folder)))

    return cache.remembered(cache.entry(name, "folder", cache.stamps(every, folder)), build)


def _load_hub(name: str, hub_id: str, entry: Known | None) -> DataSet:
    how = _how(entry)

    def build(commit: str | None) -> DataSet:
        splits: Mapping[str, Split] = hub_splits(hub_id, commit)
        if entry is None:
            return assemble(name, splits, guess(splits, hub_id))
        splits = entry.prepare(splits) if entry.prepare is not None else splits
        return assemble(name, splits, entry.layout, entry.normalisation, entry.note)

    try:
        commit = revision(hub_id)
        return cache.remembered(cache.entry(hub_id, how, commit), lambda: build(commit))
    except Unreachable as error:
        kept = cache.latest(hub_id, how)
        if kept is not None and (dataset := cache.recall(kept)) is not None:
            log.warning("The Hub cannot be reached (%s): %s is the copy that was loaded last.", error, name)
            return dataset
        reason = str(error)
    if answers_offline():  # the Hub's library may have it from an earlier download, and says so at once
        try:
            return build(None)
        except Unreachable as error:
            reason = str(error)
    place, layout = (entry.place, entry.layout) if entry is not None else (hub_id, Layout())
    hint = (
        "HF_HUB_OFFLINE is set, which forbids it: unset it."
        if offline()
        else "HF_HUB_OFFLINE=1 takes what the Hub's library has downloaded before."
    )
    raise DataError(
        f"The data set {name!r} was not found locally, and the Hugging Face Hub cannot be reached ({reason}). "
        f"{_put_here(place, layout)} Or connect this machine to the Hub. {hint}"
    )


def _put_here(place: str, layout: Layout) -> str:
    variable = os.environ.get("FEDKEEP_DATA")
    now = f"FEDKEEP_DATA is {variable}" if variable else "FEDKEEP_DATA is not set"
    wanted = " and ".join(f"{place}/{split}.parquet" for split in (layout.train, layout.test))
    return f"Either put {wanted} into a folder and name that folder with --data-dir or FEDKEEP_DATA ({now})."


def _how(entry: Known | None) -> Any:
    """Return what decides how a source is decoded, for the cache."""
    return None if entry is None else [entry.name, asdict(entry.layout), entry.normalisation, entry.note]
