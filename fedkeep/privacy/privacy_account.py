"""The account of what leaves clients and the server with noise, from which epsilon is computed."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from fedkeep.interface.codec import encode
from fedkeep.interface.privacy import IN_MEAN, SPENDING, find_implausible_spending, spent, spent_ever
from fedkeep.options import as_table
from fedkeep.privacy.privacy_checks import reason_against_privacy
from fedkeep.rounds.messages import Fault, refused
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round
from fedkeep.rounds.state import SimulationState


class PrivacyAccount(ReplyStep):
    """Checks what a client says that a step spent of its privacy; it is on record even if its reply is refused.

    `ever` is what real sites counted themselves: a site that trains again since the server went back to an older
    checkpoint spends again, and only the site knows that it did.
    """

    def __init__(self) -> None:
        self.spent: dict[str, dict[str, int]] = {}
        self.ever: dict[str, dict[str, dict[str, int]]] = {}
        self.in_means: dict[str, int] = {}
        self.means = 0
        self._told: dict[str, list[str]] = {}

    def reason_against(self, state: SimulationState) -> str:
        return reason_against_privacy(state.algorithm, state.settings.privacy, state.settings.defense)

    def allows_partial_aggregation(self, state: SimulationState) -> bool:
        return not _spends(state)

    def begin_round(self, state: SimulationState, number: int) -> None:
        self.spent, self.ever, self.in_means, self.means, self._told = {}, {}, {}, 0, {}

    def receive(self, round: Round, reply: Reply) -> None:
        before = round.uses.get(reply.client, {})
        if fault := _implausible(round.state, reply, before):
            reply.uses = dict(before)  # which it may have spent in an earlier step
            raise fault
        self._note_reply(reply, before)

    def _note_reply(self, reply: Reply, before: Mapping[str, int]) -> None:
        if spent(reply.uses) != spent(before):
            self.note(reply.client, reply.value)

    def note(self, client: str, value: object) -> None:
        """Note what left with noise, whatever becomes of it: a digest of it, for the ledger."""
        try:
            content = encode(value)
        except Exception as error:  # a malformed reply must not stop the run
            content = repr(error).encode()
        self._told.setdefault(client, []).append(_digest(content))

    def arrived(self, round: Round, reply: Reply) -> None:
        if (fault := reply.fault) is not None and not fault.refused:
            before = round.uses.get(reply.client, {})
            if not fault.uses or _implausible(round.state, reply, before) is not None:
                return
            self.note(reply.client, fault.text)
        if privacy := spent(reply.uses):
            self.spent[reply.client] = privacy
        if ledgers := spent_ever(reply.uses):
            self.ever[reply.client] = ledgers

    def add_mean(self, clients: Iterable[str]) -> int:
        """Count a noised mean of models for all whose updates are in it; return how many there are in this round."""
        self.means += 1
        for client in clients:
            self.in_means[client] = self.in_means.get(client, 0) + 1
        return self.means

    def abandon(self, round: Round) -> None:
        """Count what clients spend that were asked already, although nobody uses their replies."""
        if _spends(round.state):
            noted = set(self._told)
            for reply in round.unused_replies():
                before = round.uses.get(reply.client, {})
                if _implausible(round.state, reply, before) is None:
                    if reply.client not in noted and reply.fault is None:
                        self._note_reply(reply, before)
                    self.arrived(round, reply)

    def record(self, round: Round) -> dict[str, Any]:
        server_spent = spent(round.state.server.uses)
        means = {client: {IN_MEAN: count} for client, count in self.in_means.items()}
        clients = {client: self.spent.get(client, {}) | means.get(client, {}) for client in self.spent | means}
        if not clients and not server_spent:
            return {}
        found = as_table(round.state.settings.privacy) | {"clients": clients}
        return {"privacy": found | ({"server": server_spent} if server_spent else {})}

    def releases(self, round: Round, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the round's line in the ledger, which no resume cuts back; empty if nothing left with noise.

        A round that is repeated has the same line only if the same left again, with the same noise, which tells nothing
        new. Any other line counts once more.
        """
        if "privacy" not in record:
            return {}
        told = _digest(json.dumps([sorted(self._told.items()), round.state.server.released_means]).encode())
        line = {name: record[name] for name in ("task", "round", "privacy")} | {"told": told}
        return line | ({"ever": self.ever} if self.ever else {})


def _spends(state: SimulationState) -> bool:
    """Tell whether anything leaves with noise."""
    options = as_table(state.settings.privacy)
    return any(options[option] for option in SPENDING)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _implausible(state: SimulationState, reply: Reply, before: Mapping[str, int]) -> Fault | None:
    """Return why what a client says that a step spent cannot be true."""
    most = state.most_steps(reply.client)
    fault = find_implausible_spending(before, reply.uses, state.settings.privacy, most)
    return refused(fault) if fault else None
