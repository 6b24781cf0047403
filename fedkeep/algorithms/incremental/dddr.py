"""DDDR: clients of one network replay old classes by images that a frozen diffusion model generates from prototypes."""

from dataclasses import dataclass, field
from typing import Any

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.algorithms.incremental.class_incremental import concat, distill_old_classes, label_loss
from fedkeep.algorithms.incremental.generated_replay import (
    ImagePool,
    PrototypeOptions,
    PrototypeReply,
    extend_pool,
    replay_data,
    select_images,
    send_images,
    validate_prototypes,
)
from fedkeep.interface import Algorithm, Client, Cohort, Data, Fit, Server, on_client
from fedkeep.losses import ZERO_LOSS, ClassSubset, CrossEntropy, Loss, Scaled, SupCon
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass
class DDDRClientState:
    """What a client keeps.

    ``pool``: Generated images, equally many of each class, in order of classes.
    ``distillation``: The distillation of the last global model of the task before, on the first
        ``images_per_old_class`` images of each old class.
    """

    pool: Data = field(default_factory=dict)
    distillation: Loss = ZERO_LOSS


@dataclass
class DDDRServerState(ImagePool):
    """What the server keeps besides its pool.

    ``distillation``: What clients receive with the images, see `DDDRClientState`.
    """

    distillation: Loss = ZERO_LOSS


@dataclass(frozen=True)
class DDDR(PrototypeOptions, Algorithm[DDDRServerState, DDDRClientState]):
    """Diffusion-driven data replay: FedAvg on the client's examples and on generated images of new and old classes.

    The loss is CE[new] + w_scl SupCon on own examples and generated images of new classes, + w_ce_old CE[old] + w_kd
    KD[old] on generated images of old classes. KD is the cross-entropy with the probabilities of the last global model
    of the task before, at temperature 2 and without tau squared.

    Prototypes are found and averaged as in FedDCL, which has this from DDDR (class inversion of the public
    text-to-image model: ``generator.name=ldm`` with guidance=10). Images are generated once, the same for all clients.

    The code contrasts a projection of the features to 256 numbers, by two layers that serve nothing else; here the
    features themselves are contrasted, since networks are the recipe's. It counts clients alike in both means, and its
    weight decay shrinks prototypes of classes that a client does not hold, which is left out.
    """

    title = "DDDR"
    paper = "Liang et al., 2024: Diffusion-driven data replay, a novel approach to combat forgetting in FCCL"

    needs = ("generator",)

    prototype_rounds: int = option(10, "rounds of prototype search at a task's beginning", low=0)
    prototype_batch_size: int = option(12, "images a step", low=1)
    tau: float = option(2.0, "softmax temperature of the distillation; there is no tau squared", low=1e-3)
    w_ce_old: float = option(0.5, "weight of the labels of generated images of old classes", low=0.0)
    w_kd: float = option(10.0, "weight of the distillation on these images", low=0.0)
    w_scl: float = option(1.0, "weight of supervised contrast, on examples and images of new classes", low=0.0)
    images_per_new_class: int = option(50, "generated images of each new class in a client's training; 0: none", low=0)
    images_per_old_class: int = option(200, "generated images of each old class there; 0: none", low=0)
    aggregation: Aggregation = option("uniform", "whether clients count by their examples, or all alike")

    def begin_task(self, server: Server[DDDRServerState], clients: Cohort) -> None:
        state, teacher = server.state, server.model
        super().begin_task(server, clients)
        extend_pool(self, server, clients, max(self.images_per_new_class, self.images_per_old_class))
        if server.num_old_classes and self.images_per_old_class:
            distillation = distill_old_classes(teacher, self.w_kd, self.tau, dataset_index=1)
            replayed = select_images(state.pool, 0, server.num_old_classes, self.images_per_old_class)
            state.distillation = server.cache_teachers(distillation, {}, replayed)

    def round(self, server: Server[DDDRServerState], cohort: Cohort) -> None:
        send_images(server, cohort, self.receive, DDDRClientState, server.state.distillation)
        server.model = aggregate(cohort.ask(self.train, server.model), self.aggregation)

    @property
    def generated_per_class(self) -> int:
        return self.images_per_new_class

    def validate_reply(self, server: Server[DDDRServerState], reply: Any, examples: int) -> str | None:
        return validate_prototypes(server, reply, examples) if isinstance(reply, PrototypeReply) else None

    @on_client
    def receive(self, client: Client[DDDRClientState], message: DDDRClientState) -> None:
        """Keep the images of classes of which the client had none, and the distillation on those of old classes."""
        state = client.state
        state.pool = concat(state.pool, message.pool) if state.pool else message.pool
        state.distillation = message.distillation

    @on_client
    def train(self, client: Client[DDDRClientState], model: Weights) -> Fit:
        """Train the global model on the client's examples and on generated images."""
        state = client.state
        loss = label_loss(client, "new")
        if self.w_scl:
            loss = loss + Scaled(self.w_scl, SupCon())
        if client.num_old_classes and self.images_per_old_class:
            loss = (
                loss
                + ClassSubset(Scaled(self.w_ce_old, CrossEntropy(dataset_index=1)), 0, client.num_old_classes)
                + state.distillation
            )
        return client.fit(
            model, loss, *replay_data(client, state.pool, self.images_per_new_class, self.images_per_old_class)
        )
