"""The loss check: how far a client's model is from re-runs of its training on the server's own images.

Clients differ, and forget what they lack: a loss or a logit alone tells no attacker from an honest client. But a re-run
starts from the same model, with the same teachers, loss and number of steps, on images of the same classes: what honest
training does to the model, to own and other classes alike, the re-run does too, nearly. How nearly, two re-runs on
different images show.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from fedkeep.interface import Data, Fit
from fedkeep.interface.steps import rise_of_loss, send_label_counts
from fedkeep.models import Weights
from fedkeep.rounds.messages import Fault, FaultKind, StepRequest, refused
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round, begins_task
from fedkeep.rounds.reply_store import load
from fedkeep.rounds.state import SimulationState
from fedkeep.training.context import Timer
from fedkeep.training.model_check import ClassScores, ModelCheck, mean_of_labels
from fedkeep.training.party import LocalClient
from fedkeep.trust.updates import UpdateSummary, summary_of

logger = logging.getLogger(__name__)

CHECKERS = 3
"""Number of clients that measure a model, so that one liar among them decides nothing."""
CLIENTS_SLACK = 5.0
"""How much more of a rise clients allow than the server: they measure on few examples, on which they have trained."""
LITTLE, SHARE = 0.05, 0.2
"""A difference that is never held against a client, in logits and nats, and as a share of what the re-runs changed."""
OWN_FACTOR, OWN_SHARE = 2.5, 0.4
"""How much more the answers of own outputs count, and the share of their own: honest clients differ less in them."""


def distance(before: ClassScores, after: ClassScores, one: ClassScores, other: ClassScores, counts: Tensor) -> float:
    """Return how far a client's model is from two re-runs, beside what is allowed to an honest one.

    That is how far the re-runs are from each other, and a share of what they changed. What differs is the mean logits
    of each class, and its mean loss; a model whose loss is smaller is not farther. Or it is only which images the
    outputs of the client's own classes answer, which false labels change: the larger distance counts.
    ``counts``: The client's label counts, [classes].
    """
    logits, loss = (one.mean_logits + other.mean_logits) / 2, (one.loss + other.loss) / 2
    apart, chance, change = after.mean_logits - logits, one.mean_logits - other.mean_logits, logits - before.mean_logits
    whole = (_size(apart) + _size((after.loss - loss).clamp(min=0))) / (
        _size(chance) + _size(one.loss - other.loss) + SHARE * (_size(change) + _size(loss - before.loss)) + LITTLE
    )
    own = [_size(_answers(difference)[:, counts > 0]) for difference in (apart, chance, change)]
    return max(whole, OWN_FACTOR * own[0] / (own[1] + OWN_SHARE * own[2] + LITTLE))


def _size(difference: Tensor) -> float:
    """Return the root mean square over the classes that were measured."""
    return float(difference[difference.isfinite()].double().square().mean().nan_to_num().sqrt())


def _answers(logits: Tensor) -> Tensor:
    """Return mean logits less each output's mean over the classes: a bias, which honest clients move very unequally."""
    return logits - logits.nanmean(0)


def choose_checkers(client: str, cohort: Sequence[str], counts: Mapping[str, Tensor]) -> list[str]:
    """Choose the clients that measure another one's model: the next in the cohort that hold some of its classes.

    ``counts``: Label counts by client, of those that can be asked.
    """
    start = cohort.index(client) if client in cohort else 0
    following = [name for name in (*cohort[start + 1 :], *cohort[:start]) if name != client and name in counts]
    return [name for name in following if bool((counts[name] * counts[client] > 0).any())][:CHECKERS]


@dataclass
class LabelCounts:
    """What is kept: ``by_client``, its examples of each class in this task, as it once told."""

    by_client: dict[str, list[float]] = field(default_factory=dict)


