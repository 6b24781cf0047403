"""What a site stores between calls: the reply to each recent call, and the client state that the call left."""

import json
import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from fedkeep._utils import digests
from fedkeep._utils.digests import DamagedFile, ForeignFile, Identity
from fedkeep._utils.files import atomic_write, quoted_name
from fedkeep._utils.noise_stream import KEY_BYTES
from fedkeep.errors import RunError, ValueRefused
from fedkeep.interface import NoState
from fedkeep.interface.codec import decode, encode
from fedkeep.interface.privacy import add_spent, ever_name, spent

log = logging.getLogger(__name__)
_CALL_ID = re.compile(r"\d{6,}-[0-9a-f]{32}")
_PRUNED = ("state", "reply", "update", "secagg")
_RUN_ID = re.compile(r"[0-9a-f]{32}")
LONGEST_NAME = 255  # bytes of a folder's name


@dataclass(frozen=True)
class StateRef:
    """The server's reference to a client state, which is stored at the client's site.

    ``call``: The call that left the state; empty for a client's initial state.
    """

    call: str = ""


def state_ref_type(client_state_type: type[Any]) -> type[Any]:
    """Return the type of the server's references to client states.

    Returns: `StateRef`, or `NoState` for a method whose clients have no state.
    """
    return NoState if client_state_type is NoState else StateRef


def state_ref(call_id: str, client_state_type: type[Any]) -> Any:
    """Return a reference to the state that a call left."""
    return NoState() if client_state_type is NoState else StateRef(call_id)


