"""How a user's own files are read, and which columns and splits are inputs, labels, training and test data."""

import datetime
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedkeep.data.readers import TEST_NAMES, Problems, Where, at, check_filled, datasets_library, read_column, to_nfc
from fedkeep.errors import ConfigError, DataError, did_you_mean
from fedkeep.options import Options, option

SINGLE_LABEL = "FedKeep does single-label classification only: one class for each example, an integer or a text."
Splits: TypeAlias = Mapping[str, Any]
"""Tables by split name, each a ``datasets.Dataset`` whose images are still encoded."""
MISSING_TEXTS = frozenset(
    ["", "#n/a", "#n/a n/a", "#na", "-nan", "n/a", "na", "nan", "null", "none", "1.#ind", "1.#qnan", "-1.#ind"]
)
"""What an empty cell of a text file looks like, in lower case."""
_IMAGE_NAMES = ("image", "img")
CLIENT = "client"
"""The column of a `DataSet` that says whose an example is."""
GROUP = "group"
"""The column of a `DataSet` that says which examples belong together, such as those of a patient."""
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation per channel."""
_INDEX = re.compile(r"|Unnamed: \d+(\.\d+)?|__index_level_\d+__")  # what pandas and R call the numbers of rows
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,9})?")
LABEL_NAMES = ("label", "labels", "fine_label", "character", "target", "class")


@dataclass(frozen=True)
class DataOptions(Options):
    """Columns, sizes and scaling of data that are not known by name.

    Images are resized and text is turned into token ids while they are read; the files stay as they are.
    """

    label: str = option("", "column of the classes; empty: the one that is declared, or called label, class or target")
    client: str = option("", "column that says whose an example is; empty: 'client', if there is such a column")
    group: str = option("", "column of what belongs together, such as a patient: only whole groups are held out")
    split: str = option("", "column that marks rows as train or test; empty: there is none")
    size: tuple[int, ...] = option((), "height and width in pixels to which all images are resized", low=1, high=4096)
    columns: tuple[str, ...] = option((), "columns of a table that are the input; empty: all that are left")
    exclude: tuple[str, ...] = option((), "columns of a table that are not used, such as ids of patients")
    scaling: Literal["standard", "none"] = option(
        "standard", "columns of numbers get mean 0 and standard deviation 1 over all training rows, or stay as they are"
    )
    text: str = option("", "column of text, of which each word becomes a token id")
    length: int = option(64, "token ids of a text: longer ones are cut, shorter ones filled with 0", low=1, high=65536)
    vocabulary: int = option(10_000, "number of token ids into which words are hashed", low=2, high=2**31 - 1)

    def check(self) -> None:
        """Raise `ConfigError` if options contradict each other; tables have composed names of columns."""
        for name in ("label", "client", "group", "split", "text"):
            object.__setattr__(self, name, to_nfc(getattr(self, name)))
        for name in ("columns", "exclude"):
            object.__setattr__(self, name, tuple(map(to_nfc, getattr(self, name))))
        if self.size and len(self.size) != 2:
            raise ConfigError(f"data.size is a height and a width, such as [64, 64], not {list(self.size)}.")
        if self.text and self.columns:
            raise ConfigError("data.text names the only input: leave data.columns out.")
        single = (self.label, self.client, self.group, self.split, self.text)
        named = [name for name in (*single, *self.columns, *self.exclude) if name]
        twice = next((name for name in named if named.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"[data] names the column {twice!r} for two purposes. Name it once.")


@dataclass(frozen=True)
class Schema:
    """Name the columns and splits of a stored data set.

    ``image``, ``label``: The columns of images and labels; without images the first is empty.
    ``train``, ``test``: The splits; an empty test split is made from the training split (see `test_share`).
    ``columns``: Further columns: the stored name and the name in a `DataSet`. Their values are numbered in sorted
        order.
    ``group``: A name in `columns` within which a missing test split is held out; empty for within each class. `GROUP`
        is held out in whole groups.
    ``test_share``: Share of each group that is held out if there is no test split; with 0 a missing test split is an
        error.
    ``channels``: 1 or 3 converts all images; None leaves them.
    ``side``: Pixels to which the middle square of each image is resized; None leaves images as they are.
    ``note``: Which columns were left out, and why.
    """

    image: str = "image"
    label: str = "label"
    train: str = "train"
    test: str = "test"
    columns: tuple[tuple[str, str], ...] = ()
    group: str = ""
    test_share: float = 0.0
    channels: int | None = None
    side: int | None = None
    inputs: tuple[str, ...] = ()
    note: str = ""

    def check(self, split: Any, where: str, optional: Sequence[str] = ()) -> None:
        """Raise `DataError` if the table of a split lacks a column; the error names the nearest that it has."""
        features = split.features  # of `datasets`, which copies all of them at each access
        further = [stored for stored, name in self.columns if name not in optional]
        for column in filter(None, (self.image, self.label, *self.inputs, *further)):
            if column not in features:
                raise DataError(
                    f"{where}: the column {column!r} is missing.{did_you_mean(column, features)} "
                    "Rename the columns, or write the file again with Hugging Face `datasets`."
                )


def infer_schema(splits: Splits, where: str, options: DataOptions) -> Schema:
    """Return the schema of a data set that is not in the catalog.

    ``splits``: The splits by name.
    ``where``: What errors call the data set.
    ``options``: The columns that the user names.
    """
    if "train" not in splits:
        raise DataError(
            f"{where}: there is no split 'train'.{did_you_mean('train', splits)} A data set needs 'train' and should "
            f"have one of {', '.join(map(repr, TEST_NAMES))}."
        )
    features = splits["train"].features
    test = next((name for name in TEST_NAMES if name in splits), "")
    if not features:
        raise DataError(f"{where}: it is not known which columns there are. Write the file again.")
    named = (options.label, options.client, options.group, options.text, *options.columns, *options.exclude)
    absent = [f"{column!r}.{did_you_mean(column, features)}" for column in named if column and column not in features]
    if absent:
        raise DataError(f"{where}: there is no column {' There is no column '.join(absent)}")
    client = options.client or (CLIENT if CLIENT in features and CLIENT not in options.exclude else "")
    taken = {client or None, options.group or None, *options.exclude}
    label = options.label or _label_column({name: features[name] for name in features if name not in taken}, where)
    columns = tuple((stored, name) for stored, name in ((client, CLIENT), (options.group, GROUP)) if stored)
    group = GROUP if options.group else ""
    chosen = (options.text,) if options.text else options.columns
    for name, setting, what in ((label, "label", "the classes"), (client, "client", "the clients")):
        if name in chosen:  # only where it was found by its usual name: names that are given are compared before
            raise DataError(
                f"{where}: the column {name!r} says {what}, and is among the inputs: a network would read the answer "
                f"there. Leave it out of data.columns, or name another column as data.{setting}."
            )
    images = [name for name in features if _is_image(features[name]) and name not in {label, *taken}]
    if images and not (options.text or options.columns):
        image = _only("Image", images, _IMAGE_NAMES, where)
        beside = ", ".join(repr(name) for name in features if name not in {image, label, *taken})
        note = f"Not used beside the images: {beside}." if beside else ""
        return Schema(image=image, label=label, test=test, columns=columns, group=group, test_share=0.2, note=note)
    rest = [name for name in features if name not in {label, *taken}]
    if len(rivals := [name for name in rest if name in LABEL_NAMES and not chosen]) and not options.label:
        raise DataError(
            f"{where}: {label!r} and {', '.join(map(repr, rivals))} could all be the column of the classes. Name it, "
            f"and leave the others out: data.label={label!r}, data.exclude={rivals}."
        )
    index = [name for name in rest if _INDEX.fullmatch(name) and not chosen]
    inputs = chosen or tuple(name for name in rest if name not in index)
    if not inputs:
        raise DataError(f"{where}: besides {label!r} there is no column that could be the input.")
    listed = ", ".join(map(repr, index))
    note = f"Left out as numbers of rows: the column {listed}. To use it, rename it." if index else ""
    if unused := [name for name in rest if chosen and name not in chosen]:
        note = f"Not among data.columns or data.text: {', '.join(map(repr, unused))}."
    return Schema("", label, test=test, columns=columns, group=group, test_share=0.2, inputs=inputs, note=note)


def _is_image(feature: Any) -> bool:
    """Return whether a column holds images, declared or as plain bytes."""
    library = datasets_library("Reading a data set")
    plain = isinstance(feature, library.Value) and feature.dtype in ("binary", "large_binary")
    return isinstance(feature, library.Image) or plain or (isinstance(feature, dict) and "bytes" in feature)


def _class_names(feature: Any) -> list[str] | None:
    """Return the names that a ClassLabel column declares; None for another column."""
    is_label = isinstance(feature, datasets_library("Reading a data set").ClassLabel)
    return list(feature.names) if is_label else None


def _label_column(features: Mapping[str, Any], where: str) -> str:
    declared = [name for name in features if _class_names(features[name]) is not None]
    if declared:
        return _only("ClassLabel", declared, LABEL_NAMES, where)
    if usual := [name for name in LABEL_NAMES if name in features]:
        return usual[0]
    raise DataError(
        f"{where}: no column says which class an example has (columns: {', '.join(features)}). Name it: "
        'data.label, --set data.label=COLUMN, or label="COLUMN" in Python.'
    )


def _only(kind: str, names: Sequence[str], usual: tuple[str, ...], where: str) -> str:
    """Return the only column of a kind, or the one of several with a usual name."""
    if chosen := names if len(names) == 1 else [name for name in usual if name in names]:
        return chosen[0]
    found = f"several ({', '.join(names)})"
    raise DataError(f"{where}: one {kind} column is needed but there is {found}. Name the one to use {usual[0]!r}.")


def number_values(
    tables: Sequence[Any],
    wheres: Sequence[Where],
    column: str,
    problems: Problems | None,
    *,
    as_text: bool,
    is_class: bool,
) -> tuple[list[Tensor], tuple[str, ...], int]:
    """Replace a column's values by numbers 0, 1, ..., the same ones in all splits, and -1 in a split without it.

    Values that a ClassLabel feature declares keep their order and lose those that do not occur; others are sorted.

    problems : notes on what was changed; None for a known data set, whose names are not questioned.
    as_text : the table is of a text file: its whole numbers keep how they are written and are sorted as numbers.
    is_class : the column must look like one of classes.

    Returns the numbers of each split (int64 ``[n]``), what each stands for, and how many names are declared.

    Raises `DataError` if values are missing, are no names or whole numbers, or lie outside the declared classes.
    """
    have = [number for number, table in enumerate(tables) if column in table.features]
    splits, wheres = [tables[number] for number in have], [wheres[number] for number in have]
    raw = [read_column(split, column, str(where)) for split, where in zip(splits, wheres, strict=True)]
    if problems is not None:
        every = [value for values in raw for value in values if isinstance(value, str)]
        if blank := sum(value != value.strip() for value in every):
            problems.notes.append(f"Blanks around {blank} values of {column!r} were cut off.")
        if is_class:
            check_classes([value for values in raw for value in values], f"{wheres[0]}: the column {column!r}")
        written = {to_nfc(value).strip() for value in every}
        written |= {to_nfc(name) for name in _class_names(splits[0].features[column]) or ()}
        check_spelling(written, f"{wheres[0]}: the column {column!r}")
    flags = all(isinstance(value, bool) for values in raw for value in values)
    columns = [
        _names(values, split.features[column], column, where, as_text, flags)
        for split, where, values in zip(splits, wheres, raw, strict=True)
    ]
    if len({isinstance(values[0], str) for values in columns}) > 1:
        raise DataError(f"{wheres[0]}: the column {column!r} holds numbers in one split and text in another.")
    declared = _class_names(splits[0].features[column])
    if declared is not None and isinstance(columns[0][0], int):
        for split, where, values in zip(splits, wheres, columns, strict=True):
            _check_range(np.asarray(values), len(declared), column, where)
            if (_class_names(split.features[column]) or []) != declared:
                raise DataError(
                    f"{where}: the column {column!r} declares other classes than {wheres[0]}. Write both splits with "
                    "the same class names in the same order."
                )
    number, occurring = number_names([value for values in columns for value in values], as_text)
    names = tuple(to_nfc(str(one if isinstance(one, str) or not declared else declared[one])) for one in occurring)
    parts = np.split(number, np.cumsum([len(values) for values in columns])[:-1])
    found = {split: torch.from_numpy(np.ascontiguousarray(part)) for split, part in zip(have, parts, strict=True)}
    numbers = [found.get(split, torch.full((len(table),), -1)) for split, table in enumerate(tables)]
    return numbers, names, len(declared) if declared is not None else len(names)


def number_names(values: Sequence[Any], as_text: bool = False) -> tuple[Any, list[Any]]:
    """Return names or integers as numbers 0, 1, ... (int64 array), and the names or integers in order."""
    occurring = set(values)
    by_number = as_text and all(re.fullmatch(r"-?\d{1,100}", value) for value in occurring)
    ordered = sorted(occurring, key=lambda value: (int(value), value)) if by_number else sorted(occurring)
    place = {value: number for number, value in enumerate(ordered)}
    return np.asarray([place[value] for value in values], np.int64), ordered


def check_classes(values: Sequence[Any], where: str) -> None:
    """Raise `DataError` if the values of a user's own data are not one class for each example."""
    texts = [str(value).strip() for value in values if value is not None and value == value]
    counts = Counter(texts)
    numbers = [float(text) for text in counts if _NUMBER.fullmatch(text)]
    are_numbers = len(numbers) == len(counts)
    example = next(iter(texts), "")
    if any(isinstance(value, list | dict | bytes) for value in values):
        problem = f"holds {example[:60]!r}: several labels, a mask or an array"
    elif are_numbers and any(number != round(number) for number in numbers if math.isfinite(number)):
        fraction = next(text for text in counts if not float(text).is_integer() and math.isfinite(float(text)))
        problem = f"holds {fraction!r}: a number to be predicted"
    elif len(texts) >= 20 and len(counts) > len(texts) / 2:
        problem = f"has {len(counts)} different values in {len(texts)} rows: a number or a name of each row"
    elif are_numbers and len(counts) > 10 and sum(count < 3 for count in counts.values()) > len(counts) / 4:
        problem = f"has {len(counts)} different numbers, many of them rare: a count to be predicted"
    else:
        parts = {text: [part.strip() for part in re.split(r"[|;,]", text)] for text in counts}
        several = next((t for t, each in parts.items() if len(each) > 1 and all(part in counts for part in each)), "")
        problem = f"holds {several!r}, and its parts alone too: several labels" if several else ""
    if problem:
        raise DataError(
            f"{where} {problem}. {SINGLE_LABEL} Is this the right column (data.label)? If these are "
            "names of classes, write them with a letter first."
        )


