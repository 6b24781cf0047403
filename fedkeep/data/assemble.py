"""From stored splits to a `DataSet`: labels numbered, images decoded, a test split held out if there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fedkeep.data.dataset import DataSet, channel_statistics
from fedkeep.data.decode import decode
from fedkeep.data.holdout import hold_out
from fedkeep.data.readers import RawSplits, read_batches
from fedkeep.data.schema import Schema, number_values
from fedkeep.errors import DataError, did_you_mean

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]


def assemble(
    name: str,
    splits: RawSplits,
    schema: Schema,
    where: str,
    normalisation: Normalisation | None = None,
    note: str = "",
) -> DataSet:
    """Read, decode and check a data set.

    Parameters
    ----------
    name : str
        The data set's name.
    splits : mapping of str to datasets table
        The splits by name; the schema says which of them are used.
    schema : Schema
        Which columns and splits are used for what.
    where : str
        What errors call the source: a folder or a Hub id.
    normalisation : tuple of two tuples of float, optional
        Mean and standard deviation per channel; None computes them from the training images.
    note : str
        What is known about the data set; what was found in this copy is added.

    Raises
    ------
    DataError
        If something is missing, mixed or out of range.
    """
    if schema.train not in splits or (schema.test not in splits and not schema.test_share):
        missing = schema.train if schema.train not in splits else schema.test
        raise DataError(f"{name}: the split {missing!r} is missing.{did_you_mean(missing, splits)}")
    present = [split for split in (schema.train, schema.test) if split in splits]
    tables = [splits[split] for split in present]
    wheres = [f"{where} (split {split!r})" for split in present]
    for table, what in zip(tables, wheres, strict=True):
        schema.check(table, what)
    # Labels come first: what is wrong with them shows before the images have been decoded.
    labels, label_names, declared = number_values(tables, wheres, schema.label)
    further = {column: number_values(tables, wheres, stored)[0] for stored, column in schema.columns}
    notes = [note]
    if len(label_names) < declared:
        notes.append(
            f"{len(label_names)} of the {declared} declared classes occur in this copy; labels are renumbered."
        )
    parts: list[dict[str, Tensor]] = []
    for number, (table, what) in enumerate(zip(tables, wheres, strict=True)):
        batches = read_batches(table, schema.image, what)
        images = decode(batches, len(labels[number]), what, schema.channels, schema.side)
        columns = {column: values[number] for column, values in further.items()}
        parts.append({"input": images, "label": labels[number], **columns})
    if len(parts) == 1:
        parts, found = _hold_out_test(parts[0], schema)
        notes.append(found)
    elif schema.test not in ("", "test"):
        notes.append(f"The split {schema.test!r} is the test set.")
    train, test = _equal_channels(parts)
    mean, std = normalisation or channel_statistics(train["input"])
    return DataSet(name, train, test, label_names, mean, std, " ".join(filter(None, notes)))


def _hold_out_test(data: Mapping[str, Tensor], schema: Schema) -> tuple[list[dict[str, Tensor]], str]:
    """Return the training and the test part of the only split, and a note about it."""
    chosen = hold_out(data[schema.group or "label"], schema.test_share)
    if not bool(chosen.any()):
        raise DataError(
            f"There is no test split, and with {len(data['label'])} images there are too few to hold one out. Add a "
            "folder or a file 'test'."
        )
    parts = [{name: column[rows] for name, column in data.items()} for rows in (~chosen, chosen)]
    return parts, f"No test split in the source: {schema.test_share:.0%} of each {schema.group or 'class'} held out."


def _equal_channels(parts: Sequence[dict[str, Tensor]]) -> Sequence[dict[str, Tensor]]:
    """Give greyscale images three channels if the other split has colour."""
    channels = max(part["input"].shape[1] for part in parts)
    return [{**part, "input": part["input"].expand(-1, channels, -1, -1).contiguous()} for part in parts]
