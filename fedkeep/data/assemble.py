"""From stored splits to a `DataSet`: labels numbered, inputs read, a test split held out if there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeep.data.columns import TableColumn
from fedkeep.data.data_options import DataOptions
from fedkeep.data.dataset import DataSet, channel_statistics
from fedkeep.data.decode import decode
from fedkeep.data.dedup import note_on_copies
from fedkeep.data.holdout import NO_TEST_SPLIT, hold_out, hold_out_groups
from fedkeep.data.own_files import OwnSplits
from fedkeep.data.problems import Problems, Where
from fedkeep.data.readers import RawSplits, read_batches
from fedkeep.data.schema import CLIENT, GROUP, Schema, number_values
from fedkeep.data.tables import read_inputs
from fedkeep.errors import DataError, did_you_mean

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]


def assemble(
    name: str,
    splits: RawSplits,
    schema: Schema,
    where: str,
    normalisation: Normalisation | None = None,
    note: str = "",
    options: DataOptions | None = None,
    own: OwnSplits | None = None,
    columns: Sequence[TableColumn] = (),
) -> DataSet:
    """Read, decode and check a data set; raises `DataError` with all that is missing, mixed or out of range.

    where : what errors call the source: a folder or a Hub id.
    normalisation : mean and standard deviation per channel; None computes them from the training images.
    note : what is known about the data set; what was found in this copy is added.
    options : how images are resized and tables are read; None for a known data set.
    own : how a user's own tables were read, for the lines of files in errors.
    columns : how a run has imputed and scaled a table's columns; empty to find it out.
    """
    if schema.train not in splits or (schema.test not in splits and not schema.test_share):
        missing = schema.train if schema.train not in splits else schema.test
        raise DataError(f"{name}: the split {missing!r} is missing.{did_you_mean(missing, splits)}")
    present = [split for split in (schema.train, schema.test) if split in splits]
    tables = [splits[split] for split in present]
    own = own or OwnSplits(splits)
    wheres = [Where(f"{where} (split {split!r})", own.lines.get(split)) for split in present]
    for number, (table, what) in enumerate(zip(tables, wheres, strict=True)):
        # Test examples need not be anybody's.
        schema.check(table, str(what), optional=(CLIENT, GROUP) if number else ())
    is_own, problems, as_text = options is not None, Problems(), bool(own.separator)
    options = options or DataOptions()
    # Labels come first: what is wrong with them shows before the images have been decoded.
    labels: list[Tensor] = []
    label_names: tuple[str, ...] = ()
    declared, noted = 0, problems if is_own else None
    with problems.collect():
        labels, label_names, declared = number_values(
            tables, wheres, schema.label, problems=noted, as_text=as_text, is_class=True
        )
    further = {}
    for stored, column in schema.columns:
        with problems.collect():
            further[column] = _number_column(tables, wheres, stored, noted, as_text)
    if schema.image or not schema.inputs:
        problems.check(wheres[0])
    # Before inputs are read, since test rows must not have a part in their scaling.
    held_out = None
    if len(tables) == 1 and not problems.found:
        within = further[schema.group][0][0] if schema.group else labels[0]
        whole = schema.group == GROUP
        held_out = (
            hold_out_groups(within, labels[0], schema.test_share) if whole else hold_out(within, schema.test_share)
        )
    inputs: list[Tensor] = []
    seen: Counter[str] = Counter()
    if schema.image:
        for number, (table, what) in enumerate(zip(tables, wheres, strict=True)):
            batches = read_batches(table, schema.image, str(what))
            rows = len(labels[number])
            inputs.append(decode(batches, rows, str(what), schema.channels, schema.side, options.size, seen))
    else:
        with problems.collect():
            inputs, columns = read_inputs(
                tables, wheres, schema, options, problems, separator=own.separator, held_out=held_out, columns=columns
            )
        problems.check(where)
    notes = [note, own.note, schema.note, *dict.fromkeys(problems.notes)]
    if len(label_names) < declared:
        notes.append(
            f"{len(label_names)} of the {declared} declared classes occur in this copy; labels are renumbered."
        )
    parts = [
        {
            "input": inputs[number],
            "label": labels[number],
            **{column: _of_nobody(of[number], labels[number]) for column, (of, _) in further.items()},
        }
        for number in range(len(tables))
    ]
    if held_out is not None:
        parts, found = _hold_out_test(parts[0], held_out, schema)
        notes += [found, note_on_copies(parts[0]["input"], parts[1]["input"]) if is_own else ""]
    elif schema.test not in ("", "test"):
        notes.append(f"The split {schema.test!r} is the test set.")
    if held_out is None and schema.group == GROUP:
        shared = int(torch.isin(parts[1][GROUP], parts[0][GROUP]).sum())
        notes.append(f"{shared} test examples are of groups that are in the training split too." if shared else "")
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if schema.image:
        parts = _equal_channels(parts)
        mean, std = normalisation or channel_statistics(parts[0]["input"])
    notes += [f"{count} images are {what}." for what, count in sorted(seen.items())]
    unused = sorted({*splits} - {*present}) if is_own else []
    notes.append(f"Not read: the split {', '.join(map(repr, unused))}." if unused else "")
    notes.append(_classes_without_training(parts, label_names))
    train, test = parts
    values = {column: names for column, (_, names) in further.items() if column != GROUP}  # patients stay unnamed
    noted_all = " ".join(filter(None, notes))
    return DataSet(name, train, test, label_names, mean, std, noted_all, values, tuple(columns))


def _of_nobody(numbers: Tensor, labels: Tensor) -> Tensor:
    """Return -1 for each row of a split that does not have a further column."""
    return numbers if len(numbers) else torch.full_like(labels, -1)


def _number_column(
    tables: Sequence[Any], wheres: Sequence[Where], stored: str, problems: Problems | None, as_text: bool
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return the numbers of a further column in each split, none in a split without it, and what they stand for."""
    have = [number for number, table in enumerate(tables) if stored in table.features]
    numbers, names, _ = number_values(
        [tables[n] for n in have], [wheres[n] for n in have], stored, problems=problems, as_text=as_text
    )
    by_split = dict(zip(have, numbers, strict=True))
    return [by_split.get(n, torch.empty(0, dtype=torch.int64)) for n in range(len(tables))], names


