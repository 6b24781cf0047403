"""Examples that are held out: as a test split, to choose options on, or since somebody has seen them already."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep._utils.seeds import numpy_rng
from fedkeep.data.columns import scale_again
from fedkeep.data.dataset import Data, DataSet, select_rows
from fedkeep.data.schema import CLIENT, GROUP
from fedkeep.errors import ConfigError, DataError


def image_hashes(images: Tensor) -> Tensor:
    """Return a hash of each image's pixels, or of other inputs' numbers.

    ``images``: uint8 ``[n, channels, height, width]``, or other inputs.
    Returns: int64 ``[n]``: equal for equal images; equal for different ones with a probability of 2^-64.
    """
    rows = images.cpu().numpy()
    hashes = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
    return torch.tensor([int.from_bytes(one, "little", signed=True) for one in hashes], dtype=torch.int64)


HELD_OUT = "No test split in the source: {} held out."


def note_on_copies(train: Data, test: Data) -> str:
    """Return a note on held-out examples that are exact copies of training examples; empty if there are none."""
    count = int(torch.isin(image_hashes(test["input"]), image_hashes(train["input"])).sum())
    if not count:
        return ""
    name = "" if GROUP in train else ", or name the column of what belongs together in data.group"
    return (
        f"{count} of {len(test['label'])} held-out examples are exact copies of training examples, on which a network "
        f"does better than on new ones: remove copies{name}."
    )


ALL_HELD_OUT = (
    "Clients whose examples were all held out for the test: {count} ({named}). With partition.scheme=column they train "
    "nothing."
)


def note_on_missing(parts: Sequence[Mapping[str, Tensor]], column: str, names: Sequence[str], note: str) -> str:
    """Return a note on the classes or clients that the second part has and the first lacks; empty if there are none."""
    if not names:
        return ""
    counts, others = (part[column].bincount(minlength=len(names)) for part in parts)
    found = ((counts == 0) & (others > 0)).nonzero().flatten().tolist()
    named = ", ".join(repr(names[one]) for one in found[:5]) + ", ..." * (len(found) > 5)
    return note.format(named=named, count=len(found), others=int(others[found].sum())) if found else ""


def with_held_out(dataset: DataSet) -> DataSet:
    """Return a data set whose training split has the rows again, as its last, that were held out of it for a test.

    Of joined data sets of which only some held rows out, none are given back: others' were never training rows.
    """
    if dataset.test_held_out is not True:
        return dataset
    train = {key: torch.cat([values, dataset.test[key]]) for key, values in dataset.train.items()}
    names = "|".join(map(re.escape, dataset.name.split("+")))
    said = rf" ?(({names}): )?(No test split in the source|No test examples were given): [^.]* held out\."
    followed = (
        " ?Clients whose examples were all held out for the test: .*? they train nothing[.]",
        r" ?\d+ of \d+ held-out examples are exact copies .*? remove copies(, or name .*? data[.]group)?[.]",
        " ?Nobody can learn .*?: the test split has .*? training none[.]",
        " ?No test example is of .*?: results say nothing about them[.]",
    )
    note = re.sub("|".join([said, *followed]), "", dataset.note)
    return replace(dataset, train=train, test_held_out=False, note=note.strip())


def without_images(dataset: DataSet, hashes: Tensor, *, from_test: bool = False) -> DataSet:
    """Return a data set without the training images that have one of these hashes.

    ``hashes``: int64 ``[m]``; see `image_hashes`.
    ``from_test``: Whether such images leave the test split too, as where it was held out from the training split.
    """
    test = _without(dataset.test, hashes) if from_test else dataset.test
    return replace(dataset, train=_without(dataset.train, hashes), test=test)


def without_examples(dataset: DataSet, read: Tensor, inputs: Tensor) -> DataSet:
    """Return a data set without as many training examples of each of these inputs as there are; of images without all.

    Equal images are copies of one, equal rows may be those of two people.

    ``read``: Its training inputs, scaled as those that are taken out: other numbers are other inputs.
    """
    if read.dtype == torch.uint8:
        kept = ~torch.isin(image_hashes(read), image_hashes(inputs))
    else:
        left = Counter(image_hashes(inputs).tolist())
        kept = torch.ones(len(read), dtype=torch.bool)
        for place, found in enumerate(image_hashes(read).tolist()):
            kept[place] = not left[found]
            left[found] -= bool(left[found])
    if not kept.any():
        raise ConfigError(f"[public] {dataset.name} has no example that the run does not evaluate or hold out.")
    return replace(dataset, train=select_rows(dataset.train, kept))


def _without(split: Data, hashes: Tensor) -> Data:
    kept = ~torch.isin(image_hashes(split["input"]), hashes)
    return select_rows(split, kept)


def hold_out(groups: Tensor, share: float, purpose: str = "test split") -> Tensor:
    """Choose rows for a test split: the same share of every group, always the same rows."""
    values: np.ndarray[Any, np.dtype[np.int64]] = groups.numpy()
    # No seed of a run: the split is part of the data set, and every run must be tested on the same rows.
    keys = numpy_rng(0, purpose).random(len(values))
    order = np.lexsort((keys, values))
    _, starts, sizes = np.unique(values[order], return_index=True, return_counts=True)
    rank = np.arange(len(values)) - np.repeat(starts, sizes)
    chosen = np.empty(len(values), dtype=bool)
    chosen[order] = rank < np.repeat(np.floor(sizes * share + 0.5), sizes)
    return torch.from_numpy(chosen)


def hold_out_groups(groups: Tensor, labels: Tensor, share: float, purpose: str = "test split") -> Tensor:
    """Choose whole groups for a test split: about the same share of every class, always the same rows.

    ``groups``: int64 ``[n]``: which rows belong together.
    ``labels``: int64 ``[n]``: their classes; a group counts for the class of its first row.
    ``purpose``: Rows for another one are others.
    Returns: bool ``[n]``, true for a test row.
    """
    _, first, group, sizes = np.unique(groups.numpy(), return_index=True, return_inverse=True, return_counts=True)
    classes = labels.numpy()[first]
    order = np.lexsort((numpy_rng(0, purpose).random(len(sizes)), classes))
    taken = np.zeros(len(sizes), dtype=bool)
    for one in np.unique(classes):
        of_class = order[classes[order] == one]
        up_to = np.cumsum(sizes[of_class])
        taken[of_class] = up_to - sizes[of_class] / 2 < share * up_to[-1]
    return torch.from_numpy(taken[group.reshape(-1)])


def validated(dataset: DataSet, share: float, count_copies: bool = False, rescale: bool = True) -> DataSet:
    """Return a data set whose test split is the same share of each class of its training split, which loses it.

    Options are chosen on it, so that the test split stays unseen. The rows are the same for all seeds of a run. If
    the data set says which examples belong together, whole groups are held out.

    ``count_copies``: Whether the note says how many of these examples are in the training split too.
    ``rescale``: Whether a table is scaled by the rows that remain; else its columns stay those of a run.
    """
    label, purpose = dataset.train["label"].cpu(), "validation split"
    grouped = GROUP in dataset.train
    if grouped:
        chosen = hold_out_groups(dataset.train[GROUP].cpu(), label, share, purpose)
    else:
        chosen = hold_out(label, share, purpose)
    if not bool(chosen.any()):
        raise DataError(
            f"{dataset.name} has {len(chosen)} training images, of which data.validation={share} holds none out. "
            "Raise it."
        )
    train, test = (select_rows(dataset.train, rows) for rows in (~chosen, chosen))
    of = "each class's training images" + (", in whole groups" if grouped else "")
    note = f"Evaluated on {share:.0%} of {of}, held out; the test images are not used."
    if count_copies and (found := note_on_copies(train, test)):
        note = f"{note} {found}"
    without = ALL_HELD_OUT.replace(" for the test", "")
    note = f"{note} {note_on_missing((train, test), CLIENT, dataset.values.get(CLIENT, ()), without)}".rstrip()
    found_note = " ".join(filter(None, (dataset.note, note)))
    held_out = dataset.test_held_out if dataset.test_held_out != "nothing" else False
    dataset = replace(dataset, train=train, test=test, note=found_note, test_held_out=held_out)
    if not dataset.columns or not rescale:
        return dataset
    # The held-out rows had a part in the scaling of a table, which nothing may know of them.
    columns, known, unseen = scale_again(dataset.columns, train["input"], test["input"])
    return replace(dataset, train={**train, "input": known}, test={**test, "input": unseen}, columns=columns)
