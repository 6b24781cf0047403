"""Replies of the current round on the server's disk: a restarted server does not ask for the same step twice."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedkeep._utils.digests import DamagedFile
from fedkeep._utils.identity import ForeignFile, Identity, seal, unseal
from fedkeep.interface.codec import decode, encode
from fedkeep.rounds.messages import Fault, FaultKind

log = logging.getLogger(__name__)


class ReplyLog:
    """A folder with one file for each finished call of the current round.

    A round depends only on the server's state and on the replies. A server that restarts from the last checkpoint makes
    the same calls again, and their identifiers are hashes of their content. It therefore finds the replies here, and
    the failures too.

    ``folder``: Where the replies are stored; created with the first of them.
    """

    def __init__(self, folder: Path, owner: Identity) -> None:
        self.folder = folder
        self.owner = owner

    def begin_round(self, round: int) -> None:
        """Delete the replies of other rounds, which the checkpoint covers, and partly written files.

        ``round``: The round that begins, counted over all tasks.
        """
        for file in list(self.folder.iterdir()) if self.folder.exists() else []:
            if not file.name.startswith(f"{round:06d}-"):
                file.unlink()

    def store(self, call_id: str, reply: Any) -> None:
        """Store the reply to a call, or the reason why there was none.

        ``reply``: A value that the codec can encode, or a `Fault`.
        """
        if isinstance(reply, Fault):
            kind, content = "refused" if reply.refused else "lost", reply.text.encode()
        else:
            kind, content = "reply", encode(reply)
        seal(self.folder / f"{call_id}.{kind}", content, replace(self.owner, call=call_id))

    def has(self, call_id: str) -> bool:
        """Return whether a reply or a failure is stored; `load` tells whether it is whole."""
        return bool(self._files(call_id))

    def load(self, call_id: str, hint: Any, device: torch.device | None = None) -> Any:
        """Return the stored reply to a call.

        ``device``: Where to put the tensors; by default they stay on the CPU.
        Returns: The reply, a `Fault`, or None if nothing is stored or it is damaged: the site is then asked again.
        """
        for file in self._files(call_id):
            try:
                content = unseal(file, replace(self.owner, call=call_id))
            except (DamagedFile, ForeignFile) as error:
                log.warning("%s The site is asked again.", error)
                file.unlink()
                continue
            if file.suffix == ".reply":
                return decode(content, hint, device)
            kind = FaultKind.REFUSED if file.suffix == ".refused" else FaultKind.NO_REPLY
            return Fault(content.decode(), kind)
        return None

    def _files(self, call_id: str) -> list[Path]:
        """Return the files that are stored of a call, usually one."""
        files = [self.folder / f"{call_id}.{kind}" for kind in ("reply", "lost", "refused")]
        return [file for file in files if file.exists()]

    def clear(self) -> None:
        """Delete all replies: after the run, or after an error that one of them may have caused."""
        shutil.rmtree(self.folder, ignore_errors=True)
