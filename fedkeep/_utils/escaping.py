"""Names that others chose, such as labels of methods and classes, on their way to a terminal or into a file.

A name stays as it is inside the program. Here alone it becomes harmless to what shows it.
"""

import csv
import io
import re
import unicodedata
from collections.abc import Iterable

# Controls, among them ESC and the one-byte CSI, and what changes the direction of text or ends a line elsewhere.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKDOWN = re.compile(r"([\\`*_\[\]|~#])")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)")


def printable(text: str) -> str:
    r"""Return text that a terminal only shows: a control character stands there as ``\x1b``; lines and tabs stay."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def markdown(text: str) -> str:
    """Return text in one line that neither Markdown nor HTML takes for more than text, in a cell of a table too."""
    line = " ".join(printable(text).split("\n"))
    return _MARKDOWN.sub(r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))


def prose(text: str) -> str:
    """Return sentences, which may be Markdown, without HTML."""
    return printable(text).replace("<", "&lt;")


def csv_text(lines: Iterable[Iterable[object]]) -> str:
    """Return lines of CSV. No cell is a formula: where one would begin like that, a ``'`` stands before it."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_cell(value) for value in line] for line in lines)
    return text.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    shown = printable(value)
    is_formula = unicodedata.normalize("NFKC", shown.lstrip()[:1]) in ("=", "+", "-", "@")  # also signs of full width
    return f"'{shown}" if (is_formula and not _NUMBER.fullmatch(shown)) or shown.startswith(("\t", "\n")) else shown
