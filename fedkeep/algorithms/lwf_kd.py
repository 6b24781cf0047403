"""LwF+KD: FT+KD whose clients learn without forgetting, each from its own model of the task before."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from fedkeep.algorithms.ft_kd import FTKD
from fedkeep.algorithms.ft_kd import G
from fedkeep.algorithms.ft_kd import Learner
from fedkeep.algorithms.incremental import old_classes
from fedkeep.interface import Client
from fedkeep.interface import Cohort
from fedkeep.interface import Server
from fedkeep.interface import on_client
from fedkeep.models import Weights
from fedkeep.options import option
from fedkeep.losses import Objective
from fedkeep.objectives import Head


@dataclass
class WithTeacher(Learner):
    """What a client keeps: also its own last model of the task before."""

    teacher: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class LwFKD(FTKD[WithTeacher, G]):
    """FT+KD with CE[new] + w_old * KD[old] in the clients' training, taught by the client's own last model of the task
    before. The server's model, which has no such teacher, keeps what the clients keep.

    With ``head=joint`` it is CE among all + w_old * KD[old]: the old model still speaks of old classes among
    themselves, since among all outputs it would say of every new example that it is an old one."""

    title = "LwF+KD"
    paper = "Baseline of FedDCL (2025), after FedMD (Li and Wang, 2019) and Li and Hoiem, 2017"

    head: Head = option("sliced", "labels compete with all outputs that were seen, or with the task's own")
    w_old: float = option(3.0, "weight of what the own old model says about old classes", low=0.0)

    def end_task(self, server: Server[G], clients: Cohort) -> None:
        clients.ask(self.remember)

    @on_client
    def remember(self, client: Client[WithTeacher]) -> None:
        """Keep the task's last model as a teacher of the next."""
        client.state.teacher = client.state.model

    def beside(self, client: Client[WithTeacher], model: Weights) -> Objective:
        return old_classes(client.state.teacher, self.w_old, self.tau, scale=self.kd_scale)