MAX_LETTERS = 2
"""The most classes that are one letter in both cases and still look like one class; a handwriting has more."""


def check_spelling(names: Iterable[str], where: str) -> None:
    """Raise `DataError` if names of classes or clients differ in nothing that a reader takes for a difference."""
    spellings: dict[Any, list[str]] = {}
    for name in sorted(names):
        if not name.isascii() and any("\ud800" <= sign <= "\udfff" for sign in name):
            raise DataError(f"{where} has the name {name!r}, which is no Unicode text. Write it anew.")
        spellings.setdefault(_look(name), []).append(name)
    several = [found for found in spellings.values() if len(found) > 1]
    # Many single letters in both cases are those of a handwriting, two are M and m, for malignant, and B and b.
    letters = [found for found in several if all(map(_is_letter, found))]
    several = [found for found in several if found not in letters] if len(letters) > MAX_LETTERS else several
    if several:
        listed = "; ".join(" and ".join(map(repr, found)) for found in several[:5])
        raise DataError(
            f"{where} has names that differ in upper and lower case, in blanks, or as 1 and 1.0 do: {listed}. Write "
            "each in one way."
        )


def _look(name: str) -> Any:
    """Return what is equal for names that look alike; leading zeros are told apart, as those of a code are."""
    text = unicodedata.normalize("NFKC", name.casefold())
    text = " ".join("".join(sign for sign in text if unicodedata.category(sign) != "Cf").split())
    is_number = _NUMBER.fullmatch(text) and not re.match(r"[-+]?0\d", text)
    return Decimal(text) if is_number else text


