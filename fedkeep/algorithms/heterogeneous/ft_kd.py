"""FT+KD: clients of different networks send logits on public images, and all learn their mean."""

from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from fedkeep.algorithms.heterogeneous.logit_exchange import (
    K,
    LogitExchange,
    LogitReply,
    PublicServerState,
    clip_logits,
    distill_into,
    mean_logits,
)
from fedkeep.algorithms.incremental.class_incremental import label_loss
from fedkeep.interface import Client, Cohort, Server, on_client
from fedkeep.losses import ZERO_LOSS, Head, Loss, Scale
from fedkeep.losses.distillation import soft_label_loss
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class FTKD(LogitExchange[K], Generic[K]):
    """Fine-tuning with knowledge distillation, for clients of different networks.

    In a round every client trains its own model on its own examples and sends its logits on a public set. The server
    distils their mean into its own model and sends it back; the clients distil it too. Weights never travel. Public
    images are sent once to each client. Logits are of all classes that were seen, and are learned among them, whatever
    the ``head``.

    FedDCL's paper has one sentence about it (section V): this is FedMD's and FedGEMS's communication, with plain
    training in place of a method against forgetting. The paper names no public set, no temperature and no number of
    epochs.
    """

    title = "FT+KD"
    paper = "Baseline of FedDCL (2025), after FedMD (Li and Wang, 2019)"
    needs = ("public",)

    head: Head = option("joint", "joint: softmaxes run over all outputs seen so far; sliced: over the task's own")
    tau: float = option(2.0, "softmax temperature of the distillation", low=1e-3)
    kd_scale: Scale = option("none", "whether the distillation is multiplied by tau squared")
    server_epochs: int = option(1, "epochs over the public set in which the server learns", low=0)
    distill_epochs: int = option(1, "epochs over the public set in which clients learn", low=0)

    def round(self, server: Server[PublicServerState], cohort: Cohort) -> None:
        public = server.data
        self.send_public(server, cohort)
        replies = cohort.ask(self.train).values()
        consensus = mean_logits([clip_logits(reply.logits) for reply in replies], self.tau, "prob")
        loss = soft_label_loss(consensus, public, self.tau, scale=self.kd_scale)
        server.model = distill_into(server, server.model, loss, public, self.server_epochs)
        cohort.start(self.distill, consensus)

    @on_client
    def train(self, client: Client[K]) -> LogitReply:
        """Train the client's own model on its own examples, and send its logits on the public images."""
        state = client.state
        start = client.expand_head(state.model) if state.model else client.initial_model
        labels = label_loss(client, "all" if self.head == "joint" else "new")
        state.model = client.fit(start, labels + self.extra_loss(client, start)).model
        return LogitReply(client.predict(state.model, state.public))

    @on_client
    def distill(self, client: Client[K], consensus: Tensor) -> None:
        """Distil the clients' mean on the public images into the client's own model."""
        state = client.state
        loss = soft_label_loss(consensus, state.public, self.tau, scale=self.kd_scale)
        state.model = distill_into(client, state.model, loss, state.public, self.distill_epochs)

    def extra_loss(self, client: Client[K], model: Weights) -> Loss:
        """Return a client's loss besides the cross-entropy, against forgetting."""
        return ZERO_LOSS
