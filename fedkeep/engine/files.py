"""Files that are either whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file under a temporary name, force it to disk, and rename it: a crash leaves the old file or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
