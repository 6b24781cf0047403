"""Digests and identities: how a damaged file is told from a whole one, and a foreign one from the run's own.

A disk, a copy or an editor may change a file without anybody noticing. What a run reads again has a digest, its length
and its SHA-256: in a manifest that lists files, or, for a JSON file or a recipe, in its own last line. A digest finds
damage; it does not stop somebody who can write the file and its digest. A whole file of another run is still wrong: an
identity says to what a file belongs.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedkeep._utils.files import atomic_write
from fedkeep.errors import RunError

_PART = 1 << 20
_JSON_DIGEST = re.compile(rb',\s*"sha256": "([0-9a-f]{64})"\s*\}\s*\Z')
_TOML_DIGEST = re.compile(rb"\n# sha256 of the lines above: ([0-9a-f]{64})\n\Z")


class DamagedFile(RunError):
    """A file is missing, or is not what was written."""


@dataclass(frozen=True)
class Digest:
    """What distinguishes a file's content from any other.

    ``bytes``: Its length.
    ``sha256``: Its SHA-256, 64 hexadecimal digits.
    """

    bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes with SHA-256 {self.sha256[:12]}..."


def digest_of(content: bytes) -> Digest:
    """Return the digest of a content."""
    return Digest(len(content), hashlib.sha256(content).hexdigest())


def check_file(path: Traversable, expected: Digest, *, beginning: bool = False) -> None:
    """Check that a file is what was written.

    ``expected``: Its digest when it was written.
    ``beginning``: Check only as many bytes as were written then; more may follow.
    """
    found, size = hashlib.sha256(), 0
    for part in _parts(path, expected, expected.bytes if beginning else None):
        found.update(part)
        size += len(part)
    _compare(path, Digest(size, found.hexdigest()), expected)


def _compare(path: Traversable, found: Digest, expected: Digest) -> None:
    if found != expected:
        raise DamagedFile(f"{path} is damaged: expected {expected}, found {found}.")


def _parts(path: Traversable, expected: Digest | None, most: int | None = None) -> Iterator[bytes]:
    """Yield a file's content, on disk or in an archive, or so many bytes of it; raise `DamagedFile` if it is not there.

    Of an archive, `read()` without a size unpacks all that is there before it cuts it to the size that was checked.
    """
    try:
        with path.open("rb") as file:
            while part := file.read(_PART if most is None else min(_PART, most)):
                yield part
                most = None if most is None else most - len(part)
    except (OSError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        what = "is missing" if isinstance(error, FileNotFoundError | KeyError) else f"cannot be read ({error})"
        raise DamagedFile(f"{path} {what}{f': expected {expected}' if expected else ''}.") from None


def write_json(path: Path, content: Mapping[str, Any], *, indent: int | None = None) -> Path:
    """Write a JSON object atomically, with a last entry ``sha256``: the digest of all bytes before that entry.

    ``content``: The object, which is not empty and has no entry ``sha256``.
    ``indent``: Spaces of indentation; by default the object is written on one line.
    """
    return atomic_write(path, format_json(content, indent=indent))


def format_json(content: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Return the text that `write_json` writes.

    ``content``: The object, which is not empty and has no entry ``sha256``.
    ``indent``: Spaces of indentation; by default the object is written on one line.
    Returns: The object with its digest.
    """
    body = json.dumps(content, indent=indent).removesuffix("}").rstrip()
    end = "" if indent is None else "\n"
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body},{end or " "}{" " * (indent or 0)}"sha256": "{digest}"{end}}}{end}'


def read_json(path: Traversable) -> dict[str, Any]:
    """Read a JSON object that `write_json` has written, on disk or in an archive, and check it."""
    content = _unsealed(path, _JSON_DIGEST) + b"}"
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged: expected a JSON object ({error}).") from None
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} is damaged: expected a JSON object, not {type(value).__name__}.")
    return value


def is_sealed(content: bytes) -> bool:
    """Return whether a file ends with its own digest.

    Returns: True if it does, whether or not the digest is right.
    """
    return any(form.search(content[-120:]) for form in (_JSON_DIGEST, _TOML_DIGEST))


def write_toml(path: Path, text: str) -> Path:
    """Write TOML atomically, with a comment as its last line: the digest of all lines before it."""
    body = text.removesuffix("\n")
    digest = hashlib.sha256(body.encode()).hexdigest()
    return atomic_write(path, f"{body}\n# sha256 of the lines above: {digest}\n")


def read_toml(path: Traversable) -> str:
    """Read the text that `write_toml` has written, on disk or in an archive, and check it."""
    content = _unsealed(path, _TOML_DIGEST) + b"\n"
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{path} is damaged: expected text ({error}).") from None


def read_all(path: Traversable, expected: Digest | None = None) -> bytes:
    """Return a file's content, on disk or in an archive; raise `DamagedFile` if it cannot be read.

    ``expected``: Its digest when it was written, if that is known: the content must have it.
    """
    content = b"".join(_parts(path, expected))
    if expected is not None:
        _compare(path, digest_of(content), expected)
    return content


def _unsealed(path: Traversable, form: re.Pattern[bytes]) -> bytes:
    """Return a file's content without its digest, which must be right."""
    content = read_all(path)
    found = form.search(content, max(0, len(content) - 120))
    # Of other files their reader knows what to do; this one is read in many places.
    hint = " Restore it from a copy, or repeat the run from its recipe.toml." * (path.name == "run.json")
    if found is None:
        raise DamagedFile(f"{path} is damaged or was edited: it does not end with its SHA-256.{hint}")
    body = content[: found.start()]
    expected, actual = found[1].decode(), hashlib.sha256(body).hexdigest()
    if actual != expected:
        raise DamagedFile(
            f"{path} is damaged or was edited: its last line says SHA-256 {expected[:12]}..., and it has "
            f"{actual[:12]}...{hint}"
        )
    return body


