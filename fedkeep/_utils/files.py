"""Writing files atomically."""

from __future__ import annotations

import os
from pathlib import Path


def atomic_write(path: str | Path, content: bytes | str) -> Path:
    """Write a file so that after a crash either the old file or the new one is there, and never a part.

    The content is written to a temporary file in the same folder, forced to disk, and renamed.

    Parameters
    ----------
    path : str or Path
        The file. Its folder is created if it does not exist.
    content : bytes or str
        The content. Text is encoded as UTF-8, and line ends are written unchanged on every system.

    Returns
    -------
    Path
        The file.
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


def is_file(path: Path) -> bool:
    """Tell whether a path names a file; false for names that no file can have.

    Parameters
    ----------
    path : Path
        The path. Python raises errors for names that are too long.

    Returns
    -------
    bool
        True for a file, or a link to one.
    """
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
