"""The account of what clients spend of their privacy, from which epsilon is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedkeep.interface.privacy import SPENDING, find_implausible_spending, spent
from fedkeep.options import as_table
from fedkeep.simulation.messages import Fault, refused
from fedkeep.simulation.privacy_checks import reason_against_privacy
from fedkeep.simulation.reply_step import Reply, ReplyStep, Round
from fedkeep.simulation.state import SimulationState


class PrivacyAccount(ReplyStep):
    """Checks what a client says that a step spent of its privacy; it is on record even if its reply is refused."""

    def __init__(self) -> None:
        self.spent: dict[str, dict[str, int]] = {}
        self.means, self.sample_rate = 0, 0.0

    def reason_against(self, state: SimulationState) -> str:
        return reason_against_privacy(state.algorithm, state.privacy, state.defense)

    def begin_round(self, state: SimulationState, number: int) -> None:
        self.spent = {}
        self.means, self.sample_rate = 0, 0.0

    def receive(self, round: Round, reply: Reply) -> None:
        before = round.uses.get(reply.client, {})
        if fault := _implausible(round.state, reply, before):
            reply.uses = dict(before)  # which it may have spent in an earlier step
            raise fault

    def arrived(self, round: Round, reply: Reply) -> None:
        no_reply = reply.fault is not None and not reply.fault.refused
        if not no_reply and (privacy := spent(reply.uses)):
            self.spent[reply.client] = privacy

    def add_mean(self, sample_rate: float) -> int:
        """Count a noised mean of models, and return how many there are in this round."""
        self.means += 1
        self.sample_rate = max(self.sample_rate, sample_rate)
        return self.means

    def abandon(self, round: Round) -> None:
        """Count what clients spend that were asked already, although nobody uses their replies."""
        if any(as_table(round.state.privacy)[option] for option in SPENDING):
            for reply in round.unused_replies():
                if _implausible(round.state, reply, round.uses.get(reply.client, {})) is None:
                    self.arrived(round, reply)

    def record(self, round: Round) -> dict[str, Any]:
        server_spent = spent(round.state.server.uses)
        if not self.spent and not self.means and not server_spent:
            return {}
        shared = {"means": self.means, "sample_rate": self.sample_rate}
        found = as_table(round.state.privacy) | {"clients": self.spent} | shared
        return {"privacy": found | ({"server": server_spent} if server_spent else {})}


def _implausible(state: SimulationState, reply: Reply, before: Mapping[str, int]) -> Fault | None:
    """Return why what a client says that a step spent cannot be true."""
    most = state.most_steps(reply.client)
    fault = find_implausible_spending(before, reply.uses, state.privacy, most)
    return refused(fault) if fault else None