class LossCheck(ReplyStep):
    """Lets the server re-run trainings, or other clients measure models, and refuses those that cannot be right."""

    kept: LabelCounts

    def __init__(self) -> None:
        self.kept = LabelCounts()
        self._told: dict[str, list[float]] = {}  # in this round
        self._asked: dict[str, list[StepRequest]] = {}

    def applies(self, state: SimulationState) -> bool:
        return state.settings.defense.loss_check != "off"

    def begin_round(self, state: SimulationState, number: int) -> None:
        self._told, self._asked = {}, {}
        if begins_task(state, number):
            self.kept.by_client = {}

    def arrived(self, round: Round, reply: Reply) -> None:
        """Remember what a client was asked, and answered, so that the server can do the same on its own images."""
        if reply.fault is None and round.state.settings.defense.loss_check == "server":
            self._asked.setdefault(reply.client, []).append(reply.request)

    def end_round(self, round: Round, record: Mapping[str, Any]) -> None:
        self.kept.by_client |= self._told

    def screen(self, round: Round, replies: Sequence[Reply]) -> Iterable[tuple[Reply, Fault]]:
        """Refuse models that their clients' own examples cannot have made."""
        arrived = [(reply, update) for reply in replies if (update := summary_of(reply)) is not None]
        clients = [reply.client for reply, _ in arrived]
        if not clients:
            return
        asked = {client: self._asked.pop(client, []) for client in clients}
        counts = self._ask_label_counts(round, clients if round.state.server.check else [*clients, *round.cohort])
        for reply, update in arrived:
            if reply.client in round.lost or reply.sent is None:
                continue
            if found := self._find_fault(round, reply, reply.sent, update, asked[reply.client], counts):
                yield reply, refused(found, FaultKind.LOSS)

    def _find_fault(
        self,
        round: Round,
        reply: Reply,
        sent: Weights,
        update: UpdateSummary,
        asked: Sequence[StepRequest],
        counts: dict[str, Tensor],
    ) -> str:
        """Return what is wrong with a model, after "answered with"; empty if nothing is."""
        client, model = reply.client, load(reply.value.model)
        defense, check = round.state.settings.defense, round.state.server.check
        if not counts[client].any():
            changed = update.parameter_change or update.buffer_change
            return "a model that changed, though it says that it holds no examples" if changed else ""
        slack = defense.loss_slack
        if check:
            if reruns := self._reruns(round.state, check, client, asked, counts[client]):
                before, after, one, other = map(check.scores, (sent, model, *reruns))
                found, limit = distance(before, after, one, other, counts[client]), defense.rerun_distance
                return "" if found <= limit else f"a model unlike re-runs: its distance is {found:.3g}, not {limit:.3g}"
            rise = mean_of_labels(check.scores(model).loss - check.scores(sent).loss, counts[client]) or 0.0
        else:
            slack *= CLIENTS_SLACK
            checkers = choose_checkers(client, round.cohort, counts)
            told = round.ask_builtin(rise_of_loss, checkers, sent, model, counts[client])
            rise = median_low(told.values()) if told else 0.0
        return "" if rise <= slack else f"a model whose loss on the classes that it holds rose by {rise:.3g}"

    def _reruns(
        self,
        state: SimulationState,
        check: ModelCheck,
        client: str,
        requests: Sequence[StepRequest],
        counts: Tensor,
    ) -> tuple[Weights, Weights] | None:
        """Return what a client's steps make of either half of the server's own images; None if that cannot be."""
        # Counts with noise, or of replies that nobody checks, may be of far more examples than would fit into memory.
        held, told = state.federation.num_examples(client), counts.clamp(min=0).double()
        believed = (told * min(1.0, held / max(float(told.sum()), 1.0))).ceil()
        one, other = (self.rerun(state, requests, check.examples_like(believed, half)) for half in (0, 1))
        return None if one is None or other is None else (one, other)

    def rerun(self, state: SimulationState, requests: Sequence[StepRequest], data: Data) -> Weights | None:
        """Carry out a client's steps on the server's own images.

        ``requests``: What the client was asked since its last training, in order.
        ``data``: The images, in the place of the client's.
        """
        if not len(data["label"]):
            return None
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

    def _ask_label_counts(self, round: Round, clients: Sequence[str]) -> dict[str, Tensor]:
        """Return label counts by client; those that have not told theirs in this task are asked."""
        known = self.kept.by_client | self._told
        if unknown := [client for client in dict.fromkeys(clients) if client not in known]:
            told = round.ask_builtin(send_label_counts, unknown)
            self._told |= {client: counts.tolist() for client, counts in told.items()}
            known |= self._told
        return {client: torch.tensor(known[client]) for client in dict.fromkeys(clients) if client in known}
