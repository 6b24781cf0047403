"""What left clients and the server with noise in a round, from which epsilon is computed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from fedkeep.interface.codec import encode
from fedkeep.interface.privacy import IN_MEAN, spent, spent_ever
from fedkeep.models import Weights
from fedkeep.simulation.messages import StepResult


class PrivacyAccount:
    """Counts what left in one round.

    `spent` is what clients spent in this round, and `ever` what real sites counted themselves: a site that trains again
    since the server went back to an older checkpoint spends again, and only the site knows that it did.
    """

    def __init__(self) -> None:
        self.spent: dict[str, dict[str, int]] = {}
        self.ever: dict[str, dict[str, dict[str, int]]] = {}
        self.in_means: dict[str, int] = {}
        self._told: dict[str, list[str]] = {}

    def arrived(self, client: str, before: Mapping[str, int], result: StepResult) -> None:
        """Note a result that left a client, whatever becomes of it."""
        if spent(result.uses) != spent(before):
            try:
                content = encode(result.reply)
            except Exception as error:  # a malformed reply must not stop the run
                content = repr(error).encode()
            self._told.setdefault(client, []).append(_digest(content))

    def count(self, client: str, uses: Mapping[str, int]) -> None:
        """Count what a client spent, given its uses of randomness in the round."""
        if found := spent(uses):
            self.spent[client] = found
        if ledgers := spent_ever(uses):
            self.ever[client] = ledgers

    def noised_mean(self, clients: Iterable[str], mean: Weights) -> None:
        """Count a noised mean of models for all whose updates are in it."""
        for client in clients:
            self.in_means[client] = self.in_means.get(client, 0) + 1
        self._told.setdefault("", []).append(_digest(encode(mean)))

    def clients(self) -> dict[str, dict[str, int]]:
        """Return what each client spent."""
        means = {client: {IN_MEAN: count} for client, count in self.in_means.items()}
        return {client: self.spent.get(client, {}) | means.get(client, {}) for client in self.spent | means}

    def releases(self, record: Mapping[str, Any], server_told: object) -> dict[str, Any]:
        """Return the round's line in the ledger; empty if nothing left with noise.

        A round that is repeated has the same line only if the same left again, with the same noise, which tells nothing
        new. Any other line counts once more.
        """
        if "privacy" not in record:
            return {}
        told = _digest(json.dumps([sorted(self._told.items()), server_told]).encode())
        line = {name: record[name] for name in ("task", "round", "privacy")} | {"told": told}
        return line | ({"ever": self.ever} if self.ever else {})


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
