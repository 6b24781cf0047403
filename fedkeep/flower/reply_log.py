"""The answers of the round under way, on the server's disk: a server that was killed asks nobody twice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from fedkeep._utils.files import atomic_write
from fedkeep.interface.codec import decode, encode
from fedkeep.simulation.messages import ClientFailure


class ReplyLog:
    """A folder with one file for each call of this round that came to an end.

    A round depends on nothing but the server's state and the answers. Played again from the last checkpoint it asks the
    same calls, which are named by all that is asked, and finds here what came of them; losses too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, round: int) -> None:
        """Drop the answers of other rounds, for which the checkpoint stands now, and what a kill left half written."""
        for file in list(self.folder.iterdir()) if self.folder.exists() else []:
            if not file.name.startswith(f"{round:06d}-"):
                file.unlink()

    def keep(self, call: str, found: Any) -> None:
        """Write down the answer to a call, or why there was none."""
        if isinstance(found, ClientFailure):
            atomic_write(self.folder / f"{call}.lost", found.reason)
        else:
            atomic_write(self.folder / f"{call}.safetensors", encode(found))

    def recall(self, call: str, hint: Any) -> Any:
        """Return what came of a call, an answer or `ClientFailure`, or None if that is not known."""
        answered, lost = self.folder / f"{call}.safetensors", self.folder / f"{call}.lost"
        if answered.exists():
            return decode(answered.read_bytes(), hint)
        return ClientFailure(lost.read_text(encoding="utf-8")) if lost.exists() else None

    def remove(self) -> None:
        """Forget all answers: once the run is over, or where one of them has stopped it and should be asked again."""
        shutil.rmtree(self.folder, ignore_errors=True)