def _is_letter(name: str) -> bool:
    return len(name) == 1 and name.isalpha()


def _names(
    values: Sequence[Any], feature: Any, column: str, where: Where | str, as_text: bool, flags: bool
) -> list[Any]:
    """Return a column's values as integers or as text."""
    if not values:
        raise DataError(f"{where}: there are no rows.")
    if as_text:
        values = [None if str(value).strip().lower() in MISSING_TEXTS else value for value in values]
    check_filled(values, column, where)
    if flags:
        return [str(value) for value in values]  # as a CSV file has them
    whole = [isinstance(one, bool | int) or (isinstance(one, float) and one.is_integer()) for one in values]
    if all(whole):
        return [int(value) for value in values]
    text = [isinstance(value, str | datetime.date) for value in values]
    if all(text):
        return [to_nfc(str(value)).strip() for value in values]
    odd = values[(whole if whole[0] else text).index(False)]
    raise DataError(f"{where}: the column {column!r} must hold whole numbers or text, not {feature}, as {odd!r}.")


def _check_range(values: Any, num_classes: int, column: str, where: Where | str) -> None:
    wrong = np.flatnonzero((values < 0) | (values >= num_classes))
    if len(wrong):
        hint = " A Hub test split with -1 hides its labels; use another split." if values[wrong[0]] == -1 else ""
        raise DataError(
            f"{where}: {at(where, wrong.tolist())} has {column!r} = {values[wrong[0]]}, but {num_classes} declared "
            f"classes allow 0..{num_classes - 1} only.{hint}"
        )
