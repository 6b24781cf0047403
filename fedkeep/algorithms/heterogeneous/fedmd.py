"""FedMD: clients of different networks match the mean of their logits on public images."""

from dataclasses import dataclass

from torch import Tensor

from fedkeep.algorithms.heterogeneous.logit_exchange import (
    LogitExchange,
    LogitReply,
    PublicClientState,
    PublicServerState,
    clip_logits,
    distill_into,
    mean_logits,
)
from fedkeep.interface import Client, Cohort, Server, on_client
from fedkeep.losses import CrossEntropy
from fedkeep.losses.distillation import LogitMatching
from fedkeep.options import option


@dataclass(frozen=True)
class FedMD(LogitExchange[PublicClientState]):
    """Heterogeneous federated learning by model distillation: digest the consensus, then revisit the own examples.

    The consensus is the mean of the clients' logits, and it is matched in squares. FedMD has no model on the server;
    here it has one, which digests as the clients do, so that there is one to evaluate and to export. In the paper
    clients are first pre-trained on the public set's labels; here they are not. The authors' program matches absolute
    differences, on 5,000 public images that are drawn anew in each round; here squares, on all.
    """

    title = "FedMD"
    paper = "Li and Wang, 2019: FedMD, heterogenous federated learning via model distillation"
    needs = ("public",)

    server_epochs: int = option(1, "epochs over the public set in which the server learns", low=0)
    distill_epochs: int = option(1, "epochs over the public set in which clients learn", low=0)

    def round(self, server: Server[PublicServerState], cohort: Cohort) -> None:
        public = server.data
        self.send_public(server, cohort)
        replies = cohort.ask(self.train).values()
        consensus = mean_logits([clip_logits(reply.logits) for reply in replies], 1.0, "logit")
        server.model = distill_into(server, server.model, LogitMatching(consensus), public, self.server_epochs)
        cohort.start(self.distill, consensus)

    @on_client
    def train(self, client: Client[PublicClientState]) -> LogitReply:
        """Train the client's own model on its own examples, and send its logits on the public images."""
        state = client.state
        start = client.expand_head(state.model) if state.model else client.initial_model
        state.model = client.fit(start, CrossEntropy()).model
        return LogitReply(client.predict(state.model, state.public))

    @on_client
    def distill(self, client: Client[PublicClientState], consensus: Tensor) -> None:
        """Match the clients' mean on the public images with the client's own model."""
        state = client.state
        state.model = distill_into(client, state.model, LogitMatching(consensus), state.public, self.distill_epochs)
