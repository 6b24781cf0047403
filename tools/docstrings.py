"""Shorten docstrings outside the Python reference: one sentence, and a line for what a type cannot say.

    python tools/docstrings.py            rewrite the package
    python tools/docstrings.py --check    list what would change, and end with code 1 if anything would

Full NumPy sections belong to the names of docs/reference/api.md: what a user or the author of a method calls. In other
docstrings an entry of a section stays, as one line, if it tells a shape, a unit, a range or what None means.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Bases of classes of the reference, which shows inherited members too.
BASES = {
    "fedkeep.data.partition.base.Scheme",
    "fedkeep.interface.party.Party",
    "fedkeep.reporting.run_folder.Run",
    "fedkeep.reporting.trial.TrialResult",
}
SECTION = re.compile(
    r"^(Parameters|Other Parameters|Returns|Yields|Attributes|Raises|Warns|Notes|Examples|References|See Also)\n-{3,}$",
    re.MULTILINE,
)
TOLD_BY_NO_TYPE = re.compile(
    r"\[[^\]]*\]|\bNone\b|\b(seconds?|minutes?|hours?|bytes|[kMG]i?B|percent|degrees|pixels|shares? of|fraction|nats)\b"
    r"|%|\b0 (to|for|means|is|if|when)\b|\b0:|\b\d+\.\.\d+|\bempty\b|\bnegative\b|\bby (client|class|task|name|label)\b"
)
ALWAYS_TOLD = ("Attributes",)  # a field is told unless its words are those of its name and type
FEW_WORDS = 3  # a description of fewer new words only restates
WIDTH = 120


def reference() -> set[str]:
    """Return the dotted names whose docstrings stay as they are."""
    return BASES | set(re.findall(r"^::: (\S+)", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE))


def documented(tree: ast.Module, module: str, names: set[str]) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module that are not part of the reference."""

    def visit(node: ast.AST, dotted: str) -> Iterator[ast.Constant]:
        if dotted in names:
            return
        body = getattr(node, "body", [])
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and body:
            first = body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.value
        for child in body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from visit(child, f"{dotted}.{child.name}")

    yield from visit(tree, module)


def new_words(text: str, *known: str) -> int:
    """Return how many words of a text are not in names, types or a summary."""
    words = {word.rstrip("s").lower() for word in re.findall(r"[A-Za-z]{3,}", text)}
    said = {word.rstrip("s").lower() for word in re.findall(r"[A-Za-z][a-z]+|[a-z]+", " ".join(known))}
    return len(words - said - {"the", "for", "and", "with", "that", "which", "its", "are", "each", "thi", "them"})


def entries(body: str) -> Iterator[tuple[str, str]]:
    """Yield the name (or type) and the description of each entry of a section."""
    for entry in re.split(r"\n(?=\S)", body.strip("\n")):
        head, _, text = entry.partition("\n")
        yield head.split(" : ")[0].strip(), " ".join(textwrap.dedent(text).split())


def shortened(docstring: str, indent: int) -> str:
    """Return a docstring without sections, with a line for each entry that a type cannot say."""
    parts = SECTION.split(docstring)
    lines = []
    kept = ""
    for section, body in zip(parts[1::2], parts[2::2], strict=True):
        if section in ("Notes", "Examples", "References"):
            kept += "\n\n" + body.strip("\n")
        if section not in ("Parameters", "Other Parameters", "Attributes", "Returns", "Yields"):
            continue
        least = 1 if section in ALWAYS_TOLD else FEW_WORDS
        for name, text in entries(body):
            if TOLD_BY_NO_TYPE.search(text) or new_words(text, name, parts[0]) >= least:
                names = ", ".join(f"``{each.strip()}``" for each in name.split(","))
                start = section if section in ("Returns", "Yields") else names
                lines += textwrap.wrap(
                    f"{start}: {text}",
                    WIDTH - indent,
                    subsequent_indent="    ",
                    break_on_hyphens=False,
                    break_long_words=False,
                )
    return (parts[0].rstrip() + kept + ("\n\n" + "\n".join(lines) if lines else "")).strip()


def rewritten(source: str, module: str, names: set[str]) -> str:
    """Return the source of a module with shortened docstrings."""
    lines = source.splitlines()
    for node in reversed(list(documented(ast.parse(source), module, names))):
        start, end = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before = inspect.cleandoc(node.value)
        if not SECTION.search(before) or '"""' not in lines[start]:
            continue
        prefix = re.match(r'\s*r?"""', lines[start])
        if prefix is None:
            continue
        indent = node.col_offset
        text = shortened(before, indent).splitlines()
        if prefix.group().strip() == '"""':
            text = [line.replace("\\", "\\\\") for line in text]
        # Short enough for one line, with the quotes.
        if len(text) == 1:
            new = [f'{prefix.group()}{text[0]}"""']
        else:
            rest = [" " * indent + line if line else "" for line in text[1:]]
            new = [prefix.group() + text[0], *rest, " " * indent + '"""']
        lines[start : end + 1] = new
    return "\n".join(lines) + "\n"


def main() -> int:
    """Rewrite, or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    names = reference()
    changed = []
    for path in sorted((ROOT / "fedkeep").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        source = path.read_text()
        new = rewritten(source, module, names)
        if new != source:
            changed.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(new)
    for name in changed:
        print(f"{name}: {'has' if check else 'had'} sections outside the Python reference")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
