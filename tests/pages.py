"""The repository's pages, and the code and the commands that they show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *DOCS]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.S | re.M)


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of a page in some languages."""
    return [code for language, code in _FENCED.findall(text(page)) if language in languages]


def headings(page: str) -> list[int]:
    """The levels of a page's headings."""
    return [len(marks) for marks in re.findall(r"^(#+) ", _FENCED.sub("", text(page)), flags=re.M)]


def inline(page: str) -> list[str]:
    """What stands between backticks in the text of a page."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", _FENCED.sub("", text(page)))


def indented_commands(page: str) -> list[str]:
    """Commands that stand in the text as indented lines, whole."""
    found = re.findall(r"^    (fedkeep (?:.*\\\n)*.*)$", _FENCED.sub("", text(page)), flags=re.M)
    return [re.sub(r"\s*\\\n\s*", " ", line) for line in found]


def command_lines(page: str) -> list[str]:
    """The lines of a page's blocks of commands; a drawing is none."""
    found = [code for code in blocks(page, "", "sh", "bash", "console") if not re.search("[─►│]", code)]
    return [line for code in found for line in code.splitlines() if line.strip()]