def _classes_without_training(parts: Sequence[Mapping[str, Tensor]], label_names: Sequence[str]) -> str:
    """Return a note about classes of the test split that no training example has; empty if there is none."""
    trained, tested = (part["label"].bincount(minlength=len(label_names)) for part in parts)
    only_tested = ((trained == 0) & (tested > 0)).nonzero().flatten().tolist()
    if not only_tested:
        return ""
    named = ", ".join(repr(label_names[label]) for label in only_tested[:5]) + ", ..." * (len(only_tested) > 5)
    return (
        f"Nobody can learn {named}: the test split has {int(tested[only_tested].sum())} such examples, training none."
    )


def _hold_out_test(data: Mapping[str, Tensor], chosen: Tensor, schema: Schema) -> tuple[list[dict[str, Tensor]], str]:
    """Return the training and the test part of the only split, and a note about it."""
    if not bool(chosen.any()):
        raise DataError(
            f"There is no test split, and with {len(data['label'])} examples there are too few to hold one out"
            f"{' in whole groups' if schema.group == GROUP else ''}. Add a folder or a file 'test'."
        )
    parts = [{name: column[rows] for name, column in data.items()} for rows in (~chosen, chosen)]
    of = "each class, in whole groups," if schema.group == GROUP else f"each {schema.group or 'class'}"
    return parts, f"{NO_TEST_SPLIT}: {schema.test_share:.0%} of {of} held out."


def _equal_channels(parts: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Give greyscale images three channels if the other split has colour."""
    channels = max(part["input"].shape[1] for part in parts)
    return [{**part, "input": part["input"].expand(-1, channels, -1, -1).contiguous()} for part in parts]
