"""Tables and texts as inputs: text files are read, and what a column holds is found out.

Cells become numbers or names, words token ids.
"""

import csv
import io
import json
import re
import shlex
import unicodedata
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from datetime import time, timedelta
from decimal import Decimal
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.data.arrays import to_float32
from fedkeep.data.columns import Array, TableColumn, fit_columns, transform, unknown_values
from fedkeep.data.readers import Problems, Where, at, read_column, read_columns, to_nfc
from fedkeep.data.schema import MISSING_TEXTS, DataOptions, Schema
from fedkeep.errors import DataError, in_one_line, require_optional

MOSTLY_NUMBERS = 0.9
"""The share of numbers from which on a column of text is taken for one of numbers with something wrong in it."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?inf(inity)?", re.IGNORECASE)
_UNITS = "%$€£¥"
# Also what is read as none: thousands in groups, amounts in brackets, the long minus, a unit that others lack.
_LIKE_A_NUMBER = re.compile(
    rf"[(+−-]?[{_UNITS}]?\s?[+−-]?(\d+[.,]?\d*|[.,]\d+|\d{{1,3}}([.,'’_\s]\d{{3}})+([.,]\d*)?)([eE][-+]?\d+)?\s?[{_UNITS})]?"
)
_AS_FLOAT = re.compile(r"^(-?(?:0|[1-9]\d*))\.0$")
NUMBER_WITH_COMMA = re.compile(r"[-+]?\d*([.,]\d+)?([eE][-+]?\d+)?")
_DECIMAL_COMMA, _THOUSANDS = re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?"), re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+")
_POINTS = re.compile(r"[-+]?[1-9]\d{0,2}\.\d{3}")
_CODE, _PADDED, _WHOLE = re.compile(r"0\d+"), re.compile(r"0\d+(\.\d+)?"), re.compile(r"[-+]?\d+(\.0*)?")
_YEAR, _YEARS = re.compile(r"\d{4}"), range(1678, 2262)  # what pandas' nanoseconds reach
_ISO = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([T ].*)?")
_DATES = {"%d.%m.%Y": re.compile(r"\d{1,2}\.\d{1,2}\.\d{4}"), "/": re.compile(r"\d{1,2}/\d{1,2}/\d{4}")}
_WORD = re.compile(r"\w+|[^\w\s]")
_ID_NAME = re.compile(r"(.*[\W_])?(?i:ids?|uuid|guid|key|no|nr|number|index)|.*[a-z](Id|ID)", re.DOTALL)

_BOMS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_SEPARATORS = ",;\t|"
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\r?\n')  # a first line that some spreadsheets write, no row of the table
_SAMPLE = 1 << 16


@dataclass(frozen=True)
class DelimitedText:
    """A table of text cells, on which line each row begins, how it was separated, and what is to be told about it."""

    table: Any
    lines: Sequence[int]
    separator: str
    note: str = ""


def read_text_table(path: Path) -> DelimitedText:
    """Read a text file as a pyarrow table of strings.

    Raises `DataError` for two columns of one name, lines with more or fewer cells than the first, or a quotation mark
    whose cell swallows other rows; it names them. Text that is separated by tabs may have such marks: they are kept.
    """
    arrow = require_optional("pyarrow", "Reading CSV files", "data")
    text, note = _decoded(path)
    separator = _separator(text, "\t" if path.suffix.lower() == ".tsv" else ",")
    records = [*_records(text, separator)]
    if not records:
        raise DataError(f"{path} is empty. Its first line must name the columns.")
    if (swallowed := _swallowed_rows(text, separator, records)) is not None:
        literal = [*_records(text, separator, quoting=csv.QUOTE_NONE)]
        if separator != "\t" or len({len(row) for _, row in literal}) > 1:
            raise DataError(
                f"{path}: a quotation mark in the row of line {swallowed} opens a cell that runs on over the rows "
                "after it. Close or remove it. A mark of the text itself is written twice, in a cell within marks."
            )
        literal = [(line, [_without_marks(cell) for cell in row]) for line, row in literal]
        records, note = literal, f"{note} Quotation marks in {path.name} were kept as they are.".lstrip()
    names = [to_nfc(name.strip()) for name in records[0][1]]
    if twice := [repr(name) for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{path} has two columns that are called {twice[0]}. Rename one; the first line names columns.")
    if wrong := [f"line {line} has {len(row)}" for line, row in records if len(row) != len(names)]:
        more = f", and {len(wrong) - 5} more lines differ" if len(wrong) > 5 else ""
        raise DataError(
            f"{path}: the first line names {len(names)} columns, and {', '.join(wrong[:5])}{more}. Write a cell that "
            f"holds {separator!r} in quotation marks."
        )
    columns = [arrow.array(column[1:], arrow.string()) for column in zip(*(row for _, row in records), strict=True)]
    return DelimitedText(arrow.table(columns, names), [line for line, _ in records[1:]], separator, note)


def _decoded(path: Path) -> tuple[str, str]:
    """Return a file's text, and a note if its encoding had to be guessed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({in_one_line(error, 200)}).") from error
    if content.startswith(b"PK\3\4"):
        raise DataError(f"{path} is a spreadsheet or another archive by another name. Save it as CSV from its program.")
    encoding = next((name for start, name in _BOMS.items() if content.startswith(start)), "utf-8")
    head = content[:_SAMPLE]
    if encoding == "utf-8" and b"\0" in head:  # of UTF-16 without a mark, every other byte is 0
        encoding = "utf-16-le" if head[1::2].count(0) > len(head) // 4 else "utf-16-be"
    note = "" if encoding.startswith("utf-8") else f"{path.name} was read as UTF-16."
    try:
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError:
            if encoding != "utf-8":
                raise
            text, note = content.decode("cp1252"), f"{path.name} is not UTF-8, and was read as Windows-1252 (Latin-1)."
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no text in UTF-8, UTF-16 or Windows-1252 ({in_one_line(error, 200)}). Save it as UTF-8."
        ) from error
    if "\0" in text:
        raise DataError(f"{path} cannot be read as CSV (it holds NUL characters). Save it as text, in UTF-8.")
    return text, note


