"""A peer's half of the line protocol: it works only when it is its turn.

The driver writes a line, the peer answers with one JSON line: ``round`` asks for one round, ``show FILE`` for the
weights in a file, and the end of the input is the end. What else a framework prints goes to standard error, which the
driver keeps in a log.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version

import numpy as np

Shown = tuple[dict[str, np.ndarray], int]
"""Weights by FedKeep's names, and after how many rounds they are."""


class Turns:
    """The line to the driver.

    Parameters
    ----------
    show : gives the weights as they are between rounds; None where nobody compares them.
    """

    def __init__(self, show: Callable[[], Shown] | None = None) -> None:
        self.show = show
        self.line = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def begin(self, *packages: str) -> bool:
        """Say that all is set up, with the versions of packages, and wait; False when it is time to stop."""
        self._say({"ready": True, **{package: version(package) for package in packages}})
        return self._wait()

    def done(self) -> bool:
        """Say that the round is over, and wait; False when it is time to stop."""
        self._say({"done": True})
        return self._wait()

    def _wait(self) -> bool:
        for line in sys.stdin:
            word, _, file = line.strip().partition(" ")
            if word == "round":
                return True
            weights, rounds = self.show() if self.show is not None else ({}, 0)
            np.savez(file, **weights)
            self._say({"shown": True, "rounds": rounds})
        return False

    def _say(self, answer: dict[str, object]) -> None:
        self.line.write(json.dumps(answer) + "\n")