def write_sealed(path: Path, content: bytes) -> Path:
    """Write a content atomically, with its SHA-256 as the last 32 bytes of the file."""
    return atomic_write(path, content + hashlib.sha256(content).digest())


def read_sealed(path: Path) -> bytes:
    """Return the content that `write_sealed` has written."""
    content = read_all(path)
    body, expected = content[:-32], content[-32:]
    if hashlib.sha256(body).digest() != expected:
        raise DamagedFile(
            f"{path} is damaged: its last bytes say SHA-256 {expected.hex()[:12]}..., and it has "
            f"{hashlib.sha256(body).hexdigest()[:12]}..."
        )
    return body


def write_manifest(path: Path, files: Mapping[str, Digest], **content: Any) -> Path:
    """Write a manifest: a JSON object that lists files with their digests.

    ``files``: The files' digests, by name.
    """
    return atomic_write(path, format_manifest(files, **content))


def format_manifest(files: Mapping[str, Digest], **content: Any) -> str:
    """Return the text that `write_manifest` writes.

    ``files``: The files' digests, by name.
    Returns: The manifest with its own digest.
    """
    return format_json({**content, "files": {name: asdict(digest) for name, digest in files.items()}})


def read_manifest(path: Traversable) -> tuple[dict[str, Digest], dict[str, Any]]:
    """Read a manifest that `write_manifest` has written.

    Returns: The files' digests, by name.
    """
    content = read_json(path)
    try:
        return {name: Digest(**entry) for name, entry in content.pop("files").items()}, content
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedFile(f"{path} is no manifest of this version of FedKeep: {error}.") from None


_MARK = b"FedKeep "  # no safetensors file begins with it: as a number it would be a header of exabytes
MAX_NAMED = 3  # differences in an error


class ForeignFile(RunError):
    """A file is whole, and belongs to something else."""


@dataclass(frozen=True)
class Identity:
    """To what a file belongs; what is empty is not known of it, and is not compared.

    Every manifest, every trial.json and every sealed state or reply holds one.

    ``method``: The method's label.
    ``settings``: All options of the recipe on which the trial's results depend, such as ``"training.lr"``.
    ``code``: The SHA-256 of the user's own files, by name.
    ``inputs``: The hashes of data, partition, extractors and generator.
    ``run``, ``site``, ``call``: The run of sites, the site, and the call (six digits of its round, and a hash) that
        left the file.
    """

    method: str = ""
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    site: str = ""
    call: str = ""

    @classmethod
    def from_table(cls, path: object, table: object) -> Identity:
        """Return what `to_table` described; without a table, which older versions did not write, nothing is known."""
        with suppress(TypeError):
            identity = cls(**(table or {}))  # type: ignore[arg-type]
            if all(isinstance(part, Mapping) for part in (identity.settings, identity.code, identity.inputs)):
                return identity
        raise DamagedFile(f"{path} is damaged: it does not say to what it belongs.")

    def to_table(self) -> dict[str, Any]:
        """Return what is known, for JSON."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None, {})}

    def differences(self, other: Identity) -> list[str]:
        """Return in which of those things that both know this one differs from another, which is expected."""
        found = []
        for name in ("method", "seed", "run", "site", "call"):
            mine, wanted = getattr(self, name), getattr(other, name)
            if mine not in ("", None) and wanted not in ("", None) and mine != wanted:
                if name == "call" and mine[:6] != wanted[:6]:
                    name, mine, wanted = "round", int(mine[:6]), int(wanted[:6])
                found.append(f"its {name} is {mine}, not {wanted}")
        if self.settings and other.settings:
            for name in sorted({*self.settings, *other.settings}):
                mine, wanted = self.settings.get(name, "not set"), other.settings.get(name, "not set")
                if mine != wanted:
                    found.append(f"its {name} is {_short(mine)}, not {_short(wanted)}")
        mine, wanted = {**self.code, **self.inputs}, {**other.code, **other.inputs}  # older versions knew fewer
        changed = [name for name in wanted if mine.get(name, wanted[name]) != wanted[name]]
        if len(changed) > 1 and "partition" in changed:
            changed.remove("partition")  # it follows from the others
        return [*found, f"it was begun with another {' and '.join(changed)} than there is now"] if changed else found

    def check(self, path: object, expected: Identity, advice: str) -> None:
        """Raise `ForeignFile` if a file, whose identity this is, does not belong to what is expected."""
        if found := self.differences(expected):
            more = f", and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
            raise ForeignFile(f"{path} does not belong here: {', '.join(found[:MAX_NAMED])}{more}. {advice}")


def _short(value: Any) -> str:
    text = value if value == "not set" else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def seal(path: Path, content: bytes, owner: Identity) -> Path:
    """Write a content atomically, with its owner before it and its SHA-256 after it."""
    return write_sealed(path, _MARK + json.dumps(owner.to_table()).encode() + b"\n" + content)


def unseal(path: Path, expected: Identity) -> bytes:
    """Return what `seal` wrote; raise `DamagedFile`, or `ForeignFile` if it belongs to something else."""
    body = read_sealed(path)
    if not body.startswith(_MARK):  # of an older version, which did not say to what it belongs
        return body
    head, _, body = body.partition(b"\n")
    try:
        table = json.loads(head.removeprefix(_MARK))
    except ValueError:
        raise DamagedFile(f"{path} is damaged: it does not say to what it belongs.") from None
    Identity.from_table(path, table).check(path, expected, "It is not used.")
    return body
