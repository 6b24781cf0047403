"""Load a data set by name: a known one, one of the Hugging Face Hub, a file or a folder; from splits to a `DataSet`."""

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import chain
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedkeep.data import array_store, cache
from fedkeep.data.arrays import from_arrays, read_npz
from fedkeep.data.catalog import CATALOG, CatalogEntry, data_folder, local_paths
from fedkeep.data.columns import TableColumn, columns_to_json
from fedkeep.data.combine import concatenate, emnist_style_letters, femnist_alphabet, femnist_digits
from fedkeep.data.dataset import DataSet, channel_statistics, select_rows
from fedkeep.data.decode import decode
from fedkeep.data.holdout import ALL_HELD_OUT, HELD_OUT, hold_out, hold_out_groups, note_on_copies, note_on_missing
from fedkeep.data.own_files import TABLE_SUFFIXES, OwnSplits, check_utf8, find_data_files, split_by_column, to_dataset
from fedkeep.data.readers import (
    Problems,
    Where,
    hub_commit,
    is_offline,
    parquet_table,
    read_batches,
    read_hub,
    with_nfc_names,
)
from fedkeep.data.schema import (
    CLIENT,
    GROUP,
    DataOptions,
    Normalisation,
    Schema,
    Splits,
    infer_schema,
    number_values,
)
from fedkeep.data.tables import read_inputs
from fedkeep.errors import DataError, DataNotFound, did_you_mean
from fedkeep.options import as_table


def assemble(
    name: str,
    splits: Splits,
    schema: Schema,
    where: str,
    normalisation: Normalisation | None = None,
    note: str = "",
    options: DataOptions | None = None,
    own: OwnSplits | None = None,
    columns: Sequence[TableColumn] | None = None,
) -> DataSet:
    """Read, decode and check a data set; raises `DataError` with all that is missing, mixed or out of range.

    where : what errors call the source: a folder or a Hub id.
    normalisation : mean and standard deviation per channel; None computes them from the training images.
    note : what is known about the data set; what was found in this copy is added.
    options : how images are resized and tables are read; None for a known data set.
    own : how a user's own tables were read, for the lines of files in errors.
    columns : how a run has imputed and scaled a table's columns; empty to find it out; None if these are all data.
    """
    if schema.train not in splits or (schema.test not in splits and not schema.test_share):
        missing = schema.train if schema.train not in splits else schema.test
        raise DataError(f"{name}: the split {missing!r} is missing.{did_you_mean(missing, splits)}")
    present = [split for split in (schema.train, schema.test) if split in splits]
    tables = [splits[split] for split in present]
    own = own or OwnSplits(splits)
    wheres = [Where(f"{where} (split {split!r})", own.lines.get(split, ())) for split in present]
    for number, (table, what) in enumerate(zip(tables, wheres, strict=True)):
        # Test examples need not be anybody's.
        schema.check(table, str(what), optional=(CLIENT, GROUP) if number else ())
    is_own, problems, as_text, of_run = options is not None, Problems(), bool(own.separator), columns is not None
    options = options or DataOptions()
    # Labels come first: what is wrong with them shows before the images have been decoded.
    noted, numbered = problems if is_own else None, {}
    for stored, column in ((schema.label, "label"), *schema.columns):
        with problems.collect():
            is_class = column == "label"
            numbered[column] = number_values(tables, wheres, stored, noted, as_text=as_text, is_class=is_class)
    # Before inputs are read, since test rows must not have a part in their scaling.
    held_out = None
    if len(tables) == 1 and not problems.found:
        within, labels = (numbered[column][0][0] for column in (schema.group or "label", "label"))
        whole = schema.group == GROUP
        share = schema.test_share
        held_out = hold_out_groups(within, labels, share) if whole else hold_out(within, share)
    inputs: list[Tensor] = []
    seen: Counter[str] = Counter()
    if schema.image:
        problems.check(wheres[0])
        for table, what in zip(tables, wheres, strict=True):
            batches = (images for [images] in read_batches(table, [schema.image], str(what)))
            inputs.append(decode(batches, len(table), str(what), schema.channels, schema.side, options.size, seen))
    else:
        with problems.collect():
            inputs, columns = read_inputs(
                tables,
                wheres,
                schema,
                options,
                problems,
                separator=own.separator,
                held_out=held_out,
                columns=columns or (),
            )
        problems.check(where)
    notes = [note, own.note, schema.note, *dict.fromkeys(problems.notes)]
    _, label_names, declared = numbered["label"]
    if len(label_names) < declared:
        notes.append(
            f"{len(label_names)} of the {declared} declared classes occur in this copy; labels are renumbered."
        )
    parts = [
        {"input": inputs[number], **{column: numbers[number] for column, (numbers, _, _) in numbered.items()}}
        for number in range(len(tables))
    ]
    held: bool | Literal["nothing"] = held_out is not None
    if held_out is not None and of_run and not bool(held_out.any()):
        parts, held = [*parts, *parts], "nothing"  # a small site trains on all its rows
    elif held_out is not None:
        parts, found = _hold_out_test(parts[0], held_out, schema)
        notes += [found, note_on_copies(*parts) if is_own else ""]
    elif schema.test not in ("", "test"):
        notes.append(f"The split {schema.test!r} is the test set.")
    if held_out is None and schema.group == GROUP:
        shared = int(torch.isin(parts[1][GROUP], parts[0][GROUP]).sum())
        notes.append(f"{shared} test examples are of groups that are in the training split too." if shared else "")
    scaling: Normalisation = ((), ())
    if schema.image:
        channels = max(part["input"].shape[1] for part in parts)  # greyscale images get three if others have colour
        parts = [{**part, "input": part["input"].expand(-1, channels, -1, -1).contiguous()} for part in parts]
        scaling = normalisation or channel_statistics(parts[0]["input"])
    notes += [f"{what}: {count}." for what, count in sorted(seen.items())]
    unused = sorted({*splits} - {*present}) if is_own else []
    notes.append(f"Not read: the split {', '.join(map(repr, unused))}." if unused else "")
    unlearned = "Nobody can learn {named}: the test split has {others} such examples, training none."
    notes.append(note_on_missing(parts, "label", label_names, unlearned))
    untested = "No test example is of {named}, and {others} training examples are: results say nothing about them."
    notes.append(note_on_missing(parts[::-1], "label", label_names, untested) if is_own else "")
    train, test = parts
    unnamed = ("label", GROUP)  # patients stay unnamed
    values = {column: names for column, (_, names, _) in numbered.items() if column not in unnamed}
    if held is True:
        notes.append(note_on_missing(parts, CLIENT, values.get(CLIENT, ()), ALL_HELD_OUT))
    noted_all = " ".join(filter(None, notes))
    return DataSet(name, train, test, label_names, *scaling, noted_all, values, tuple(columns or ()), held)