def _swallowed_rows(text: str, separator: str, records: Sequence[tuple[int, list[str]]]) -> int | None:
    """Return the line of a record that goes on to the end of the file, or over lines that are whole rows themselves."""
    try:
        deque(_records(text, separator, strict=True), maxlen=0)
    except csv.Error as error:
        if "end of data" in str(error):
            return records[-1][0]
    lines = [*io.StringIO(text, newline="")]
    spans = [(begin, row, end) for (begin, row), (end, _) in pairwise([*records, (len(lines) + 1, [])])]
    one_line = [row for begin, row, end in spans[1:] if end == begin + 1]
    usual = [set(column) for column in zip(*one_line, strict=True)] if len({*map(len, one_line)}) == 1 else []

    def is_row(line: str) -> bool:
        """Tell whether a line has as many cells as others, and one that another row has too, such as its class."""
        ways = [next(csv.reader([line], delimiter=separator, quoting=how), []) for how in (0, csv.QUOTE_NONE)]
        return any(
            len(row) == len(usual) > 1 and any(cell.strip() in known for cell, known in zip(row, usual, strict=True))
            for row in ways
        )

    for begin, _, end in spans:
        parts = [line for line in lines[begin - 1 : end - 1] if line.strip()]
        if len(parts) > 1 and all(map(is_row, parts)):
            return begin
    return None


def _without_marks(cell: str) -> str:
    return cell[1:-1] if len(cell) > 1 and cell[0] == cell[-1] == '"' else cell


