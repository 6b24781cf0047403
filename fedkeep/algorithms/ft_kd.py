"""FT+KD: clients of different networks say what they think of public images, and all learn what they say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import Generic
import torch
from torch import Tensor
from typing_extensions import TypeVar
from fedkeep.algorithms.incremental import CESlice
from fedkeep.algorithms.incremental import cross_entropy
from fedkeep.algorithms.said import Ensemble
from fedkeep.algorithms.said import Said
from fedkeep.algorithms.said import averaged
from fedkeep.algorithms.said import bounded
from fedkeep.interface import Algorithm
from fedkeep.interface import Client
from fedkeep.interface import Cohort
from fedkeep.interface import Data
from fedkeep.interface import Server
from fedkeep.interface import on_client
from fedkeep.interface.party import Party
from fedkeep.models import Weights
from fedkeep.options import option
from fedkeep.losses import NOTHING
from fedkeep.losses import Objective
from fedkeep.losses.answers import taught
from typing import Literal
from fedkeep.algorithms.incremental import by_head
from fedkeep.objectives import Head
from fedkeep.objectives import Scale


@dataclass
class Guests:
    """What the server keeps: who has the public images already."""

    welcomed: list[str] = field(default_factory=list)


@dataclass
class Learner:
    """What a client keeps: its own model, empty before it was trained, and the public images."""

    model: Weights = field(default_factory=dict)
    public: Data = field(default_factory=dict)


K = TypeVar("K", bound=Learner, default=Learner)
G = TypeVar("G", bound=Guests, default=Guests)


@dataclass(frozen=True)
class FTKD(Algorithm[G, K], Generic[K, G]):
    """Fine-tuning with knowledge distillation, for clients of different networks.

    A round: every client trains its own model on its own examples, and tells its logits about a public set; the server
    takes their mean, teaches it to its own model and sends it back; the clients learn it too. Weights never travel.
    Public images are sent once to each client. What is said is of all classes that were seen, and is learned among
    them, whatever the ``head``.

    FedDCL's paper has one sentence about it (section V): this is FedMD's and FedGEMS's communication, with plain
    training in the place of a rule against forgetting. Which public set, at what temperature and for how many passes
    it does not say.
    """

    title = "FT+KD"
    paper = "Baseline of FedDCL (2025), after FedMD (Li and Wang, 2019)"
    needs = ("public",)
    networks = "any"

    head: Head = option("joint", "labels compete with all outputs that were seen, or with the task's own")
    tau: float = option(2.0, "softmax temperature of the distillation", low=1e-3)
    kd_scale: Scale = option("none", "whether the distillation is multiplied by tau squared")
    ensemble: Ensemble = option("prob", "the mean is one of probabilities, or of logits")
    server_passes: int = option(1, "passes over the public set in which the server learns", low=0)
    digest_passes: int = option(1, "passes over the public set in which clients learn", low=0)
    ce_slice: CESlice | Literal["by_head"] = option(
        "by_head", "labels among the task's classes, or among all that were seen"
    )

    def begin_task(self, server: Server[G], clients: Cohort) -> None:
        """Go on with what everybody has: the own models, and the public images."""
        super().begin_task(server, clients)

    def round(self, server: Server[G], cohort: Cohort) -> None:
        kept = server.state
        public = self.public(server)
        kept.welcomed = kept.welcomed + list(cohort.without(kept.welcomed).ask(self.welcome, public))
        replies = [bounded(reply.logits) for reply in cohort.ask(self.learn).values()]
        consensus = self.consensus(server, replies)
        server.model = self.absorbed(server, server.model, consensus, public, self.server_passes)
        cohort.start(self.digest, self.shared(server, consensus))

    def public(self, server: Server[G]) -> Data:
        """Return the images that are spoken of."""
        return server.data

    def own_model(self, state: K) -> Weights:
        return state.model

    def fault(self, server: Server[G], reply: Any, examples: int) -> str | None:
        wanted = (len(self.public(server)["label"]), server.classes)
        if not isinstance(reply, Said) or (reply.logits.shape == wanted and reply.logits.dtype == torch.float32):
            return None
        return f"logits of shape {list(reply.logits.shape)} in {reply.logits.dtype}, not {list(wanted)} in float32"

    @on_client
    def welcome(self, client: Client[K], public: Data) -> None:
        """Keep the public images."""
        client.state.public = public

    @on_client
    def learn(self, client: Client[K]) -> Said:
        """Train the own model on the own examples, and tell what it thinks of the public images."""
        kept = client.state
        start = client.grown(kept.model) if kept.model else client.initial
        labels = cross_entropy(client, by_head(self.ce_slice, self.head))
        kept.model = client.fit(start, labels + self.beside(client, start)).model
        return Said(client.predict(kept.model, kept.public))

    @on_client
    def digest(self, client: Client[K], consensus: Tensor) -> None:
        """Learn what all clients together think of the public images."""
        kept = client.state
        kept.model = self.absorbed(client, kept.model, consensus, kept.public, self.digest_passes)

    def absorbed(self, party: Party[Any], model: Weights, consensus: Tensor, public: Data, passes: int) -> Weights:
        """Return a model that has learned what was said of public images; of a class alone nothing can be said."""
        lesson = self.lesson(consensus, public)
        return model if lesson is NOTHING else party.fit(model, lesson, public, passes=passes).model

    def consensus(self, server: Server[G], replies: Sequence[Tensor]) -> Tensor:
        """Return the mean of what clients said, as logits [n, classes]."""
        return averaged(replies, self.tau, self.ensemble)

    def shared(self, server: Server[G], consensus: Tensor) -> Tensor:
        """Return what clients are taught, once the server has learned."""
        return consensus

    def lesson(self, consensus: Tensor, public: Data) -> Objective:
        """Return what is minimised on the public set."""
        return taught(consensus, public, self.tau, scale=self.kd_scale)

    def beside(self, client: Client[K], model: Weights) -> Objective:
        """Return what a client minimises besides the cross-entropy, against forgetting."""
        return NOTHING
