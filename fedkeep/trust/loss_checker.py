"""The check of losses in a round: who measures, what is remembered, and which models are refused."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from fedkeep.interface import Data, Fit
from fedkeep.interface.steps import rise_of_loss, send_label_counts
from fedkeep.models import Weights
from fedkeep.rounds.defense import HISTORY_LENGTH
from fedkeep.rounds.messages import Fault, FaultKind, StepRequest, refused
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round, begins_task
from fedkeep.rounds.reply_store import load
from fedkeep.rounds.state import SimulationState
from fedkeep.training.context import Timer
from fedkeep.training.model_check import ClassScores, mean_of_labels
from fedkeep.training.party import LocalClient
from fedkeep.trust.loss_check import (
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
from fedkeep.trust.standing import Standing
from fedkeep.trust.updates import summary_of

logger = logging.getLogger(__name__)

RERUN_EXAMPLES = (0.1, 0.2)
"""Numbers of examples on which a re-run trains, as shares of the client's; the server repeats its images if it has
fewer. The second one follows where the first does not explain the training. On digits and Fashion-MNIST these two tell
what a quarter tells, all but 4 of 397 times; a tenth alone explains fewer of the honest trainings (see
docs/robustness.md)."""


@dataclass
class Measurements:
    """What is kept of the models that were measured.

    ``label_counts``: By client, its examples of each class in this task, as it once told.
    ``loss_falls``, ``logit_excesses``, ``losses``: Of the last models whose losses did not rise (see
        `fedkeep.trust.loss_check`).
    ``explained``: By client, the number of its trainings in this task that a re-run explained.
    """

    label_counts: dict[str, list[float]] = field(default_factory=dict)
    loss_falls: list[float] = field(default_factory=list)
    logit_excesses: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    explained: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class MeasuredModel:
    """A returned model, and how it answers the server's images.

    ``asked``: What its client was asked since its last training, in order.
    ``before``, ``after``: Of the model that the client was sent, and of the one that it returned.
    ``counts``: The client's label counts, [classes].
    """

    returned: Reply
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


def fault(answer: str) -> Fault:
    """Return the fault of a client whose model the loss check refuses."""
    return refused(answer, FaultKind.LOSS)


class LossCheck(ReplyStep):
    """Lets the server, or other clients, measure the models of a round, and refuses those that cannot be right."""

    kept: Measurements

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        self.kept = Measurements()
        self.new = Measurements()  # of this round
        self._asked: dict[str, list[StepRequest]] = {}

    def applies(self, state: SimulationState) -> bool:
        return state.settings.defense.loss_check != "off"

    def begin_round(self, state: SimulationState, number: int) -> None:
        self.new, self._asked = Measurements(), {}
        if begins_task(state, number):
            self.kept.label_counts, self.kept.explained = {}, {}

    def arrived(self, round: Round, reply: Reply) -> None:
        """Remember what a client was asked, and answered, so that the server can do the same on its own images."""
        defense = round.state.settings.defense
        if reply.fault is None and defense.loss_check == "server" and defense.logit_deviations:
            self._asked.setdefault(reply.client, []).append(reply.request)

    def end_round(self, round: Round, record: Mapping[str, Any]) -> None:
        if begins_task(round.state, round.number):  # which the last task still judged: nothing else was known
            self.kept.loss_falls, self.kept.logit_excesses, self.kept.losses = [], [], []
        kept, new = self.kept, self.new
        kept.label_counts |= new.label_counts
        kept.explained |= new.explained
        kept.loss_falls = [*kept.loss_falls, *new.loss_falls][-HISTORY_LENGTH:]
        kept.logit_excesses = [*kept.logit_excesses, *new.logit_excesses][-HISTORY_LENGTH:]
        kept.losses = [*kept.losses, *new.losses][-HISTORY_LENGTH:]

    def screen(self, round: Round, replies: Sequence[Reply]) -> Iterable[tuple[Reply, Fault]]:
        """Refuse models that their clients' own examples cannot have made."""
        defense, check = round.state.settings.defense, round.state.server.check
        arrived = [reply for reply in replies if summary_of(reply) is not None]
        clients = [reply.client for reply in arrived]
        if not clients:
            return
        asked = {client: self._asked.pop(client, []) for client in clients}
        slack = defense.loss_slack * (1.0 if check else CLIENTS_SLACK)
        counts = self._ask_label_counts(round, clients if check else [*clients, *round.cohort])
        measured: list[MeasuredModel] = []
        for one in arrived:
            client, sent, update = one.client, one.sent, summary_of(one)
            if client in round.lost or sent is None or update is None:
                continue
            model = load(one.value.model)
            if not counts[client].any():  # nothing to learn from, so nothing may have changed
                change = inf if update.parameter_change or update.buffer_change else 0.0
            elif check:
                before, after = check.scores(sent), check.scores(model)
                change = mean_of_labels(after.loss - before.loss, counts[client]) or 0.0
                if change <= slack and (ruined := self._ruins(before, after)):
                    yield one, ruined
                    continue
                if change <= slack and defense.logit_deviations:
                    measured.append(MeasuredModel(one, asked[client], before, after, counts[client]))
            else:
                checkers = choose_checkers(client, round.cohort, counts)
                told = round.ask_builtin(rise_of_loss, checkers, sent, model, counts[client])
                change = median_low(told.values()) if told else 0.0
            if not change <= slack:
                yield one, fault(f"a model whose loss on the classes that it holds rose by {change:.3g}")
        yield from self.compare_learning(round, measured)

    def _ruins(self, before: ClassScores, after: ClassScores) -> Fault | None:
        """Return what is wrong with a model that answers worse than any training leaves it; else remember its loss."""
        loss, limit = float(after.loss.nanmean()), largest_loss([*self.kept.losses, *self.new.losses])
        if loss > max(limit, float(before.loss.nanmean())):
            return fault(f"a model that is ruined: its mean loss over all classes is {loss:.3g}, not {limit:.3g}")
        self.new.losses.append(loss)
        return None

    def compare_learning(self, round: Round, measured: Sequence[MeasuredModel]) -> Iterable[tuple[Reply, Fault]]:
        """Refuse models that learned less, or more from images of other classes, than the last models did."""
        limit, kept, new = round.state.settings.defense.logit_deviations, self.kept, self.new
        new.loss_falls += [one.fall for one in measured if one.fall is not None]
        new.logit_excesses += [one.rise.excess for one in measured if one.rise is not None]
        least = smallest_fall([*kept.loss_falls, *new.loss_falls])
        known = [*kept.logit_excesses, *new.logit_excesses]
        for one in measured:
            if one.fall is not None and one.fall < least:
                text = f"a model that learned nothing: its loss fell by {one.fall:.1%}, others' by {10 * least:.0%}"
                yield one.returned, fault(text)
            if one.rise is None:
                continue
            client = one.returned.client
            deviates = deviation(one.rise, known)
            explained = new.explained.get(client, kept.explained.get(client, 0))
            stands_out = deviates > suspected_deviation(explained, limit) or len(known) < FEWEST_KNOWN
            if client in round.lost or not (stands_out or client in self.standing.kept.times):
                continue
            found = self._false_label_likeness(round, one, one.rise)
            if found is not None and found <= LIKE_FALSE_LABELS:
                new.explained[client] = explained + 1
            elif found is not None or deviates > limit:
                by_rerun = (
                    f"its excess is {found:.1%} of the way from a re-run on true labels to one on false labels, and "
                    f"{LIKE_FALSE_LABELS:.1%} are allowed"
                    if found is not None
                    else f"it cannot be re-run, so that {limit:.2g} deviations are allowed"
                )
                usual = f", {deviates:.2g} deviations above the usual" if len(known) >= FEWEST_KNOWN else ""
                yield (
                    one.returned,
                    fault(
                        "a model that learned a class from images of another: its logit rose by "
                        f"{one.rise.excess:.3g} more on them{usual}; {by_rerun}"
                    ),
                )

    def rerun(self, state: SimulationState, requests: Sequence[StepRequest], data: Data) -> Weights | None:
        """Carry out a client's steps on the server's own images."""
        reply = None
        context = replace(state.context_of(requests[-1].client), timer=Timer())  # no client has trained
        client_state, uses = state.client_states.type(), dict[str, int]()
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

    def _false_label_likeness(self, round: Round, one: MeasuredModel, rise: LogitRise) -> float | None:
        """Return how far a training is on the way to one on false labels, by re-runs (see `false_label_likeness`)."""
        if (check := round.state.server.check) is None:
            return None
        held = round.state.federation.num_examples(one.returned.client)
        # Counts with noise, or of replies that nobody checks, may be of far more examples than would fit into memory.
        told = one.counts.clamp(min=0).double()
        believed = (told * min(1.0, held / max(float(told.sum()), 1.0))).to(one.counts)
        for share in RERUN_EXAMPLES:
            counts = (believed * share).ceil()
            if (model := self.rerun(round.state, one.asked, check.examples_like(counts))) is None:
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
        if (model := self.rerun(round.state, one.asked, data)) is None:
            return None
        return false_label_likeness(rise, one.before, one.after, rerun, check.scores(model))

    def _ask_label_counts(self, round: Round, clients: Sequence[str]) -> dict[str, Tensor]:
        """Return label counts by client; those that have not told theirs in this task are asked."""
        known = self.kept.label_counts | self.new.label_counts
        if unknown := [client for client in dict.fromkeys(clients) if client not in known]:
            told = round.ask_builtin(send_label_counts, unknown)
            self.new.label_counts |= {client: counts.tolist() for client, counts in told.items()}
            known |= self.new.label_counts
        return {client: torch.tensor(known[client]) for client in dict.fromkeys(clients) if client in known}
