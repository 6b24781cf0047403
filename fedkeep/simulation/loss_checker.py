"""The check of losses in a round: who measures, what is remembered, and which models are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import median_low
from typing import Any, Protocol

import torch
from torch import Tensor

from fedkeep.interface import Data, Fit
from fedkeep.interface.steps import rise_of_loss, send_label_counts
from fedkeep.models import Weights
from fedkeep.simulation.loss_check import (
    CLIENTS_SLACK,
    FEWEST_KNOWN,
    LIKE_FALSE_LABELS,
    MAX_EXPLAINED_RESIDUAL,
    LogitRise,
    choose_checkers,
    deviation,
    fall_of_loss,
    false_label_likeness,
    largest_loss,
    logit_rise,
    smallest_fall,
    standardised_residual,
    suspected_deviation,
)
from fedkeep.simulation.messages import StepRequest, sent_model
from fedkeep.simulation.replies import UpdateSummary
from fedkeep.simulation.reply_store import load
from fedkeep.simulation.state import SimulationState
from fedkeep.training.context import Timer
from fedkeep.training.model_check import ClassScores, mean_of_labels
from fedkeep.training.party import LocalClient

logger = logging.getLogger(__name__)

RERUN_EXAMPLES = (0.1, 0.2)
"""Numbers of examples on which a re-run trains, as shares of the client's; the server repeats its images if it has
fewer. The second one follows where the first does not explain the training. On digits and Fashion-MNIST these two tell
what a quarter tells, all but 4 of 397 times; a tenth alone explains fewer of the honest trainings (see
docs/robustness.md)."""


@dataclass(frozen=True, eq=False)
class ReturnedModel:
    """A model that a client returned.

    ``request``: What the client was asked.
    ``reply``: Its reply.
    ``state_before``: Its state before, or `fedkeep.simulation.rounds.LOST` if it had none.
    ``update``: How far the model moved, if replies are compared.
    """

    request: StepRequest
    reply: Fit
    state_before: Any
    update: UpdateSummary | None


@dataclass(frozen=True, eq=False)
class MeasuredModel:
    """A returned model, and how it answers the server's images.

    ``asked``: What its client was asked since its last training, in order.
    ``before``, ``after``: Of the model that the client was sent, and of the one that it returned.
    ``counts``: The client's label counts, [classes].
    """

    returned: ReturnedModel
    asked: Sequence[StepRequest]
    before: ClassScores
    after: ClassScores
    counts: Tensor

    @cached_property
    def fall(self) -> float | None:
        """By which share the training lowered the loss, if it can be told (see `fall_of_loss`)."""
        return fall_of_loss(self.before, self.after, self.counts)

    @cached_property
    def rise(self) -> LogitRise | None:
        """On which images logits rose, if it can be told (see `logit_rise`)."""
        return logit_rise(self.before, self.after, self.counts)


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

    ``label_counts``: Label counts that clients told in this round.
    ``loss_falls``, ``logit_excesses``, ``losses``: Of the models of this round whose losses did not rise (see
        `fedkeep.simulation.loss_check`).
    ``explained``: Number of trainings in this task that a re-run explained, of the clients of whom it explained one in
        this round.
    ``refused``: Clients whose models were refused.
    """

    def __init__(self, round: CheckedRound) -> None:
        self.round = round
        self.label_counts: dict[str, list[float]] = {}
        self.loss_falls: list[float] = []
        self.logit_excesses: list[float] = []
        self.losses: list[float] = []
        self.explained: dict[str, int] = {}
        self.refused: set[str] = set()
        self._asked: dict[str, list[StepRequest]] = {}

    def check(self, arrived: Sequence[ReturnedModel]) -> None:
        """Refuse models that their clients' own examples cannot have made, if the recipe lets somebody measure it.

        ``arrived``: Models that were asked for together.
        """
        round, defense, check = self.round, self.round.state.defense, self.round.state.server.check
        clients = [one.request.client for one in arrived if one.request.client not in round.lost]
        if defense.loss_check == "off" or not clients:
            return
        asked = {client: self._asked.pop(client, []) for client in clients}
        slack = defense.loss_slack * (1.0 if check else CLIENTS_SLACK)
        counts = self._ask_label_counts(clients if check else [*clients, *round.cohort])
        measured: list[MeasuredModel] = []
        for one in arrived:
            client, sent = one.request.client, sent_model(one.request, one.reply.model)
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
                    measured.append(MeasuredModel(one, asked[client], before, after, counts[client]))
            else:
                checkers = choose_checkers(client, round.cohort, counts)
                told = round.ask_builtin(rise_of_loss, checkers, sent, model, counts[client])
                change = median_low(told.values()) if told else 0.0
            if not change <= slack:
                self._refuse(one, f"a model whose loss on the classes that it holds rose by {change:.3g}")
        self.compare_learning(measured)

    def _ruins(self, one: ReturnedModel, before: ClassScores, after: ClassScores) -> bool:
        """Refuse a model that answers worse than any training can leave it; otherwise remember its loss."""
        loss, known = float(after.loss.nanmean()), [*self.round.state.history.losses, *self.losses]
        limit = largest_loss(known)
        if loss > max(limit, float(before.loss.nanmean())):
            self._refuse(one, f"a model that is ruined: its mean loss over all classes is {loss:.3g}, not {limit:.3g}")
            return True
        self.losses.append(loss)
        return False

    def compare_learning(self, measured: Sequence[MeasuredModel]) -> None:
        """Refuse models that learned less, or more from images of other classes, than the last models did."""
        history, limit = self.round.state.history, self.round.state.defense.logit_deviations
        self.loss_falls += [one.fall for one in measured if one.fall is not None]
        self.logit_excesses += [one.rise.excess for one in measured if one.rise is not None]
        least = smallest_fall([*history.loss_falls, *self.loss_falls])
        known = [*history.logit_excesses, *self.logit_excesses]
        for one in measured:
            if one.fall is not None and one.fall < least:
                self._refuse(
                    one.returned,
                    f"a model that learned nothing: its loss fell by {one.fall:.1%}, others' by {10 * least:.0%}",
                )
            if one.rise is None:
                continue
            client = one.returned.request.client
            deviates = deviation(one.rise, known)
            explained = self.explained.get(client, history.explained.get(client, 0))
            stands_out = deviates > suspected_deviation(explained, limit) or len(known) < FEWEST_KNOWN
            if client in self.round.lost or not (stands_out or client in history.refused):
                continue
            found = self._false_label_likeness(one, one.rise)
            if found is not None and found <= LIKE_FALSE_LABELS:
                self.explained[client] = explained + 1
            elif found is not None or deviates > limit:
                by_rerun = (
                    f"its excess is {found:.1%} of the way from a re-run on true labels to one on false labels, and "
                    f"{LIKE_FALSE_LABELS:.1%} are allowed"
                    if found is not None
                    else f"it cannot be re-run, so that {limit:.2g} deviations are allowed"
                )
                usual = f", {deviates:.2g} deviations above the usual" if len(known) >= FEWEST_KNOWN else ""
                self._refuse(
                    one.returned,
                    f"a model that learned a class from images of another: its logit rose by {one.rise.excess:.3g} "
                    f"more on them{usual}; {by_rerun}",
                )

    def _refuse(self, one: ReturnedModel, fault: str) -> None:
        self.refused.add(one.request.client)
        self.round.refuse(one, fault)

    def asked(self, request: StepRequest) -> None:
        """Remember what a client was asked, and answered, so that the server can do the same on its own images."""
        defense = self.round.state.defense
        if defense.loss_check == "server" and defense.logit_deviations:
            self._asked.setdefault(request.client, []).append(request)

    def rerun(self, requests: Sequence[StepRequest], data: Data) -> Weights | None:
        """Carry out a client's steps on the server's own images.

        ``requests``: What the client was asked since its last training, in order.
        Returns: The model that the last step trained; None if the steps cannot be carried out without what the client
            alone has.
        """
        state, reply = self.round.state, None
        context = replace(state.context_of(requests[-1].client), timer=Timer())  # no client has trained
        client_state, uses = state.client_state_type(), dict[str, int]()
        try:
            for request in requests:
                task, number = request.task, request.round
                client = LocalClient(context, request.client, data, client_state, task=task, round=number, uses=uses)
                reply = request.step(client, *request.args, **request.kwargs)
                client_state = client.state
        except torch.cuda.OutOfMemoryError:  # says nothing of the client
            raise
        except Exception as error:  # steps of any method, with data and a state that it does not expect
            logger.info("client %s: its training cannot be re-run: %s", requests[-1].client, error)
            return None
        return reply.model if isinstance(reply, Fit) else None

    def _false_label_likeness(self, one: MeasuredModel, rise: LogitRise) -> float | None:
        """Return how far a training is on the way to one on false labels, by re-runs (see `false_label_likeness`).

        Returns: 0 if a re-run with true labels explains it; None if there can be no re-run.
        """
        if (check := self.round.state.server.check) is None:
            return None
        held = self.round.state.federation.num_examples(one.returned.request.client)
        # Counts with noise, or of replies that nobody checks, may be of far more examples than would fit into memory.
        told = one.counts.clamp(min=0).double()
        believed = (told * min(1.0, held / max(float(told.sum()), 1.0))).to(one.counts)
        for share in RERUN_EXAMPLES:
            counts = (believed * share).ceil()
            if (model := self.rerun(one.asked, check.examples_like(counts))) is None:
                continue  # batch norm cannot train on a single image, and a fifth may be two
            rerun = check.scores(model)
            if standardised_residual(rise.label, one.before, one.after, rerun, one.counts) <= MAX_EXPLAINED_RESIDUAL:
                return 0.0
        if model is None:
            return None
        counts[rise.other] += counts[rise.label]
        counts[rise.label] = 0
        data = check.examples_like(counts)
        data = {**data, "label": data["label"].masked_fill(data["label"] == rise.other, rise.label)}
        if (model := self.rerun(one.asked, data)) is None:
            return None
        return false_label_likeness(rise, one.before, one.after, rerun, check.scores(model))

    def _ask_label_counts(self, clients: Sequence[str]) -> dict[str, Tensor]:
        """Return label counts by client; those that have not told theirs in this task are asked."""
        known = self.round.state.history.label_counts | self.label_counts
        if unknown := [client for client in dict.fromkeys(clients) if client not in known]:
            told = self.round.ask_builtin(send_label_counts, unknown)
            self.label_counts |= {client: counts.tolist() for client, counts in told.items()}
            known |= self.label_counts
        return {client: torch.tensor(known[client]) for client in dict.fromkeys(clients) if client in known}
