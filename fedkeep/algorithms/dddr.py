"""DDDR: clients of one network replay old classes by images that a frozen diffusion model draws from prototypes."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from fedkeep.algorithms.drawn import Gallery
from fedkeep.algorithms.drawn import WithDrawn
from fedkeep.algorithms.incremental import joined
from fedkeep.interface import Client
from fedkeep.interface import Cohort
from fedkeep.interface import Data
from fedkeep.interface import Fit
from fedkeep.interface import Server
from fedkeep.interface import each
from fedkeep.interface import on_client
from fedkeep.models import Weights
from fedkeep.options import option
from fedkeep.aggregation import Fusion
from fedkeep.aggregation import fused
from fedkeep.losses import NOTHING
from fedkeep.losses import Objective


@dataclass
class Replay:
    """What a client keeps: drawn images, equally many of each class, in order of classes; and what the last global
    model of the task before says of the first ``pre`` of each old class."""

    pool: Data = field(default_factory=dict)
    lesson: Objective = NOTHING


@dataclass
class Archive(Gallery):
    """What the server keeps: also that lesson."""

    lesson: Objective = NOTHING


@dataclass(frozen=True)
class DDDR(WithDrawn[Archive, Replay]):
    """Diffusion-driven data replay: FedAvg on CE[new] + w_scl SupCon, on own examples and drawn images of new classes,
    + w_ce_pre CE[old] + w_kd KD[old], on drawn images of old classes, of which the last global model of the task before
    says what it thinks (``head=sliced``, as in its code).

    Prototypes are looked for and averaged as in FedDCL, which has it from here (class inversion of the public
    text-to-image model: ``generator.name=ldm`` with guidance=10). Images are drawn once, the same for all clients. KD
    is the cross-entropy with the old model's probabilities, at temperature 2 and without tau^2.

    The code contrasts a projection of the features to 256 numbers, by two layers that serve nothing else; here the
    features themselves are contrasted, since networks are the recipe's. It counts clients alike in both means, and its
    weight decay shrinks prototypes of classes that a client does not hold, which is left out.
    """

    title = "DDDR"
    paper = "Liang et al., 2024: Diffusion-driven data replay, a novel approach to combat forgetting in FCCL"

    w_ce_pre: float = option(0.5, "weight of the labels of made images of old classes", low=0.0)
    w_kd: float = option(10.0, "weight of what the old global model says of them", low=0.0)
    w_scl: float = option(1.0, "weight of supervised contrast, on examples and made images of new classes", low=0.0)
    cur: int = option(50, "made images of each new class in a client's training; 0: none", low=0)
    pre: int = option(200, "made images of each old class there; 0: none", low=0)
    proto_rounds: int = option(10, "rounds of prototype search at a task's beginning", low=0)
    proto_batch: int = option(12, "images a step", low=1)
    fusion: Fusion = option("uniform", "whether clients count by their examples, or all alike")

    def begin_task(self, server: Server[Archive], clients: Cohort) -> None:
        kept, teacher = server.state, server.model
        super().begin_task(server, clients)
        self.draw_new(server, clients)
        if server.old and self.pre:
            replayed = self.part(kept.pool, 0, server.old, self.pre)
            kept.lesson = server.settle(self.replayed(teacher), {}, replayed)

    def round(self, server: Server[Archive], cohort: Cohort) -> None:
        kept = server.state
        fresh = {client: Replay(pool, kept.lesson) for client, pool in self.unseen(server, cohort).items()}
        got = cohort.ask(self.receive, each(fresh)) if fresh else ()
        kept.shown = kept.shown | dict.fromkeys(got, server.classes)
        server.model = fused(cohort.ask(self.train, server.model), self.fusion)

    @on_client
    def receive(self, client: Client[Replay], fresh: Replay) -> None:
        """Keep images of classes that the client had none of, and what the old model says of old ones."""
        kept = client.state
        kept.pool, kept.lesson = joined(kept.pool, fresh.pool) if kept.pool else fresh.pool, fresh.lesson

    @on_client
    def train(self, client: Client[Replay], model: Weights) -> Fit:
        """Train the global model on own examples and drawn images."""
        return self.practised(client, model, client.state.pool, client.state.lesson)
