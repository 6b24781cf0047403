"""What a tree of processes takes of memory: the sum of their proportional set sizes, from /proc (Linux).

The proportional set size counts a page that several processes share once in all, a share for each.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def tree(root: int) -> list[int]:
    """Return the leader of a session, all its descendants, and what else is of its session."""
    parents: dict[int, int] = {}
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if entry.name.isdecimal():
            with suppress(OSError):  # it ended meanwhile
                _, parent, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = root if int(session) == root else int(parent)
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process and child not in found]
    return found


def proportional(processes: list[int]) -> int:
    """Return the bytes that processes take together."""
    total = 0
    for process in processes:
        with suppress(OSError):
            for line in (PROC / str(process) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total


class Watch:
    """Samples the memory of a tree while it works, in a thread; ``peak`` is the largest sum seen, in bytes."""

    def __init__(self, root: int, pause: float = 0.05) -> None:
        self.root, self.pause = root, pause
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, proportional(tree(self.root)))
            if self._stop.wait(self.pause):
                return
