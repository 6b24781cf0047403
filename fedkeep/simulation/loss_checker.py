"""The loss check in a round: who measures, what is remembered, and which models are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, Protocol

import torch
from torch import Tensor

from fedkeep.interface import Data, Fit
from fedkeep.interface.steps import rise_of_loss, send_label_counts
from fedkeep.models import Weights
from fedkeep.simulation.loss_check import CLIENTS_SLACK, choose_checkers, distance
from fedkeep.simulation.messages import StepRequest, sent_model
from fedkeep.simulation.replies import UpdateSummary
from fedkeep.simulation.reply_store import load
from fedkeep.simulation.state import SimulationState
from fedkeep.training.context import Timer
from fedkeep.training.model_check import ModelCheck, mean_of_labels
from fedkeep.training.party import LocalClient

logger = logging.getLogger(__name__)


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
    ``refused``: Clients whose models were refused.
    """

    def __init__(self, round: CheckedRound) -> None:
        self.round = round
        self.label_counts: dict[str, list[float]] = {}
        self.refused: set[str] = set()
        self._asked: dict[str, list[StepRequest]] = {}

    def check(self, arrived: Sequence[ReturnedModel]) -> None:
        """Refuse models that their clients' own examples cannot have made, if the recipe lets somebody measure it."""
        round, defense, check = self.round, self.round.state.defense, self.round.state.server.check
        clients = [one.request.client for one in arrived if one.request.client not in round.lost]
        if defense.loss_check == "off" or not clients:
            return
        asked = {client: self._asked.pop(client, []) for client in clients}
        counts = self._ask_label_counts(clients if check else [*clients, *round.cohort])
        for one in arrived:
            client, sent = one.request.client, sent_model(one.request, one.reply.model)
            if client in round.lost or sent is None or one.update is None:
                continue
            if fault := self._fault(one, one.update, load(one.reply.model), sent, asked[client], counts):
                self.refused.add(client)
                round.refuse(one, fault)

    def _fault(
        self,
        one: ReturnedModel,
        update: UpdateSummary,
        model: Weights,
        sent: Weights,
        asked: Sequence[StepRequest],
        counts: dict[str, Tensor],
    ) -> str:
        """Return what is wrong with a model, after "answered with"; empty if nothing is."""
        defense, check, client = self.round.state.defense, self.round.state.server.check, one.request.client
        if not counts[client].any():
            changed = update.parameter_change or update.buffer_change
            return "a model that changed, though it says that it holds no examples" if changed else ""
        slack = defense.loss_slack
        if check:
            if reruns := self._reruns(check, client, asked, counts[client]):
                found = distance(check.scores(model), *map(check.scores, reruns))
                limit = defense.rerun_distance
                return "" if found <= limit else f"a model unlike re-runs: its distance is {found:.3g}, not {limit:.3g}"
            rise = mean_of_labels(check.scores(model).loss - check.scores(sent).loss, counts[client]) or 0.0
        else:
            slack *= CLIENTS_SLACK
            checkers = choose_checkers(client, self.round.cohort, counts)
            told = self.round.ask_builtin(rise_of_loss, checkers, sent, model, counts[client])
            rise = median_low(told.values()) if told else 0.0
        return "" if rise <= slack else f"a model whose loss on the classes that it holds rose by {rise:.3g}"

    def asked(self, request: StepRequest) -> None:
        """Remember what a client was asked, and answered, so that the server can do the same on its own images."""
        if self.round.state.defense.loss_check == "server":
            self._asked.setdefault(request.client, []).append(request)

    def _reruns(
        self, check: ModelCheck, client: str, requests: Sequence[StepRequest], counts: Tensor
    ) -> tuple[Weights, Weights] | None:
        """Return what a client's steps make of either half of the server's own images; None if that cannot be."""
        # Counts with noise, or of replies that nobody checks, may be of far more examples than would fit into memory.
        held, told = self.round.state.federation.num_examples(client), counts.clamp(min=0).double()
        believed = (told * min(1.0, held / max(float(told.sum()), 1.0))).ceil()
        one, other = (self.rerun(requests, check.examples_like(believed, half)) for half in (0, 1))
        return None if one is None or other is None else (one, other)

    def rerun(self, requests: Sequence[StepRequest], data: Data) -> Weights | None:
        """Carry out a client's steps on the server's own images.

        ``requests``: What the client was asked since its last training, in order.
        ``data``: The images, in the place of the client's.
        """
        state, reply = self.round.state, None
        if not len(data["label"]):
            return None
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

    def _ask_label_counts(self, clients: Sequence[str]) -> dict[str, Tensor]:
        """Return label counts by client; those that have not told theirs in this task are asked."""
        known = self.round.state.history.label_counts | self.label_counts
        if unknown := [client for client in dict.fromkeys(clients) if client not in known]:
            told = self.round.ask_builtin(send_label_counts, unknown)
            self.label_counts |= {client: counts.tolist() for client, counts in told.items()}
            known |= self.label_counts
        return {client: torch.tensor(known[client]) for client in dict.fromkeys(clients) if client in known}