def _records(text: str, separator: str, **dialect: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield each record with the line on which it begins; empty lines are none."""
    reader, begin = csv.reader(io.StringIO(text, newline=""), delimiter=separator, **dialect), 1
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    named = _SEPARATOR_LINE.match(text) is not None
    for row in reader:
        if row and not (named and begin == 1):
            yield begin, row
        begin = reader.line_num + 1


def _separator(text: str, usual: str) -> str:
    """Return what separates the cells: what makes most columns, as many in all of the first lines.

    If the lines differ by all of them, it is the usual one, or what makes most columns of the first line; the error
    then names the others.
    """
    if named := _SEPARATOR_LINE.match(text):
        return named[1]
    columns: dict[str, int] = {}
    first: dict[str, int] = {}
    for separator in (usual, *_SEPARATORS.replace(usual, "")):
        rows = [row for _, row in islice(_records(text[:_SAMPLE], separator), 20)]
        sizes = {len(row) for row in (len(text) > _SAMPLE and rows[:-1]) or rows}  # the sample may cut the last line
        if len(sizes) == 1 and max(sizes) > 1:
            columns[separator] = max(sizes)
        first[separator] = len(rows[0]) if rows else 0
    found = columns or first
    return usual if found is first and first[usual] > 1 else max(found, key=found.__getitem__)


def read_inputs(
    tables: Sequence[Any],
    wheres: Sequence[Where],
    schema: Schema,
    options: DataOptions,
    problems: Problems,
    *,
    separator: str = "",
    held_out: Tensor | None = None,
    columns: Sequence[TableColumn] = (),
) -> tuple[list[Tensor], tuple[TableColumn, ...]]:
    """Return the inputs of each split of a table, int64 ``[n, length]`` or float32 ``[n, features]``, and its columns.

    separator : that of the text file; empty for tables whose columns have types.
    held_out : bool ``[n]``, the rows of the only split that will be test rows; the others decide the scaling.
    columns : those of a run, which are used as they are.
    """
    pairs = list(zip(tables, wheres, strict=True))
    if options.text:
        texts = [
            ([one or None for one in read_column(table, options.text, str(where))], where) for table, where in pairs
        ]
        return [tokenise(rows, where, options.length, options.vocabulary, problems) for rows, where in texts], ()
    if len(schema.inputs) == 1 and is_list(tables[0], schema.inputs[0]):
        small = getattr(getattr(tables[0].features[schema.inputs[0]], "feature", None), "dtype", "")
        lists = [(read_column(table, schema.inputs[0], str(where)), where) for table, where in pairs]
        read = (
            read_lists(rows, where, options.length, problems, small, varied=number == 0)  # rows of a test may be alike
            for number, (rows, where) in enumerate(lists)
        )
        return [*read], ()
    numbers = {column.name for column in columns if column.kind != "category"}
    raw = [_as_declared(table, read_columns(table, schema.inputs, str(where)), numbers) for table, where in pairs]
    found: list[TableColumn] = []
    for name in schema.inputs:
        with problems.collect():
            known = next((column for column in columns if column.name == name), None)
            values = [of[name] for of in raw]
            found.append(known or _guess(name, values, wheres, separator, name in options.columns, problems))
    parsed: list[dict[str, Array]] = [{} for _ in tables]
    for column in found:
        with problems.collect():
            for split, (of, where) in enumerate(zip(raw, wheres, strict=True)):
                parsed[split][column.name] = parse(of[column.name], column, where, separator)
                if column.kind != "category" and (empty := int(np.isnan(parsed[split][column.name]).sum())):
                    problems.notes.append(f"{empty} empty cells of {column.name!r} got the column's mean.")
    problems.check(wheres[0])
    if not columns:
        known_rows = slice(None) if held_out is None else (~held_out).numpy()
        known_values = {name: values[known_rows] for name, values in parsed[0].items()}
        for name in (column.name for column in found if column.kind != "category"):
            if np.isnan(known_values[name]).all():
                problems.found.append(
                    f"{wheres[0]}: the column {name!r} is empty in the training rows, and only filled in test rows. "
                    f"Nothing can be learned of it. {_leave_out(name)}"
                )
            elif options.scaling == "none":
                with problems.collect():
                    _check_kept(name, known_values[name], wheres[0])
        problems.check(wheres[0])
        found = list(fit_columns(found, known_values, options.scaling))
        if rare := [column.name for column in found if column.other]:
            problems.notes.append(f"Values of few rows are one feature together: {', '.join(map(repr, rare))}.")
    problems.notes += unknown_values(found, parsed, of_run=bool(columns))
    return [transform(found, values) for values in parsed], tuple(found)


def _as_declared(table: Any, values: dict[str, list[Any]], plain: Set[str]) -> dict[str, list[Any]]:
    """Return columns with the names that a table declares for numbers (`ClassLabel`) in their places, unless plain."""
    features = table.features  # of `datasets`, which copies all of them at each access
    for column, of in values.items():
        names = getattr(features[column], "names", None)
        if names and column not in plain and not all(map(_NUMBER.fullmatch, names)):
            values[column] = [None if value is None or value < 0 else names[value] for value in of]
    return values


def _check_kept(name: str, values: Array, where: Where | str) -> None:
    """Raise `DataError` if float32 makes one of numbers that it would keep apart if they were scaled."""
    known = values[~np.isnan(values)]
    if known.std() <= 1e-9 * abs(known.mean()):  # rounding of a constant
        return
    scaled = (known - known.mean()) / known.std()
    kept, possible = (len(np.unique(each.astype(np.float32))) for each in (known, scaled))
    if kept < 0.9 * possible:  # of millions of numbers around 0 float32 merges some too, scaled or not
        raise DataError(
            f"{where}: the column {name!r} has {len(np.unique(known))} different numbers, and float32 keeps {kept} of "
            "them apart as they stand. Let them be scaled: data.scaling=standard."
        )


def is_list(table: Any, column: str) -> bool:
    """Return whether a column of a table holds lists."""
    feature = table.features[column]
    return hasattr(feature, "feature") or isinstance(feature, list)


def read_lists(
    rows: Sequence[Any], where: Where | str, length: int, problems: Problems, dtype: str = "", varied: bool = False
) -> Tensor:
    """Return lists of numbers as float32 ``[n, numbers]``, lists of token ids as int64 ``[n, length]``.

    dtype : the type of their items, if a file says it: whole numbers of 8 bits are pixels or counts, and no token ids.
    """
    has_floats = any(isinstance(one, float) for row in rows if isinstance(row, list) for one in row)
    if has_floats or (rows and dtype in ("uint8", "int8", "bool")):
        return _vectors(rows, where, varied)
    sizes = {len(ids) for ids in rows if isinstance(ids, list)}
    if len(sizes) == 1 and max(sizes) > length:
        raise DataError(
            f"{where}: each row has a list of {max(sizes)} whole numbers. Token ids? Then set data.length="
            f"{max(sizes)}, so that none is cut off. Pixels or counts? Then write them as floating-point numbers "
            "(float32) or uint8."
        )
    return pad(rows, where, length, problems)


def _vectors(rows: Sequence[Any], where: Where | str, varied: bool) -> Tensor:
    """Return lists of numbers of one length as float32 ``[n, length]``."""
    for row, numbers in enumerate(rows):
        if not isinstance(numbers, list) or not numbers or not all(isinstance(one, int | float) for one in numbers):
            raise DataError(f"{where}: {at(where, [row])} must be a list of numbers, not {str(numbers)[:80]}.")
        if len(numbers) != len(rows[0]):
            raise DataError(f"{where}: {at(where, [row])} has {len(numbers)} numbers, the first has {len(rows[0])}.")
    return torch.from_numpy(to_float32(np.asarray(rows, np.float64), str(where), varied))


def _guess(
    name: str, splits: Sequence[Sequence[Any]], wheres: Sequence[Where], separator: str, named: bool, problems: Problems
) -> TableColumn:
    """Return what a column holds; raise `DataError` if that is unclear, or if it says whose a row is."""
    values = [value for split in splits for value in split]
    times = timedelta | time
    odd = next((value for value in values if isinstance(value, list | dict | bytes | times)), None)
    if odd is not None:
        hint = "Write durations and times of day as numbers, such as hours."
        if isinstance(odd, list) and not any(isinstance(one, list) for one in odd):
            hint = f"Lists are an input alone: data.columns=[{name!r}], or columns=[{name!r}] in Python."
        elif not isinstance(odd, times):
            hint = (
                f"Arrays of several axes can be given as arrays: (x, y) in Python, or a file .npz. {_leave_out(name)}"
            )
        raise DataError(
            f"{wheres[0]}: the column {name!r} must hold numbers, dates or text, not {str(odd)[:80]!r}. {hint}"
        )
    texts = [text for value in values if (text := _text(value, separator)) is not None]
    if not texts:
        raise DataError(f"{wheres[0]}: the column {name!r} is empty. {_leave_out(name)}")
    column, advice = TableColumn(name), ""
    if separator or any(isinstance(value, str) for value in values):
        column = _guess_text(name, texts, splits, wheres, separator)
        if not separator and all(_to_number(text, "", "") is not None for text in texts) and not _are_codes(texts):
            advice = f"{name!r} has numbers that are written as text: make them numbers (astype(float))"
    elif not all(isinstance(value, int | float | Decimal | None) for value in values):
        column = TableColumn(name, "date")
    different = len(set(texts))
    few_each = column.kind == "category" and different > max(10, len(texts) / 5)
    counted = column.kind == "number" and different >= 0.95 * len(texts) >= 19 and all(map(_WHOLE.fullmatch, texts))
    # Whole numbers of one length, such as 4711234, are numbers of records rather than amounts.
    of_one_length = len({*map(len, texts)}) == 1 and len(texts[0].partition(".")[0]) >= 6
    if not named and (few_each or (counted and (_ID_NAME.fullmatch(name) or _counts_up(texts) or of_one_length))):
        words = f" A column of texts: data.text={name!r}." if any(text.count(" ") > 3 for text in texts[:50]) else ""
        raise DataError(
            f"{wheres[0]}: the column {name!r} has {different} different values in {len(texts)} rows, as ids, names "
            f"and texts have; a network would learn single rows. {_leave_out(name)}{words} If rows of one value belong "
            f"together: data.group={name!r}. To use it all the same, name it in data.columns. In "
            f"Python these are arguments: exclude, text, group, columns.{advice and f' {advice}, if they are.'}"
        )
    if advice:
        problems.notes.append(f"{advice}, or they stay names.")
    if column.kind == "date" and any(isinstance(value, str) for value in splits[0]):
        problems.notes.append(f"{name!r} are dates: days since 1970.")
    if column.unit:
        problems.notes.append(f"{name!r} are numbers; {column.unit} was cut off.")
    if column.kind == "category":
        _tell_spellings(name, texts, problems)
    if separator and column.kind == "number" and any("," in text for text in texts):
        problems.notes.append(f"{name!r} has decimal commas.")
    pointed = [text for text in texts if "." in text]
    if separator in (";", "\t", "|") and column.kind == "number" and pointed and all(map(_POINTS.fullmatch, pointed)):
        problems.notes.append(f"Points in {name!r} were read as decimal points: {pointed[0]} is less than 1,000.")
    if column.kind == "category" and _are_codes(texts) and all(map(_NUMBER.fullmatch, texts)):
        problems.notes.append(f"{name!r} has leading zeros: its values are names, not numbers.")
    return column


def _guess_text(
    name: str, texts: Sequence[str], splits: Sequence[Sequence[Any]], wheres: Sequence[Where], separator: str
) -> TableColumn:
    """Return what a column of text holds; numbers are only looked for in text files."""
    unit = texts[0][-1] if texts[0][-1] in _UNITS else texts[0][0] if texts[0][0] in _UNITS else ""
    unit = unit if separator and unit and all(unit in text for text in texts) else ""
    is_number = [_to_number(text, separator, unit) is not None for text in texts]
    codes = _are_codes(texts)
    if not codes:
        if separator and all(is_number):
            return TableColumn(name, unit=unit)
        for format, pattern in {"": _ISO, **_DATES}.items():
            if all(map(pattern.fullmatch, texts)):
                return TableColumn(name, "date", date=_order(name, texts, wheres) if format == "/" else format)
    share = np.mean([bool(_LIKE_A_NUMBER.fullmatch(text)) for text in texts])
    if share >= MOSTLY_NUMBERS and not (all(is_number) or codes):
        for split, where in zip(splits, wheres, strict=True):
            known = [(row, text) for row, value in enumerate(split) if (text := _text(value, separator)) is not None]
            wrong = [(row, text) for row, text in known if _to_number(text, separator, unit) is None]
            if wrong:
                such = "3.5, not 3,5" if separator not in (";", "\t", "|") else "3,5 or 3.5, thousands without marks"
                there = f"Write a number there ({such})" if separator else "Make the column numbers (astype(float))"
                raise DataError(
                    f"{where}: {at(where, [row for row, _ in wrong])}: {name!r} = {wrong[0][1]!r} is no number, but "
                    f"{min(int(100 * share), 99)} % of the column look like one. {there}, or "
                    f"empty the cell if the value is unknown. {_leave_out(name)} If its values are categories, let "
                    "each begin with a letter."
                )
    return TableColumn(name, "category")


def _are_codes(texts: Sequence[str]) -> bool:
    """Tell whether leading zeros, as in 01234, make names of numbers; 00 or a single 05 among decimals do not."""
    coded = {text for text in texts if _PADDED.fullmatch(text)}
    telling = {text for text in coded if text.partition(".")[0].strip("0")}
    pointed = any("." in text for text in texts if _NUMBER.fullmatch(text))
    return any(map(_CODE.fullmatch, coded)) and (len(telling) > 1 or not pointed)


def _order(name: str, texts: Sequence[str], wheres: Sequence[Where]) -> str:
    """Return whether the day or the month comes first in dates with slashes."""
    parts = [tuple(map(int, text.split("/")[:2])) for text in texts]
    day_first, month_first = any(first > 12 for first, _ in parts), any(second > 12 for _, second in parts)
    if day_first == month_first:
        raise DataError(
            f"{wheres[0]}: whether the day or the month comes first in {name!r} = {texts[0]!r} cannot be seen. Write "
            f"dates as 2024-01-31. {_leave_out(name)}"
        )
    return "%d/%m/%Y" if day_first else "%m/%d/%Y"


def parse(values: Sequence[Any], column: TableColumn, where: Where | str, separator: str = "") -> Array:
    """Return a column's values as float64, with NaN for empty cells, or as names, with None; see `TableColumn`."""
    texts = [_text(value, separator) for value in values]
    if column.kind == "category":
        known, spelled = {*column.values}, {value.casefold(): value for value in column.values}

        def name(value: Any, text: str | None) -> str | None:
            if text and isinstance(value, bool):  # True of Parquet is the true of a text file of training
                text = spelled.get(text.casefold(), text)
            if text and text not in known and (known or isinstance(value, float)):
                # Whole numbers become floats once a cell of their column is empty: 1.0 is the 1 of training.
                text = _AS_FLOAT.sub(r"\1", text)
            return text

        return np.asarray([*map(name, values, texts)], dtype=object)
    if column.kind == "date":
        numbers = _days(texts, column.date)
    elif all(value is None or isinstance(value, bool | int | float) for value in values):
        numbers = np.asarray([value if value is None else min(max(value, -1e300), 1e300) for value in values], float)
    else:
        flags = {"true": 1.0, "false": 0.0}  # of a column that was Boolean in training
        flags = flags if all(text is None or text.lower() in flags for text in texts) else {}
        parsed = (text and flags.get(text.lower(), _to_number(text, separator or ".", column.unit)) for text in texts)
        numbers = np.asarray([*parsed], float)  # None becomes NaN
    unread = np.flatnonzero(np.isnan(numbers) & np.asarray([text is not None for text in texts], bool))
    if len(unread):
        date = f"a date of 1678 to 2261, written as {column.date or 'YYYY-MM-DD'} as in training,"
        what = date if column.kind == "date" else "a number"
        raise DataError(
            f"{where}: {at(where, unread.tolist())}: {column.name!r} = {texts[unread[0]]!r}, where {what} is expected."
        )
    wrong = np.flatnonzero(np.abs(numbers) > np.finfo(np.float32).max)
    if len(wrong):
        raise DataError(
            f"{where}: {at(where, wrong.tolist())}: {column.name!r} = {str(values[wrong[0]])[:40]}, which float32 "
            "cannot hold."
        )
    large = np.flatnonzero(np.abs(numbers) > 2**53)
    whole = {text for row in large if (text := str(texts[row]).lstrip("+")).removeprefix("-").isdigit()}
    if len(whole) > len({*numbers[large].tolist()}):
        raise DataError(
            f"{where}: {column.name!r} has whole numbers such as {texts[large[0]]}, of which float64 makes one: "
            f"ids? {_leave_out(column.name)}"
        )
    return numbers


def _text(value: Any, separator: str) -> str | None:
    """Return a cell as text without blanks around it; None for an empty one."""
    if value is None or value != value:
        return None
    text = to_nfc(str(value)).strip()
    return None if not text or (separator and text.lower() in MISSING_TEXTS) else text


def _to_number(text: str, separator: str, unit: str) -> float | None:
    """Return a text as a number; where commas do not separate cells they are decimal points, unless that is unclear."""
    text = text.replace(unit, "", 1).strip() if unit else text
    if separator in (";", "\t", "|") and _DECIMAL_COMMA.fullmatch(text):
        if separator != ";" and _THOUSANDS.fullmatch(text):
            return None
        text = text.replace(",", ".")
    return float(text) if _NUMBER.fullmatch(text) and text.isascii() else None


def _days(texts: Sequence[str | None], format: str) -> Array:
    pandas = require_optional("pandas", "Reading dates", "data")
    years = [_YEAR.search(text or "") for text in texts]
    texts = [text if year and int(year[0]) in _YEARS else None for text, year in zip(texts, years, strict=True)]
    times = pandas.to_datetime(
        pandas.Series(texts, dtype=object), format=format or "ISO8601", errors="coerce", utc=True
    )
    days: Array = ((times - pandas.Timestamp(0, tz="UTC")) / pandas.Timedelta(days=1)).to_numpy(float)
    return days


def _tell_spellings(name: str, texts: Sequence[str], problems: Problems) -> None:
    spellings: dict[str, set[str]] = {}
    for text in set(texts):
        spellings.setdefault(text.casefold(), set()).add(text)
    several = [" and ".join(map(repr, sorted(found))) for found in spellings.values() if len(found) > 1]
    if several:
        problems.notes.append(f"{name!r} has {'; '.join(sorted(several)[:3])}, which stay different values.")


def _counts_up(texts: Sequence[str]) -> bool:
    steps = np.diff([float(text) for text in texts])
    return len(steps) >= 99 and bool((steps == 1).all())


def _leave_out(name: str) -> str:
    setting = shlex.quote(f"data.exclude={json.dumps([name], ensure_ascii=False)}")
    return f"Leave it out: --set {setting}, or exclude=[{name!r}] in Python."


def hash_words(text: str, vocabulary: int, most: int | None = None) -> list[int]:
    """Return a token id for each word and punctuation mark of a text.

    The id is a hash (CRC-32) of the word in lower case, 1 to vocabulary - 1. So all clients number words alike, and
    none has to tell which words it has. Different words may share an id.

    most : how many are returned; None for all.

    Weinberger et al., "Feature hashing for large scale multitask learning", ICML 2009.
    """
    words = (found[0] for found in _WORD.finditer(unicodedata.normalize("NFC", text.lower())))
    return [1 + zlib.crc32(word.encode("utf-8", "replace")) % (vocabulary - 1) for word in islice(words, most)]


def tokenise(texts: Sequence[Any], where: Where | str, length: int, vocabulary: int, problems: Problems) -> Tensor:
    """Return the token ids of texts, int64 ``[n, length]``; raises `DataError` if one is missing or not text."""
    empty = [row for row, text in enumerate(texts) if not isinstance(text, str)]
    if empty:
        raise DataError(f"{where}: {at(where, empty)} has no text, but {texts[empty[0]]!r}. Fill or remove it.")
    return pad([hash_words(text, vocabulary, length + 1) for text in texts], where, length, problems)


def pad(rows: Sequence[Any], where: Where | str, length: int, problems: Problems) -> Tensor:
    """Return lists of token ids as int64 ``[n, length]``: longer ones are cut, which is noted, others filled with 0.

    Raises `DataError` if a row is no list of integers from 0 on.
    """
    result: np.ndarray[Any, np.dtype[np.int64]] = np.zeros((len(rows), length), np.int64)
    for row, ids in enumerate(rows):
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**31 for one in ids[:length]):
            raise DataError(f"{where}: {at(where, [row])} must be a list of token ids, integers from 0 to {2**31 - 1}.")
        result[row, : len(ids)] = ids[:length]
    if cut := sum(len(ids) > length for ids in rows):
        problems.notes.append(
            f"{where}: {cut} of {len(rows)} rows have more than {length} token ids and were cut; data.length "
            "keeps more."
        )
    return torch.from_numpy(result)
