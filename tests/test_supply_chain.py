"""The versions with hashes are those that are tested together."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pinned(file: str) -> set[str]:
    return set(re.findall(r"^([\w.-]+==[\w.+]+)", (ROOT / file).read_text(), flags=re.M))


def test_every_tested_version_has_hashes() -> None:
    tested = {
        pin.lower().replace("_", "-") for pin in pinned("constraints/tested.txt") if not pin.startswith("torch==")
    }
    hashed = {pin.lower().replace("_", "-") for pin in pinned("constraints/hashed.txt")}
    assert tested == hashed, "constraints/tested.txt changed: run make lock"
    text = (ROOT / "constraints/hashed.txt").read_text()
    assert all("--hash=sha256:" in entry for entry in re.split(r"^(?=\w)", text, flags=re.M) if entry.strip())
