"""Files that are either whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def atomic_write(path: str | Path, content: bytes | str) -> Path:
    """Write a file under a temporary name, force it to disk, and rename it: a crash leaves the old file or the new.

    Text is UTF-8 with ``\\n`` line ends everywhere. Returns the path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
