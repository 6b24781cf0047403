"""EWC+KD: FT+KD whose clients keep weights near those that mattered before, each by its own data."""

from dataclasses import dataclass, field

from fedkeep.algorithms.heterogeneous.ft_kd import FTKD
from fedkeep.algorithms.heterogeneous.logit_exchange import PublicClientState, PublicServerState
from fedkeep.algorithms.incremental.fedewc import EWCState, consolidate, ewc_penalty
from fedkeep.interface import Client, Cohort, Server, on_client
from fedkeep.losses import Head, Loss
from fedkeep.models import Weights
from fedkeep.models.heads import WEIGHT
from fedkeep.options import option


@dataclass
class EWCKDClientState(PublicClientState):
    """What a client keeps besides its model and the public images.

    ``consolidation``: Its last model of the task before, and the Fisher information.
    """

    consolidation: EWCState = field(default_factory=EWCState)


@dataclass(frozen=True)
class EWCKD(FTKD[EWCKDClientState]):
    """FT+KD (`FTKD`, which has the round) with FedEWC's penalty in the clients' training.

    The penalty's anchor is each client's own last model of the task before.
    """

    title = "EWC+KD"
    paper = "Baseline of FedDCL (2025), after FedMD (Li and Wang, 2019) and Kirkpatrick et al., 2017"

    head: Head = option("sliced", "joint: softmaxes run over all outputs seen so far; sliced: over the task's own")
    w_penalty: float = option(1000.0, "weight of the penalty", low=0.0)

    def end_task(self, server: Server[PublicServerState], clients: Cohort) -> None:
        clients.ask(self.consolidate)

    @on_client
    def consolidate(self, client: Client[EWCKDClientState]) -> None:
        """Compute the Fisher information of the client's own last model on its data, if it has trained in the task."""
        state = client.state
        if len(state.model.get(WEIGHT, ())) == client.num_classes:
            state.consolidation = consolidate(client, state.consolidation, state.model)

    def extra_loss(self, client: Client[EWCKDClientState], model: Weights) -> Loss:
        return ewc_penalty(client.state.consolidation, model, self.w_penalty)