def _hold_out_test(data: Mapping[str, Tensor], chosen: Tensor, schema: Schema) -> tuple[list[dict[str, Tensor]], str]:
    """Return the training and the test part of the only split, and a note about it."""
    if not bool(chosen.any()):
        raise DataError(
            f"There is no test split, and with {len(data['label'])} examples there are too few to hold one out"
            f"{' in whole groups' if schema.group == GROUP else ''}. Add a folder or a file 'test'."
        )
    parts = [select_rows(data, rows) for rows in (~chosen, chosen)]
    of = "each class, in whole groups," if schema.group == GROUP else f"each {schema.group or 'class'}"
    return parts, HELD_OUT.format(f"{schema.test_share:.0%} of {of}")


log = logging.getLogger(__name__)

_FEMNIST_SUBSETS = {
    "femnist-letters": emnist_style_letters,
    "femnist-digits": femnist_digits,
    "femnist-alphabet": femnist_alphabet,
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load(
    name: str,
    *,
    data_dir: str | Path | None = None,
    options: DataOptions | None = None,
    columns: Sequence[TableColumn] | None = None,
) -> DataSet:
    """Load a data set.

    A local copy is preferred to the Hub. Decoded images are kept in the cache folder (``FEDKEEP_CACHE``).

    ``name``: A known name (see `fedkeep.data.catalog`), a Hub id ``"owner/name"``, or a file or folder, relative to the
        working directory or to the data folder (see `fedkeep.data.own_files.find_data_files`). Several names with ``+``
        between them are one data set (see `fedkeep.data.combine.concatenate`).
    ``data_dir``: The data folder: local copies, ``OWNER/NAME/SPLIT.parquet``. By default the environment variable
        ``FEDKEEP_DATA``.
    ``options``: How files are read that are not known by name.
    ``columns``: How a run has imputed and scaled the columns of a table; empty: by this table's training rows. Given
        for a site's data: where these are too few to hold a test split out, nothing is held out.
    """
    options = options or DataOptions()
    if options != DataOptions() and name in CATALOG:
        raise DataError(f"The columns and sizes of {name!r} are known. Leave all but its name out of [data].")
    if name == "digits":
        return _load_digits()
    if name.startswith(array_store.PREFIX):
        return array_store.find(name)
    if name in _FEMNIST_SUBSETS:
        return _FEMNIST_SUBSETS[name](load("femnist", data_dir=data_dir))
    by_hub_id = {entry.hub: entry for entry in reversed([*CATALOG.values()]) if entry.hub}  # the first of several
    if (entry := CATALOG.get(name) or by_hub_id.get(name)) is not None:
        return _check_classes(entry, _load_known(entry, data_folder(data_dir)))
    if (found := _find_path(name, data_dir)) is not None:
        return _load_path(*found, options, columns)
    if any(map(os.path.isfile, local_paths(name, data_dir))):
        raise DataError(
            f"{name} is a file of a kind that is not read ({', '.join((*TABLE_SUFFIXES, '.npz'))}). Save a spreadsheet "
            "as CSV or Parquet, and unpack what is packed."
        )
    if "+" in name:
        parts = [load(part.strip(), data_dir=data_dir, options=options) for part in name.split("+")]
        return concatenate(parts)
    if _HUB_ID.fullmatch(name):
        return _load_hub(name, name, None, options)
    hint = did_you_mean(name.lower().replace("_", "-"), CATALOG)
    raise DataNotFound(
        f"There is no data set {name!r}: it is neither a known name, nor a file or folder, nor a Hub id such as "
        f"'owner/name'.{hint}"
    )


def _load_digits() -> DataSet:
    """Return scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, a stratified fifth of them as the test split.

    The pixel values 0..16 are scaled to 0..255. Source: Alpaydin & Kaynak, "Optical Recognition of Handwritten
    Digits", UCI (1998), the test part. The file is read without scikit-learn's own function, whose import takes as long
    as that of PyTorch.
    """
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(file, delimiter=",")
    images = (torch.from_numpy(rows[:, :-1].reshape(-1, 8, 8)) * (255 / 16)).round().to(torch.uint8)
    return replace(from_arrays(images, rows[:, -1], name="digits"), note="", test_held_out=False)


def _load_known(entry: CatalogEntry, root: Path | None) -> DataSet:
    files = entry.files(root)
    if root is None or not files:
        if entry.hub:
            return _load_hub(entry.name, entry.hub, entry)
        raise DataError(
            f"The data set {entry.name!r} was not found locally, and the Hub has none like it. "
            f"{_local_copy_advice(entry.path, entry.schema)}"
        )
    folder, schema = root / entry.path, entry.schema
    if schema.test not in files and not schema.test_share:
        raise DataError(f"{folder} has {schema.train}.parquet but no {schema.test}.parquet.")

    def build() -> DataSet:
        tables = {split: to_dataset([(path, parquet_table(path)) for path in paths]) for split, paths in files.items()}
        return assemble(entry.name, tables, schema, str(folder), entry.normalisation, entry.note)

    version = cache.file_digests(folder, (path for paths in files.values() for path in paths))
    return cache.load_or_build(cache.entry_path(entry.name, _decoding(entry), version), build)


def _check_classes(entry: CatalogEntry, dataset: DataSet) -> DataSet:
    """Return the data set; raise `DataError` if it has more classes than the known data set of its name."""
    if dataset.num_classes > entry.num_classes:
        raise DataError(
            f"{entry.title} has {entry.num_classes} classes, but this copy has {dataset.num_classes}: "
            f"{', '.join(dataset.label_names[:12])}{', ...' if dataset.num_classes > 12 else ''}. Correct its labels "
            f"in {entry.schema.label!r}, or load a folder of your own by its path."
        )
    return dataset


def local_version(name: str, data_dir: str | Path | None) -> tuple[tuple[str, str], ...]:
    """Return what changes when the files of a data set of one's own do, or other files have its name now.

    ``name``: The data set's name; of one that is known or on the Hub nothing is told.
    """
    path = local_path(name, data_dir)
    if path is None and "+" in name:
        return tuple(chain.from_iterable(local_version(part.strip(), data_dir) for part in name.split("+")))
    if path is None:
        return ()
    return cache.file_digests(path, [path] if path.is_file() else find_data_files(path).files)


def local_path(name: str, data_dir: str | Path | None) -> Path | None:
    """Return where the files of a data set of one's own lie, as an absolute path.

    Returns: None for a data set that is known by name, given in Python, on the Hub, or not there.
    """
    if name in CATALOG or name.startswith(array_store.PREFIX):
        return None
    found = _find_path(name, data_dir)
    return None if found is None else found[0].resolve()


def _find_path(name: str, data_dir: str | Path | None) -> tuple[Path, str] | None:
    """Return the file or folder of a data set, and what it is called; None if there is none."""
    here, *elsewhere = local_paths(name, data_dir)
    for path in (here, *elsewhere) if name else ():
        readable = path.suffix.lower() in (*TABLE_SUFFIXES, ".npz")
        if os.path.isdir(path) or (readable and os.path.isfile(path)):  # False for odd names
            return path, path.resolve().name if path is here else name
    return None


def _load_path(path: Path, name: str, options: DataOptions, columns: Sequence[TableColumn] | None = None) -> DataSet:
    if path.suffix.lower() == ".npz" and path.is_file():
        if options != DataOptions():
            raise DataError(f"{path} holds arrays, not columns. Leave all but its name out of [data].")
        return from_arrays(**read_npz(path), name=name)
    found = find_data_files(path)
    check_utf8([path, *found.files])

    def build() -> DataSet:
        return assemble_own(name, found.read(), str(path), options, found.note, columns)

    how = ["folder 7", as_table(options), found.note, columns_to_json(columns or ()), *["site"] * (columns is not None)]
    dataset = cache.load_or_build(cache.entry_path(name, how, cache.file_digests(path, found.files)), build)
    if found.note and parent_process() is None:  # workers read the same; what cannot be read is tried more than once
        such_as = f" Such as: {found.examples}." if found.examples else ""
        log.warning("%s: %s%s", name, found.note, such_as)
    return dataset


def assemble_own(
    name: str,
    own: OwnSplits,
    where: str,
    options: DataOptions,
    note: str = "",
    columns: Sequence[TableColumn] | None = None,
) -> DataSet:
    """Return a user's own tables or images as a data set; the columns of a run take the place of the options'."""
    own = replace(own, splits={split: with_nfc_names(table, where) for split, table in own.splits.items()})
    if columns:
        present = own.splits["train"].features if "train" in own.splits else ()
        exclude = tuple(name for name in options.exclude if name in present)
        options = replace(options, columns=tuple(column.name for column in columns), exclude=exclude)
    own = split_by_column(own, options.split, where)
    schema = infer_schema(own.splits, where, options)
    return assemble(name, own.splits, schema, where, note=note, options=options, own=own, columns=columns)


def _load_hub(name: str, hub_id: str, entry: CatalogEntry | None, options: DataOptions | None = None) -> DataSet:
    def build(commit: str | None) -> DataSet:
        splits: Splits = read_hub(hub_id, commit)
        if entry is None:
            return assemble_own(name, OwnSplits(splits), hub_id, options or DataOptions())
        splits = splits if entry.prepare is None else entry.prepare(splits)
        return assemble(name, splits, entry.schema, hub_id, entry.normalisation, entry.note)

    decoding = as_table(options or DataOptions()) if entry is None else _decoding(entry)
    try:
        commit = hub_commit(hub_id)
        return cache.load_or_build(cache.entry_path(hub_id, decoding, commit), lambda: build(commit))
    except ConnectionError as error:
        kept = cache.latest_entry(hub_id, decoding)
        if kept is not None and (dataset := cache.read_entry(kept)) is not None:
            log.warning("The Hub cannot be reached (%s): %s is the copy that was loaded last.", error, name)
            return dataset
        reason = str(error)
    if is_offline():  # `datasets` may have it from an earlier download, and does not ask the Hub first
        try:
            return build(None)
        except ConnectionError as error:
            reason = str(error)
    path, schema = (entry.path, entry.schema) if entry is not None else (hub_id, Schema())
    hint = (
        "HF_HUB_OFFLINE is set, which forbids it: unset it."
        if is_offline()
        else "HF_HUB_OFFLINE=1 takes what the Hub's library has downloaded before."
    )
    raise DataNotFound(
        f"The data set {name!r} was not found locally, and the Hugging Face Hub cannot be reached ({reason}). "
        f"{_local_copy_advice(path, schema)} Or connect this machine to the Hub. {hint}"
    )


def _local_copy_advice(path: str, schema: Schema) -> str:
    variable = os.environ.get("FEDKEEP_DATA")
    now = f"FEDKEEP_DATA is {variable}" if variable else "FEDKEEP_DATA is not set"
    wanted = " and ".join(f"{path}/{split}.parquet" for split in (schema.train, schema.test))
    return f"Either put {wanted} into a folder and name that folder with --data-dir or FEDKEEP_DATA ({now})."


def _decoding(entry: CatalogEntry) -> list[Any]:
    """Return what decides how a known data set is decoded, for the cache."""
    return [entry.name, asdict(entry.schema), entry.normalisation, entry.note]