class StateStore:
    """The folder of one site in one run, with a reply and a client state for each recent call.

    A call's identifier is its round, counted over all tasks, and a hash of the call's content. A message that arrives
    twice therefore gets the same reply, and a message with other content gets its own.

    ``owner``: The run, whose name is 32 hexadecimal digits, and the site; its method, seed, code and data as far as
        known.
    ``device``: Where loaded tensors are placed.
    """

    def __init__(self, root: Path, owner: Identity, device: torch.device) -> None:
        if not _RUN_ID.fullmatch(owner.run):
            raise ValueRefused(f"{owner.run[:40]!r} is not the name of a run.")
        self.folder = root / owner.run / quoted_name(owner.site, LONGEST_NAME)
        self.owner = owner
        self.device = device

    def lock(self) -> FileLock:
        """Return the site's lock: a second process waits for the first, and then finds its reply.

        The folder, in which updates lie too, is for the site's user alone.

        Returns: The lock, not acquired yet.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.stat().st_mode & 0o077:
            self.folder.chmod(0o700)
        return FileLock(self.folder / ".lock")

    def check_owner(self) -> None:
        """Raise `RunError` if the site has other data or code than at its first call of the run."""
        file = self.folder / "identity.json"
        if file.exists():
            begun = Identity.from_table(file, digests.read_json(file))
            begun.check(file, self.owner, "Give this site the data and code with which it began, or start a new run.")
        else:
            digests.write_json(file, self.owner.to_table())

    def store(self, call_id: str, state: Any, reply: Any) -> None:
        """Store the state that a call left, and last the reply, whose file shows that the others were written too."""
        self._write(call_id, "state", state)
        self._write(call_id, "reply", reply)

    def reply(self, call_id: str, hint: Any) -> Any:
        """Return the stored reply to a call; None if there is none that can be used: the step is then run again."""
        try:
            return self._read(call_id, "reply", hint) if self.file(call_id, "reply").exists() else None
        except (DamagedFile, ForeignFile) as error:
            log.warning("%s The step is run again.", error)
            return None

    def state(self, ref: Any, hint: type[Any]) -> Any:
        """Return a client state by the server's reference to it; None for a client that has stored none yet."""
        if not isinstance(ref, StateRef) or not ref.call:
            return None
        try:
            return self._read(ref.call, "state", hint)
        except (DamagedFile, ForeignFile) as error:
            raise RunError(
                f"{error} This client's state is lost: give this site the state folder that it had before, or start a "
                "new run."
            ) from None

    def count_spent(self, before: Mapping[str, int], after: Mapping[str, int], task: int) -> dict[str, int]:
        """Add what a step spent of privacy to all that this site ever spent in the run; return that for its reply.

        Nothing cuts this ledger back: a step that is run again from an older state, with new noise, is counted again.
        It is written before the reply, so that what leaves is counted, and at worst something that did not.
        """
        added = {name: count - before.get(name, 0) for name, count in spent(after).items()}
        if not any(added.values()):
            return {}
        file, ledger = self.folder / "ledger", {"id": secrets.token_hex(8), "spent": {}}
        try:
            ledger = json.loads(digests.read_sealed(file)) if file.exists() else ledger
        except DamagedFile as damage:
            log.warning("%s A new one begins; the server adds what it knows of the old one.", damage)
        totals: dict[str, int] = ledger["spent"]  # type: ignore[assignment]
        add_spent(totals, added, task)
        digests.write_sealed(file, json.dumps(ledger).encode())
        return {ever_name(str(ledger["id"]), name): count for name, count in totals.items()}

    def store_update(self, call_id: str, update: Tensor) -> None:
        """Store the update, int64 [numbers], that a client step left for secure aggregation, before `store`."""
        self._write(call_id, "update", update)

    def update(self, call_id: str) -> Tensor:
        """Return the update, int64 [numbers], that a client step left for secure aggregation."""
        update: Tensor = self._read(call_id, "update", Tensor)
        return update

    def _write(self, call_id: str, content: str, value: Any) -> None:
        digests.seal(self.file(call_id, content), encode(value), replace(self.owner, call=call_id))

    def _read(self, call_id: str, content: str, hint: Any) -> Any:
        body = digests.unseal(self.file(call_id, content), replace(self.owner, call=call_id))
        return decode(body, hint, self.device)

    def prune(self, call_id: str, checkpointed: str) -> None:
        """Delete what no later message can refer to: the calls of earlier rounds, except for the checkpointed ones.

        A message may arrive late. The calls of later rounds, which may then exist already, stay. So does what the site
        told of its updates: a round that is repeated has the same updates, and must not be in another sum.

        The server may go back to its last checkpoint but one (see `fedkeep.trials.checkpoint`). What this client
        had there is the call that was checkpointed before: the newest of those that earlier calls left.

        ``checkpointed``: The call that left the state with which the current round began; empty if there was none.
        """
        calls = {file.name.partition(".")[0] for file in self.folder.glob("*.state")}
        began = _round_of(checkpointed) if checkpointed else 0
        before = max((_round_of(call) for call in calls if _round_of(call) < began), default=0)
        for file in [file for content in _PRUNED for file in self.folder.glob(f"*.{content}")]:
            other = file.name.partition(".")[0]
            is_kept = other == checkpointed or (_round_of(other) == before and file.suffix == ".state")
            if _round_of(other) < _round_of(call_id) and not is_kept:
                file.unlink()

    def forget_secrets(self, aggregation: str) -> None:
        """Delete what is left of earlier aggregations when another one begins: keys of those that were broken off.

        ``aggregation``: The one that begins. The secrets of later rounds, which may exist already, stay.
        """
        for file in list(self.folder.glob("*.secagg*")):  # also the beginning of one, where writing was broken off
            other = file.name.lstrip(".").partition(".")[0]
            if other != aggregation and _round_of(other) <= _round_of(aggregation):
                file.unlink()

    def file(self, call_id: str, content: str) -> Path:
        """Return the file of something that belongs to a call or to an aggregation.

        ``call_id``: The call, or the aggregation, whose identifier has the same form.
        Returns: The file, which may not exist.
        """
        if not _CALL_ID.fullmatch(call_id):
            raise ValueRefused(f"{call_id[:60]!r} is not the name of a call.")
        return self.folder / f"{call_id}.{content}"


def stored_secret(folder: Path) -> bytes:
    """Return what only this site, or this server, knows, and knows again after a restart.

    From it comes noise that must be the same whenever the same is told, as in label counts.

    Returns: Text that stands for 256 random bits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "secret"
    with FileLock(folder / ".secret.lock"):
        if not file.exists():
            atomic_write(file, secrets.token_hex(KEY_BYTES), secret=True)
        found = file.read_bytes()
        if len(found) < 2 * KEY_BYTES:
            raise DamagedFile(
                f"{file} does not hold a secret of {8 * KEY_BYTES} bits. Remove it, and a new one is made: label "
                "counts get other noise then, which tells a little more about them."
            )
        return found


def _round_of(call_id: str) -> int:
    return int(call_id.partition("-")[0])
