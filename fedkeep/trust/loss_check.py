"""The loss check: a training lowers the loss on the classes that its client holds, or leaves it.

The server measures each model on its own examples of these classes, before and after. What a training does to other
classes says nothing: honest clients forget them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedkeep.interface.algorithm import send_label_counts
from fedkeep.rounds.messages import Fault, FaultKind, refused
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round, begins_task
from fedkeep.rounds.reply_store import load
from fedkeep.rounds.state import SimulationState
from fedkeep.training.evaluation import mean_of_labels
from fedkeep.trust.updates import summary_of


@dataclass
class LabelCounts:
    """What is kept: ``by_client``, its examples of each class in this task, as it once told."""

    by_client: dict[str, list[float]] = field(default_factory=dict)


class LossCheck(ReplyStep):
    """Refuses models whose loss on their clients' classes rose."""

    kept: LabelCounts

    def __init__(self) -> None:
        self.kept = LabelCounts()
        self._told: dict[str, list[float]] = {}  # in this round

    def applies(self, state: SimulationState) -> bool:
        return state.settings.defense.loss_check != "off"

    def begin_round(self, state: SimulationState, number: int) -> None:
        self._told = {}
        if begins_task(state, number):
            self.kept.by_client = {}

    def end_round(self, round: Round, record: Mapping[str, Any]) -> None:
        self.kept.by_client |= self._told

    def screen(self, round: Round, replies: Sequence[Reply]) -> Iterable[tuple[Reply, Fault]]:
        arrived = [reply for reply in replies if summary_of(reply) is not None]
        counts = self._ask_label_counts(round, [reply.client for reply in arrived]) if arrived else {}
        for reply in arrived:
            if reply.client not in round.lost and (found := _find_fault(round, reply, counts[reply.client])):
                yield reply, refused(found, FaultKind.LOSS)

    def _ask_label_counts(self, round: Round, clients: Sequence[str]) -> dict[str, Tensor]:
        """Return label counts by client; those that have not told theirs in this task are asked."""
        known = self.kept.by_client | self._told
        if unknown := [client for client in dict.fromkeys(clients) if client not in known]:
            told = round.ask_builtin(send_label_counts, unknown)
            self._told |= {client: counts.tolist() for client, counts in told.items()}
            known |= self._told
        return {client: torch.tensor(known[client]) for client in dict.fromkeys(clients) if client in known}


def _find_fault(round: Round, reply: Reply, counts: Tensor) -> str:
    """Return what is wrong with a model, after "answered with"; empty if nothing is."""
    check, update = round.state.server.check, summary_of(reply)
    if check is None or update is None or reply.sent is None:
        return ""
    if not counts.any() and not round.state.settings.privacy.counts_epsilon:
        changed = update.parameter_change or update.buffer_change
        return "a model that changed, though it says that it holds no examples" if changed else ""
    change = check.scores(load(reply.value.model)).loss - check.scores(reply.sent).loss
    if counts.any():
        rise = mean_of_labels(change, counts) or 0.0
    else:  # noise may have made zeros of the counts of a small client, which has improved on some class
        rise = min(change[~change.isnan()].tolist(), default=0.0)
    slack = round.state.settings.defense.loss_slack
    return f"a model whose loss on the classes that it holds rose by {rise:.3g}" if rise > slack else ""
