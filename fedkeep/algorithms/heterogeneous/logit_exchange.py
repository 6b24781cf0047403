"""What methods share whose clients send logits on common images instead of weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal

import torch
from torch import Tensor
from typing_extensions import TypeVar

from fedkeep.interface import Algorithm, Client, Cohort, Data, Server, on_client
from fedkeep.interface.party import Party
from fedkeep.losses import ZERO_LOSS, Loss
from fedkeep.models import Weights

Ensemble = Literal["prob", "logit"]
"""Whether the mean of models' predictions is one of probabilities, or of logits."""

MAX_LOGIT = 1e4
"""Larger logits are clipped. Softmaxes do not change, and one client's logits must not dominate a mean."""


@dataclass(frozen=True, eq=False)
class LogitReply:
    """A client's reply.

    ``logits``: Those of its model on all common images, [n, classes].
    """

    logits: Tensor


@dataclass
class PublicServerState:
    """What the server keeps.

    ``receivers``: The clients that have received the public images.
    """

    receivers: list[str] = field(default_factory=list)


@dataclass
class PublicClientState:
    """What a client keeps.

    ``model``: Its own model; empty before it is trained.
    ``public``: The public images.
    """

    model: Weights = field(default_factory=dict)
    public: Data = field(default_factory=dict)


K = TypeVar("K", bound=PublicClientState, default=PublicClientState)


@dataclass(frozen=True)
class LogitExchange(Algorithm[PublicServerState, K], Generic[K]):
    """Base of methods whose clients keep models of their own, which no other party has, and share public images."""

    networks = "any"
    handles_tasks = True  # clients keep their own models, and the public images, from task to task
    clients_read_initial_model = True

    def send_public(self, server: Server[PublicServerState], cohort: Cohort) -> None:
        """Send the public images to clients that have not received them."""
        state = server.state
        state.receivers = state.receivers + list(cohort.without(state.receivers).ask(self.receive_public, server.data))

    @on_client
    def receive_public(self, client: Client[K], public: Data) -> None:
        """Keep the public images."""
        client.state.public = public

    def own_model(self, state: K) -> Weights:
        return state.model

    def validate_reply(self, server: Server[PublicServerState], reply: Any, examples: int) -> str | None:
        if not isinstance(reply, LogitReply):
            return None
        return validate_logits(reply, len(server.data["label"]), server.num_classes)


def clip_logits(logits: Tensor) -> Tensor:
    """Return logits clipped to ±`MAX_LOGIT`."""
    return logits.clamp(-MAX_LOGIT, MAX_LOGIT)


def mean_logits(replies: Sequence[Tensor], tau: float, ensemble: Ensemble) -> Tensor:
    """Return the mean of clients' logits, or logits whose softmax at tau is the mean of their softmaxes.

    ``replies``: Each client's logits, [n, classes].
    """
    logits = torch.stack(list(replies))
    if ensemble == "logit":
        return logits.mean(0)
    return tau * ((logits / tau).log_softmax(-1).logsumexp(0) - math.log(len(logits)))


def distill_into(party: Party[Any], model: Weights, loss: Loss, images: Data, epochs: int) -> Weights:
    """Return a model after epochs of distillation on images; the model unchanged if the loss is `ZERO_LOSS`."""
    return model if loss is ZERO_LOSS else party.fit(model, loss, images, epochs=epochs).model


def validate_logits(reply: LogitReply, num_images: int, num_classes: int) -> str | None:
    """Return what is wrong with the shape or type of a client's logits, or None."""
    expected = (num_images, num_classes)
    if reply.logits.shape == expected and reply.logits.dtype == torch.float32:
        return None
    return f"logits of shape {list(reply.logits.shape)} in {reply.logits.dtype}, not {list(expected)} in float32"
