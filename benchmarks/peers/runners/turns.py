"""A peer's half of the line protocol: it works only when it is its turn.

The driver writes a line, the peer answers with one JSON line: ``round`` asks for one round, ``stop FILE`` for the final
weights in a file. What else a framework prints goes to standard error, which the driver keeps in a log.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np


class Turns:
    """The line to the driver. ``stop_at`` is where the weights belong, once the driver has said stop."""

    def __init__(self) -> None:
        self.line = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.stop_at: Path | None = None

    def begin(self, *packages: str) -> bool:
        """Say that all is set up, with the versions of packages, and wait; False when it is time to stop."""
        self._say({"ready": True, **{package: version(package) for package in packages}})
        return self._wait()

    def done(self) -> bool:
        """Say that the round is over, and wait; False when it is time to stop."""
        self._say({"done": True})
        return self._wait()

    def leave(self, weights: dict[str, np.ndarray], rounds: int) -> None:
        """Hand over the final weights, by FedKeep's names, and after how many rounds they are, if the driver asked."""
        if self.stop_at is not None:
            np.savez(self.stop_at, **weights)
            self._say({"left": True, "rounds": rounds})

    def _wait(self) -> bool:
        word, _, rest = sys.stdin.readline().strip().partition(" ")
        self.stop_at = Path(rest) if word == "stop" else None
        return word == "round"

    def _say(self, answer: dict[str, object]) -> None:
        self.line.write(json.dumps(answer) + "\n")
