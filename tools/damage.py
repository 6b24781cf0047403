"""Damage to the files of a run folder, as disks, copies and editors cause it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

DAMAGES = ("bit", "truncate", "empty", "delete", "zero", "swap")
"""One flipped bit, a cut end, an empty file, no file, zeros in place of the content, and two bytes exchanged."""


def files_of(run: Path) -> list[Path]:
    """Return the files that a resume or a report depends on, relative to the run folder, in order.

    Returns: The files: all of them, without locks and without what a report writes.
    """
    reports = {"results.csv", "table.md", "report.html"}
    found = (path.relative_to(run) for path in sorted(run.rglob("*")) if path.is_file())
    return [path for path in found if not path.name.startswith(".") and path.name not in reports]


class RandomStream(Protocol):
    """What `random.Random` can do that a damage needs."""

    def randrange(self, stop: int, /) -> int:
        """Return a number from 0 to below `stop`."""
        ...

    def choice(self, seq: Sequence[int], /) -> int:
        """Return one of the numbers."""
        ...


def apply_damage(file: Path, damage: str, rng: RandomStream) -> None:
    """Damage a file.

    ``file``: The file, which is not empty.
    ``rng``: Such as a `random.Random`. Chooses the place.
    """
    content = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
        return
    place = rng.randrange(len(content))
    if damage == "bit":
        content[place] ^= 1 << rng.randrange(8)
    elif damage == "swap":
        others = [n for n, byte in enumerate(content) if byte != content[place]] or [place]
        other = rng.choice(others)
        content[place], content[other] = content[other], content[place]
    elif damage == "zero":
        content = bytearray(len(content))
    else:
        del content[place if damage == "truncate" else 0 :]
    file.write_bytes(content)
