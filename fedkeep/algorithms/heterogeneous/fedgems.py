"""FedGEMS: a larger server trusts what it knew already, and otherwise the clients that are certain."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.algorithms.heterogeneous.logit_exchange import (
    LogitExchange,
    LogitReply,
    PublicClientState,
    PublicServerState,
    clip_logits,
    distill_into,
)
from fedkeep.interface import Client, Cohort, Data, Server, on_client
from fedkeep.losses import CrossEntropy, Loss, Scaled
from fedkeep.losses.distillation import soft_label_loss
from fedkeep.options import option


@dataclass(frozen=True)
class FedGEMS(LogitExchange[PublicClientState]):
    """Federated learning of larger server models via selective knowledge fusion, on labelled images that all have.

    The loss on a public image, at the server and at clients, is epsilon CE + (1 - epsilon) KD. The server's teacher is
    its own previous model where that is right; elsewhere it is the mean of the clients' probabilities, each weighted by
    softmax over clients of 1 / entropy. The clients' teacher is the server's model after that. The labelled public set
    of the paper is the recipe's auxiliary set. From the paper's summary and a public re-implementation, which has
    epsilon 0.75; other details are ours.
    """

    title = "FedGEMS"
    paper = "Cheng et al., 2021: FedGEMS, federated learning of larger server models via selective knowledge fusion"
    needs = ("auxiliary",)

    tau: float = option(1.0, "softmax temperature of the distillation; there is no tau squared", low=1e-3)
    epsilon: float = option(0.75, "share of the cross-entropy with the public set's labels", low=0.0, high=1.0)
    server_epochs: int = option(1, "epochs over the public set in which the server learns", low=0)
    distill_epochs: int = option(1, "epochs over the public set in which clients learn", low=0)

    def round(self, server: Server[PublicServerState], cohort: Cohort) -> None:
        public = server.data
        self.send_public(server, cohort)
        replies = cohort.ask(self.train).values()
        teacher = self.fuse_selectively(server, [clip_logits(reply.logits) for reply in replies])
        loss = self.public_loss(teacher, public)
        server.model = distill_into(server, server.model, loss, public, self.server_epochs)
        cohort.start(self.distill, server.predict(server.model))

    def fuse_selectively(self, server: Server[PublicServerState], replies: Sequence[Tensor]) -> Tensor:
        """Return the server's own logits where they are right, else the mean of the clients, certain ones first."""
        own, labels = server.predict(server.model), server.data["label"]
        log_probs = torch.stack([(logits / self.tau).log_softmax(-1) for logits in replies])
        entropy = torch.special.entr(log_probs.exp()).sum(-1)  # 0 where a probability is 0
        # Clamped, so that a client without any doubt outweighs all others and the weight stays finite.
        log_weights = (1 / entropy.clamp(min=1e-3)).log_softmax(0)
        mean = self.tau * (log_probs + log_weights.unsqueeze(-1)).logsumexp(0)
        return torch.where((own.argmax(-1) == labels).unsqueeze(-1), own, mean)

    def public_loss(self, teacher: Tensor, public: Data) -> Loss:
        """Return epsilon CE + (1 - epsilon) KD on the public images, for a teacher's logits."""
        return Scaled(self.epsilon, CrossEntropy()) + soft_label_loss(teacher, public, self.tau, 1 - self.epsilon)

    @on_client
    def train(self, client: Client[PublicClientState]) -> LogitReply:
        """Train the client's own model on its own examples, and send its logits on the public images."""
        state = client.state
        start = client.expand_head(state.model) if state.model else client.initial_model
        state.model = client.fit(start, CrossEntropy()).model
        return LogitReply(client.predict(state.model, state.public))

    @on_client
    def distill(self, client: Client[PublicClientState], teacher: Tensor) -> None:
        """Distil the server's model on the public images into the client's own."""
        state = client.state
        loss = self.public_loss(teacher, state.public)
        state.model = distill_into(client, state.model, loss, state.public, self.distill_epochs)
