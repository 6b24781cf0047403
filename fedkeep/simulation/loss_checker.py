"""The check of losses in a round: who measures, what is remembered, and which models are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median_low
from typing import Any, Protocol

import torch
from torch import Tensor

from fedkeep.interface import Fit
from fedkeep.interface.steps import rise_of_loss, send_label_counts
from fedkeep.simulation.loss_check import (
    CLIENTS_SLACK,
    DECISION,
    TAUGHT,
    LogitRise,
    add_deviation,
    choose_checkers,
    deviation,
    fall_of_loss,
    largest_loss,
    logit_rise,
    smallest_fall,
)
from fedkeep.simulation.messages import StepRequest, sent_model
from fedkeep.simulation.replies import UpdateSummary
from fedkeep.simulation.reply_store import load
from fedkeep.simulation.state import SimulationState
from fedkeep.training.model_check import ClassScores, mean_of_labels


@dataclass(frozen=True, eq=False)
class ReturnedModel:
    """A model that a client returned.

    Attributes
    ----------
    request : StepRequest
        What the client was asked.
    reply : Fit
        Its reply.
    state_before : object
        Its state before, or `fedkeep.simulation.rounds.LOST` if it had none.
    update : UpdateSummary or None
        How far the model moved, if replies are compared.
    """

    request: StepRequest
    reply: Fit
    state_before: Any
    update: UpdateSummary | None


class CheckedRound(Protocol):
    """What a `LossChecker` needs of the round."""

    state: SimulationState
    cohort: list[str]
    lost: dict[str, str]

    def ask_builtin(self, step: Callable[..., Any], clients: Sequence[str], *args: Any) -> dict[str, Any]:
        """Ask clients for a step that every method has, and return the replies of those that are not lost."""

    def refuse(self, one: ReturnedModel, fault: str) -> None:
        """Refuse a reply that had arrived."""


class LossChecker:
    """Lets the server, or other clients, measure the models of a round, and refuses those that cannot be right.

    Parameters
    ----------
    round : CheckedRound
        The round.

    Attributes
    ----------
    label_counts : dict[str, list[float]]
        Label counts that clients told in this round.
    loss_falls, logit_excesses, losses : list[float]
        Of the models of this round whose losses did not rise (see `fedkeep.simulation.loss_check`).
    class_excesses : list[tuple[int, str, float]]
        Classes, the clients whose models were measured, and the excesses.
    deviations : dict[str, float]
        Cumulative sums of the clients whose models were measured in this round.
    """

    def __init__(self, round: CheckedRound) -> None:
        self.round = round
        self.label_counts: dict[str, list[float]] = {}
        self.loss_falls: list[float] = []
        self.logit_excesses: list[float] = []
        self.losses: list[float] = []
        self.class_excesses: list[tuple[int, str, float]] = []
        self.deviations: dict[str, float] = {}

    def check(self, arrived: Sequence[ReturnedModel]) -> None:
        """Refuse models that their clients' own examples cannot have made, if the recipe lets somebody measure it.

        Parameters
        ----------
        arrived : Sequence[ReturnedModel]
            Models that were asked for together.
        """
        round, defense, check = self.round, self.round.state.defense, self.round.state.server.check
        clients = [one.request.client for one in arrived if one.request.client not in round.lost]
        if defense.loss_check == "off" or not clients:
            return
        slack = defense.loss_slack * (1.0 if check else CLIENTS_SLACK)
        counts = self._ask_label_counts(clients if check else [*clients, *round.cohort])
        learned: list[tuple[ReturnedModel, float | None, LogitRise | None]] = []
        for one in arrived:
            client, sent = one.request.client, sent_model(one.request, one.reply)
            if client in round.lost or sent is None or one.update is None:
                continue
            model = load(one.reply.model)
            if not counts[client].any():  # nothing to learn from, so nothing may have changed
                change = inf if one.update.parameter_change or one.update.buffer_change else 0.0
            elif check:
                before, after = check.scores(sent), check.scores(model)
                change = mean_of_labels(after.loss - before.loss, counts[client]) or 0.0
                if change <= slack and self._ruins(one, before, after):
                    continue
                if change <= slack and defense.logit_deviations:
                    scores = before, after, counts[client]
                    learned.append((one, fall_of_loss(*scores), logit_rise(*scores)))
            else:
                checkers = choose_checkers(client, round.cohort, counts)
                told = round.ask_builtin(rise_of_loss, checkers, sent, model, counts[client])
                change = median_low(told.values()) if told else 0.0
            if not change <= slack:
                self.round.refuse(one, f"a model whose loss on the classes that it holds rose by {change:.3g}")
        self.compare_learning(learned)

    def _ruins(self, one: ReturnedModel, before: ClassScores, after: ClassScores) -> bool:
        """Refuse a model that answers worse than any training can leave it; otherwise remember its loss."""
        loss, known = float(after.loss.nanmean()), [*self.round.state.history.losses, *self.losses]
        limit = largest_loss(known)
        if loss > max(limit, float(before.loss.nanmean())):
            self.round.refuse(
                one, f"a model that is ruined: its mean loss over all classes is {loss:.3g}, not {limit:.3g}"
            )
            return True
        self.losses.append(loss)
        return False

    def compare_learning(self, learned: Sequence[tuple[ReturnedModel, float | None, LogitRise | None]]) -> None:
        """Refuse models that learned less, or more from images of other classes, than the last models did.

        Parameters
        ----------
        learned : Sequence[tuple[ReturnedModel, float or None, LogitRise or None]]
            Models, with the falls of their loss and the rises of their logits.
        """
        self.loss_falls += [fall for _, fall, _ in learned if fall is not None]
        self.logit_excesses += [rise.excess for _, _, rise in learned if rise is not None]
        least = smallest_fall([*self.round.state.history.loss_falls, *self.loss_falls])
        history = self.round.state.history
        known = [*history.logit_excesses, *self.logit_excesses]
        self.class_excesses += [
            (label, one.request.client, excess)
            for one, _, rise in learned
            if rise is not None
            for label, excess in rise.excesses.items()
        ]
        limit = self.round.state.defense.logit_deviations
        for one, fall, rise in learned:
            taught = fall is not None and fall >= TAUGHT
            deviates = 0.0
            if rise is not None and not taught:
                others = history.excesses_of(rise.label, one.request.client, self.class_excesses)
                deviates = deviation(rise, known, others)
            total = self._add(one.request.client, deviates, limit) if rise is not None else 0.0
            if fall is not None and fall < least:
                self.round.refuse(
                    one, f"a model that learned nothing: its loss fell by {fall:.1%}, others' by {10 * least:.0%}"
                )
            elif rise is not None and (deviates > limit or total > DECISION * limit):
                self.round.refuse(
                    one,
                    f"a model that learned a class from images of another: its logit rose by {rise.excess:.3g} more on "
                    f"them, {deviates:.2g} deviations above the usual; {limit:.2g} are allowed in one training. The "
                    f"client's sum over trainings is {total:.2g}, where {DECISION * limit:.2g} are allowed",
                )

    def _add(self, client: str, deviation: float, limit: float) -> float:
        """Add to a client's cumulative sum, and return it."""
        before = self.deviations.get(client, self.round.state.history.deviations.get(client, 0.0))
        self.deviations[client] = add_deviation(before, deviation, limit)
        return self.deviations[client]

    def _ask_label_counts(self, clients: Sequence[str]) -> dict[str, Tensor]:
        """Return label counts by client; those that have not told theirs in this task are asked."""
        known = self.round.state.history.label_counts | self.label_counts
        if unknown := [client for client in dict.fromkeys(clients) if client not in known]:
            told = self.round.ask_builtin(send_label_counts, unknown)
            self.label_counts |= {client: counts.tolist() for client, counts in told.items()}
            known |= self.label_counts
        return {client: torch.tensor(known[client]) for client in dict.fromkeys(clients) if client in known}
