"""FT+KD, EWC+KD and LwF+KD about drawn images of each task's classes: what FedDCL has too, and no more than that."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedkeep.algorithms.drawing import Drawing
from fedkeep.algorithms.ewc_kd import EWCKD, Holding
from fedkeep.algorithms.ft_kd import FTKD, Guests, K, Learner
from fedkeep.algorithms.incremental import made
from fedkeep.algorithms.lwf_kd import LwFKD, WithTeacher
from fedkeep.interface import Cohort, Data, Server
from fedkeep.options import option


@dataclass
class Hosts(Guests):
    """What the server keeps: also the images of the task."""

    drawn: Data = field(default_factory=dict)


@dataclass(frozen=True)
class OnMadeImages(Drawing[Hosts, K]):
    """Base of methods about a public set for which FedDCL's images of the task's classes stand, drawn as it begins.

    With the same options as there they are the same images, so that the methods differ by how they learn alone.
    """

    server_cur: int = option(500, "made images of each new class, about which all say what they think", low=1)

    def begin_task(self, server: Server[Hosts], clients: Cohort) -> None:
        super().begin_task(server, clients)
        rows = self.prototypes(server, clients)
        server.state.drawn, server.state.welcomed = made(self.draw(server, [rows], self.server_cur)), []

    def public(self, server: Server[Hosts]) -> Data:
        return server.state.drawn


@dataclass(frozen=True)
class FTKDOnMadeImages(OnMadeImages[Learner], FTKD[Learner, Hosts]):
    """FT+KD in which FedDCL's made images stand for the public set."""

    title = "FT+KD on made images"


@dataclass(frozen=True)
class EWCKDOnMadeImages(OnMadeImages[Holding], EWCKD[Hosts]):
    """EWC+KD in which FedDCL's made images stand for the public set."""

    title = "EWC+KD on made images"


@dataclass(frozen=True)
class LwFKDOnMadeImages(OnMadeImages[WithTeacher], LwFKD[Hosts]):
    """LwF+KD in which FedDCL's made images stand for the public set."""

    title = "LwF+KD on made images"
