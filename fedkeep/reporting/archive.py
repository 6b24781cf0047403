"""The records of runs in one compressed file, which is read as a run folder is, without being unpacked.

An archive is a ZIP file. Of one run it has the run folder's own names; of several runs it has a folder for each, and
``results/choices.zip/confirm-sfedkd`` is the path of one. It holds what runs recorded; models, checkpoints and what
`fedkeep report` writes again stay out of it.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Any

from fedkeep._utils.digests import format_json, format_manifest, read_all, read_json, read_manifest
from fedkeep._utils.files import atomic_write
from fedkeep.errors import RunError
from fedkeep.experiment.provenance import CODE, RECORD_SUFFIXES, TRIALS
from fedkeep.trials.trial import MANIFEST

MOST_FILES = 100_000
MOST_BYTES = 1 << 30
"""Of an archive, and of all that it unpacks to: an archive that says it holds more is refused."""

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # which can be unpacked in parts of a size that is asked for


def open_run(path: Path) -> Traversable:
    """Return the root of a run's files.

    ``path``: A run folder, an archive of one, or a folder in an archive.
    Returns: The folder itself, on disk or in the archive. What does not exist is returned as it is given.
    """
    file = None if path.is_dir() else next((place for place in (path, *path.parents) if place.is_file()), None)
    if file is None:
        return path
    inside, path = path.relative_to(file).parts, file
    try:
        if path.stat().st_size > MOST_BYTES:
            raise RunError(f"{path} is larger than {MOST_BYTES:,} bytes, which no archive of a run is.")
        # The whole file is read, so that none stays open for as long as somebody may still look into it.
        archive = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise RunError(f"{path} is neither a run folder nor an archive of one ({error}).") from None
    _check(path, archive)
    archive.filename = str(path)  # what errors call it
    return zipfile.Path(archive).joinpath(*inside)


def write_archive(runs: Mapping[str, Path], target: Path, further: Mapping[str, bytes] | None = None) -> Path:
    """Write the records of run folders into one file; the same records give the same bytes.

    ``runs``: Run folders by their names in the archive; an empty name makes it an archive of this run only.
    ``target``: The file. In one that exists runs of the same names are replaced, unless files would be lost; others
        stay.
    ``further``: More files by name.
    """
    held, files = _files_of(target), dict(further or {})
    for name, run in runs.items():
        if not (run / "run.json").is_file():
            raise RunError(f"{run} is not a run folder: it has no run.json.")
        folder = f"{name}/" if name else ""
        found = {f"{folder}{path}": content for path, content in _contents(run).items()}
        if lost := sorted(path for path in held if path.startswith(folder) and path not in found):
            raise RunError(
                f"{target} holds {lost[0]}{f' and {len(lost) - 1} more files' * (len(lost) > 1)}, which {run} has not. "
                "Choose another --out, or remove it."
            )
        if (started := _started(held.get(f"{folder}run.json"))) not in ("", _started(found[f"{folder}run.json"])):
            raise RunError(
                f"{target} holds another run{f' named {name}' if name else ''}, which was started at {started}. Rename "
                f"{run}, or choose another --out."
            )
        files |= found
    if "run.json" in held and "" not in runs:
        raise RunError(f"{target} is the archive of one run; others cannot be added to it. Choose another --out.")
    files = held | files
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name)  # with no time of its own: 1980
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, files[name])
    with zipfile.ZipFile(packed) as archive:
        _check(target, archive)  # what could not be read again is not written
    return atomic_write(target, packed.getvalue())


def _started(info: bytes | None) -> str:
    """Return when the run of a run.json was started; empty without a file that tells it."""
    try:
        return str(json.loads(info).get("started", "")) if info else ""
    except ValueError:
        return ""


def _files_of(target: Path) -> dict[str, bytes]:
    """Return the files of an archive, none if there is no such archive yet."""
    if not target.is_file():
        return {}
    root = open_run(target)
    assert isinstance(root, zipfile.Path)
    return {entry.filename: read_all(root / entry.filename) for entry in root.root.infolist() if not entry.is_dir()}


def _contents(run: Path) -> dict[str, bytes]:
    """Return the files that a run recorded, by name: its own, those of its trials, and the user's code."""
    code = {path.relative_to(run).as_posix(): path.read_bytes() for path in sorted((run / CODE).rglob("*.py"))}
    return code | {
        path.relative_to(run).as_posix(): _content(path)
        for folder in (run, *sorted((run / TRIALS).glob("*")))
        for path in sorted(folder.glob("*"))
        if path.is_file() and path.suffix in RECORD_SUFFIXES
    }


def _content(path: Path) -> bytes:
    """Return what the archive holds of a file.

    A manifest lists what is in the archive only. Of the command's absolute paths only the last names stay, and of the
    data's nothing: an archive is handed on, and where folders lie on somebody's machine is nobody else's business.
    """
    if path.name == "run.json":
        info = read_json(path)
        command, where = info.get("command"), info.pop("data_path", None)
        short = [_without_folders(word) for word in command] if isinstance(command, list) else command
        if where is not None or command != short:
            info["command"] = short
            return format_json(info, indent=2).encode()
    if path.name != MANIFEST:
        return path.read_bytes()
    files, further = read_manifest(path)
    kept = {name: digest for name, digest in files.items() if PurePosixPath(name).suffix in RECORD_SUFFIXES}
    return format_manifest(kept, **further).encode()


def _without_folders(word: Any) -> Any:
    """Return a word of a command with the last name of an absolute path in its place, also after an equals sign."""
    before, equals, value = word.rpartition("=") if isinstance(word, str) else ("", "", word)
    return f"{before}{equals}{Path(value).name}" if isinstance(value, str) and Path(value).is_absolute() else word


def _check(path: Path, archive: zipfile.ZipFile) -> None:
    """Raise `RunError` for an archive that no run wrote."""
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(entries) > MOST_FILES or sum(entry.file_size for entry in entries) > MOST_BYTES:
        raise RunError(
            f"{path} says that it holds {len(entries):,} files of {sum(entry.file_size for entry in entries):,} bytes "
            f"in all. An archive of a run has at most {MOST_FILES:,} files and {MOST_BYTES:,} bytes."
        )
    for entry in entries:
        name = PurePosixPath(entry.filename)
        if name.is_absolute() or ".." in name.parts or any(character in entry.filename for character in "\\:\0"):
            raise RunError(
                f"{path} holds a file named {entry.filename!r}, which leads out of the archive or is no name on every "
                "system. Rename it, or its run folder."
            )
        if entry.compress_type not in _METHODS or entry.flag_bits & 0x61:  # encrypted, or patched data
            raise RunError(f"{path} holds {entry.filename!r}, encrypted or compressed in another way than deflate.")
    if len(set(names)) < len(names):
        raise RunError(f"{path} holds two files of one name.")
