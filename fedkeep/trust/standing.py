"""The standing of clients: who is asked no more, for some rounds or for good, since its replies were refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from fedkeep.rounds.messages import FaultKind
from fedkeep.rounds.reply_step import ReplyStep, Round, begins_task
from fedkeep.rounds.run_settings import Defense
from fedkeep.rounds.state import SimulationState

FORGIVEN = 0.25
"""What an accepted reply takes off a client's number of refused ones."""
MAX_DOUBLINGS = 4
"""How often the rounds are doubled for which a client is not drawn."""


@dataclass
class Refusals:
    """What is kept of refused replies.

    ``times``: By client, the rounds in which a reply was refused, less `FORGIVEN` for each in which one was accepted.
    ``backoffs``: By client, for how many rounds it is not drawn, after a reply that the loss check refused.
    ``rounds_in_a_row``: Rounds in a row in which all replies were refused.
    """

    times: dict[str, float] = field(default_factory=dict)
    backoffs: dict[str, int] = field(default_factory=dict)
    rounds_in_a_row: int = 0

    def rounds_aside(self, client: str, defense: Defense) -> float:
        """Return for how many more rounds a client is not asked; infinity if it is set aside for good."""
        for_good = 0 < defense.refusals <= self.times.get(client, 0)
        return inf if for_good else self.backoffs.get(client, 0)


class Standing(ReplyStep):
    """Counts the refused replies of each client. If no reply could be used, the fault may be the model's."""

    kept: Refusals

    def __init__(self) -> None:
        self.kept = Refusals()

    def allows_partial_aggregation(self, state: SimulationState) -> bool:
        return True

    def set_aside(self, state: SimulationState) -> dict[str, str]:
        found = {}
        for client in {**self.kept.times, **self.kept.backoffs}:
            if rounds := self.kept.rounds_aside(client, state.settings.defense):
                more = " any more" if rounds == inf else f" for {rounds} more {'round' if rounds == 1 else 'rounds'}"
                found[client] = f"is not asked{more}, since its replies were refused"
        return found

    def begin_round(self, state: SimulationState, number: int) -> None:
        if begins_task(state, number):
            self.kept.backoffs = {}

    def record(self, round: Round) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if round.refused:
            found["refused"] = list(round.refused)
            special = {c: fault.kind for c, fault in round.refused.items() if fault.kind is not FaultKind.REFUSED}
            found |= {"faults": special} if special else {}
        if aside := list(self.set_aside(round.state)):
            found["set_aside"] = aside
        return found

    def end_round(self, round: Round, record: Mapping[str, Any]) -> None:
        kept, useful = self.kept, round.answered - round.refused.keys()
        kept.rounds_in_a_row = kept.rounds_in_a_row + 1 if round.refused and not useful else 0
        kept.backoffs = {client: rounds - 1 for client, rounds in kept.backoffs.items() if rounds > 1}
        for client in useful & kept.times.keys():
            kept.times[client] -= FORGIVEN
            if kept.times[client] <= 0:
                del kept.times[client]
        for client, fault in round.refused.items() if useful else ():
            kept.times[client] = times = kept.times.get(client, 0.0) + 1
            if fault.kind is FaultKind.LOSS and (rounds := round.state.settings.defense.backoff):
                kept.backoffs[client] = rounds * 2 ** min(int(times) - 1, MAX_DOUBLINGS)

    def reason_to_stop(self, state: SimulationState) -> str:
        if not 0 < state.settings.defense.refused_rounds <= self.kept.rounds_in_a_row:
            return ""
        return (
            f"no reply of the last {self.kept.rounds_in_a_row} rounds could be used, so that they changed nothing. The "
            f"model is that of round {state.finished - self.kept.rounds_in_a_row}; the replies that made it, or its "
            "learning rate, are the likely cause."
        )
