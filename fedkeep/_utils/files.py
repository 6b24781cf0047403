"""Writing files so that neither a killed process nor a power failure leaves a part of one."""

import hashlib
import os
from pathlib import Path
from urllib.parse import quote

from fedkeep.errors import ConfigError, in_one_line


def atomic_write(path: str | Path, content: bytes | str, *, sync: bool = True, secret: bool = False) -> Path:
    """Write a file so that after a crash either the old file or the new one is there, and never a part.

    The content is written to a temporary file in the same folder, forced to disk, and renamed.

    ``path``: The file. Its folder is created if it does not exist.
    ``content``: The content. Text is encoded as UTF-8, and line ends are written unchanged on every system.
    ``sync``: Force the folder to disk too, so that the new name outlives a power failure. Whoever writes several files
        can call `sync_folder` once after the last.
    ``secret``: Only the user who runs this can read the file.
    """
    path = Path(path)
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if secret:
            temporary.touch(mode=0o600)
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        if sync:
            sync_folder(path.parent)
    except OSError as error:
        if error.errno:
            error.filename = str(path)  # the write to a full disk names no file
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return path


def quoted_name(text: str, longest: int) -> str:
    """Return a part of a file's name that stands for a text, and for no other.

    ``text``: Any text, such as a client's name. Of one that is not ASCII, each letter takes six bytes or more.
    ``longest``: The largest number of bytes; at least 34. A file system takes 255 for a whole name.
    Returns: The text in percent encoding, or where that is too long its beginning, ``=`` and a hash of the text.
    """
    if text in (".", ".."):  # which are folders
        return text.replace(".", "%2E")
    quoted = quote(text, safe="")  # in which no "=" is left
    if len(quoted) <= longest:
        return quoted
    end = f"={hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
    return quoted[: longest - len(end)] + end


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk: otherwise a renamed file may have its old name after a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, so that they outlive a power failure."""
    check_utf8(folder)
    if folder.is_dir():
        return
    missing = [folder, *(parent for parent in folder.parents if not parent.exists())]
    if link := next((place for place in missing if place.is_symlink() and not place.exists()), None):
        raise ConfigError(f"{link} is a link to nothing. Remove it, create what it names, or choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for created in reversed(missing):
        sync_folder(created.parent)


def check_utf8(path: Path) -> None:
    """Raise `ConfigError` for a path that cannot stand in a report or an archive, nor be opened by safetensors."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{str(path)!r} is not UTF-8. Choose another name, or rename what has it.") from None


def check_path(name: str, option: str) -> None:
    """Raise `ConfigError` if no file or folder can have a name: too long, with a NUL, or an unknown user's home."""
    try:
        Path(name).expanduser().stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{option} cannot be {in_one_line(repr(name), 80)}: {in_one_line(error, 100)}.") from error
