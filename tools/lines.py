"""Count the package: lines of code, lines of docstrings, modules; by folder, and the longest files.

    python tools/lines.py

A line of code is one that holds a token and is no comment, no docstring and not blank.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count(source: str) -> tuple[int, int]:
    """Return the numbers of lines of code and of docstrings of a module."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else []:
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                strings |= set(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - strings), len(strings)


def counts() -> dict[str, tuple[int, int]]:
    """Return (code, docstrings) of each module of the package, by path."""
    files = sorted((ROOT / "fedkeep").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): count(path.read_text()) for path in files}


def main() -> int:
    """Print the counts."""
    found = counts()
    folders: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path, (code, docstrings) in found.items():
        parts = path.split("/")
        row = folders["/".join(parts[:2]) if len(parts) > 2 else path]
        row[0], row[1], row[2] = row[0] + code, row[1] + docstrings, row[2] + 1
    print(f"{'code':>7}{'docs':>7}{'files':>7}")
    for name, (code, docstrings, files) in sorted(folders.items(), key=lambda item: -item[1][0]):
        print(f"{code:7}{docstrings:7}{files:7}  {name}")
    print(f"{sum(c for c, _ in found.values()):7}{sum(d for _, d in found.values()):7}{len(found):7}  in all")
    print("longest:", ", ".join(f"{p} {c}" for p, (c, _) in sorted(found.items(), key=lambda item: -item[1][0])[:5]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
