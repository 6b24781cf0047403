"""Tables in text files: encoding and separator are found out, and every cell stays the text that it is."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fedkeep.data.readers import to_nfc
from fedkeep.errors import DataError, in_one_line, require_optional

_BOMS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_SEPARATORS = ",;\t|"
_SAMPLE = 1 << 16


@dataclass(frozen=True)
class DelimitedText:
    """A table of text cells, how it was separated, and what is to be told about it."""

    table: Any
    separator: str
    note: str = ""


def read_text_table(path: Path) -> DelimitedText:
    """Read a text file as a pyarrow table of strings.

    Raises `DataError` for two columns of one name, or lines with more or fewer cells than the first; it names them.
    """
    reader = require_optional("pyarrow.csv", "Reading CSV files", "data")
    arrow = require_optional("pyarrow", "Reading CSV files", "data")
    text, note = _decoded(path)
    separator = _separator(text, "\t" if path.suffix.lower() == ".tsv" else ",")
    header = next((row for _, row in _records(text, separator)), [])
    if not header:
        raise DataError(f"{path} is empty. Its first line must name the columns.")
    names = [to_nfc(name.strip()) for name in header]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path} has two columns that are called {twice!r}. Rename one; the first line names columns.")
    parse = reader.ParseOptions(delimiter=separator, newlines_in_values=True)
    convert = reader.ConvertOptions(column_types=dict.fromkeys(header, arrow.string()), strings_can_be_null=False)
    try:
        table = reader.read_csv(io.BytesIO(text.encode()), parse_options=parse, convert_options=convert)
        return DelimitedText(table.rename_columns(names), separator, note)
    except Exception as error:  # pyarrow raises errors of many kinds for damaged files
        wrong = [(line, len(row)) for line, row in _records(text, separator) if len(row) != len(header)]
        if not wrong:
            raise DataError(f"{path} cannot be read as CSV ({in_one_line(error, 300)}). Mend or copy it.") from error
        listed = ", ".join(f"line {line} has {cells}" for line, cells in wrong[:5])
        raise DataError(
            f"{path}: the first line names {len(header)} columns, and {listed}"
            f"{f', and {len(wrong) - 5} more lines differ' if len(wrong) > 5 else ''}. Write a cell that holds "
            f"{separator!r} in quotation marks."
        ) from error


def line_of(path: Path, row: int) -> int:
    """Return the line of a text file on which a row of its table begins; rows count from 0, lines from 1."""
    text, _ = _decoded(path)
    records = _records(text, _separator(text, "\t" if path.suffix.lower() == ".tsv" else ","))
    return next((line for line, _ in islice(records, row + 1, None)), row + 2)


def _decoded(path: Path) -> tuple[str, str]:
    """Return a file's text, and a note if its encoding had to be guessed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({in_one_line(error, 200)}).") from error
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


def _records(text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each record with the line on which it begins; empty lines are none."""
    reader, begin = csv.reader(io.StringIO(text, newline=""), delimiter=separator), 1
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    for row in reader:
        if row:
            yield begin, row
        begin = reader.line_num + 1


def _separator(text: str, usual: str) -> str:
    """Return what separates the cells: what makes most columns, as many in all of the first lines."""
    best, most = usual, 1
    for separator in (usual, *_SEPARATORS.replace(usual, "")):
        sizes = {len(row) for _, row in islice(_records(text[:_SAMPLE], separator), 20)}
        if len(sizes) == 1 and max(sizes) > most:
            best, most = separator, max(sizes)
    return best
