"""What a site remembers: the answer to each call that it may be asked again, and the state that the call left."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from filelock import FileLock

from fedkeep._utils.files import atomic_write
from fedkeep.errors import RunError, ValueRefused
from fedkeep.interface import NoState
from fedkeep.interface.codec import decode, encode

_CALL = re.compile(r"\d{6,}-[0-9a-f]{32}")
_RUN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class StateRef:
    """Stands, at the server, for a client's state: the call after which its site kept it; empty for a state that is
    as it was before the first call."""

    call: str = ""


def state_ref_type(client_state: type[Any]) -> type[Any]:
    """Return the type of what stands for a method's client states; there are none to stand for where it keeps none."""
    return NoState if client_state is NoState else StateRef


def state_ref(call: str, client_state: type[Any]) -> Any:
    """Return what stands for the state that a call left."""
    return NoState() if client_state is NoState else StateRef(call)


class StateStore:
    """The folder of one site in one run, with an answer and a state for each call.

    A call's name begins with its round, counted over all tasks, and ends with a digest of all that was asked. So a
    message that comes twice gets the same answer, and one that differs gets its own.
    """

    def __init__(self, root: Path, run: str, site: str, device: torch.device) -> None:
        if not _RUN.fullmatch(run):
            raise ValueRefused(f"{run[:40]!r} is not the name of a run.")
        self.folder = root / run / quote(site, safe="")
        self.device = device

    def lock(self) -> FileLock:
        """Return the lock that lets one process work for this site; a second waits, and finds the answer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / ".lock")

    def keep(self, call: str, state: Any, answer: Any) -> None:
        """Write down what a call left, before anybody is told; the answer last, since it vouches for the state."""
        atomic_write(self._file(call, "state"), encode(state))
        atomic_write(self._file(call, "answer"), encode(answer))

    def answer(self, call: str, hint: Any) -> Any:
        """Return the answer to an earlier call, or None."""
        file = self._file(call, "answer")
        return decode(file.read_bytes(), hint, self.device) if file.exists() else None

    def state(self, after: Any, hint: type[Any]) -> Any:
        """Return the state that a call left; None for a client that never kept anything."""
        if not isinstance(after, StateRef) or not after.call:
            return None
        file = self._file(after.call, "state")
        if not file.exists():
            raise RunError(
                f"{file} is missing, so this client's state is lost. Give this site the state folder that it had "
                "before, or start a new run."
            )
        return decode(file.read_bytes(), hint, self.device)

    def forget(self, call: str, settled: str) -> None:
        """Remove what nobody will ask for again: calls of rounds before this call's, but for that with which its round
        began.

        A message may come late, so that there are calls of later rounds too; those stay.
        """
        for file in self.folder.glob("*.safetensors"):
            other = file.name.partition(".")[0]
            if _round_of(other) < _round_of(call) and other != settled:
                file.unlink()

    def _file(self, call: str, what: str) -> Path:
        if not _CALL.fullmatch(call):
            raise ValueRefused(f"{call[:60]!r} is not the name of a call.")
        return self.folder / f"{call}.{what}.safetensors"


def _round_of(call: str) -> int:
    return int(call.partition("-")[0])
