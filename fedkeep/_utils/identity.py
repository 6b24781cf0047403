"""To what a file of a run belongs. A digest says that a file is whole; a whole file of another run is still wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedkeep._utils.digests import DamagedFile, read_sealed, write_sealed
from fedkeep.errors import RunError

_MARK = b"FedKeep "  # no safetensors file begins with it: as a number it would be a header of exabytes
MOST_NAMED = 3  # differences in an error


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
            more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
            raise ForeignFile(f"{path} does not belong here: {', '.join(found[:MOST_NAMED])}{more}. {advice}")


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
