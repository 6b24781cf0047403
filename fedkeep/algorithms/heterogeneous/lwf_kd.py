"""LwF+KD: FT+KD whose clients learn without forgetting, each from its own model of the task before."""

from dataclasses import dataclass, field

from fedkeep.algorithms.heterogeneous.ft_kd import FTKD
from fedkeep.algorithms.heterogeneous.logit_exchange import PublicClientState, PublicServerState
from fedkeep.algorithms.incremental.class_incremental import distill_old_classes
from fedkeep.interface import Client, Cohort, Server, on_client
from fedkeep.losses import Head, Loss
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass
class LwFKDClientState(PublicClientState):
    """What a client keeps besides its model and the public images.

    ``teacher``: Its own last model of the task before.
    """

    teacher: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class LwFKD(FTKD[LwFKDClientState]):
    """FT+KD (`FTKD`, which has the round) with one more term in the clients' training: CE[new] + w_old * KD[old].

    The teacher is the client's own last model of the task before. The server's model has no such teacher; it learns
    what the clients retain.

    With ``head=joint`` the loss is CE among all + w_old * KD[old]: the old model still teaches old classes among
    themselves, since among all outputs it would teach that every new example is of an old class.
    """

    title = "LwF+KD"
    paper = "Baseline of FedDCL (2025), after FedMD (Li and Wang, 2019) and Li and Hoiem, 2017"

    head: Head = option("sliced", "joint: softmaxes run over all outputs seen so far; sliced: over the task's own")
    w_old: float = option(3.0, "weight of the distillation from the client's own old model", low=0.0)

    def end_task(self, server: Server[PublicServerState], clients: Cohort) -> None:
        clients.ask(self.remember)

    @on_client
    def remember(self, client: Client[LwFKDClientState]) -> None:
        """Keep the task's last model as the next task's teacher."""
        client.state.teacher = client.state.model

    def extra_loss(self, client: Client[LwFKDClientState], model: Weights) -> Loss:
        return distill_old_classes(client.state.teacher, self.w_old, self.tau, scale=self.kd_scale)
