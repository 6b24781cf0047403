"""FedDCL: a server learns task after task from clients of other networks, on images generated from prototypes."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fedkeep.algorithms.heterogeneous.logit_exchange import LogitReply, clip_logits, mean_logits, validate_logits
from fedkeep.algorithms.incremental.class_incremental import concat, distill_old_classes, label_loss, mark_generated
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
from fedkeep.interface import Algorithm, Client, Cohort, Data, Server, on_client
from fedkeep.interface.party import Party
from fedkeep.losses import ZERO_LOSS, ClassSubset, CrossEntropy, Head, Loss, Scale
from fedkeep.losses.distillation import soft_label_loss
from fedkeep.models import Weights
from fedkeep.models.heads import WEIGHT
from fedkeep.options import option


@dataclass
class FedDCLImages:
    """What a client receives.

    ``pool``: Generated images, equally many of each class, in order of classes.
    ``old_logits``: The logits of the server's old model on those images of old classes from which it learns, [images,
        old classes]; empty in the first task.
    """

    pool: Data = field(default_factory=dict)
    old_logits: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


@dataclass
class FedDCLServerState(ImagePool):
    """What the server keeps besides its pool.

    ``old_logits``: See `FedDCLImages`.
    ``old_model``: Its model of the task before.
    """

    old_logits: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    old_model: Weights = field(default_factory=dict)


@dataclass
class FedDCLClientState(FedDCLImages):
    """What a client keeps besides what it received.

    ``model``: Its own model; empty before it is trained.
    ``old_model``: Its own model of the task before.
    """

    model: Weights = field(default_factory=dict)
    old_model: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class FedDCL(PrototypeOptions, Algorithm[FedDCLServerState, FedDCLClientState]):
    """Data-free continual learning (Algorithm 1, its slips corrected): examples stay with clients, and weights too.

    *When a task begins* (eqs. 4, 5) clients search for the prototype of each new class under a frozen diffusion model,
    and the server averages them, ``prototype_rounds`` times. The server then generates images of the new classes, once
    for all rounds (section V-D), and sends them to the clients. The printed algorithm generates them anew in every
    update.

    *A round*: a client trains its own model by CE[new] on its examples and generated images, and, on generated images
    of old classes, by CE[old] + w_kd KD[old] from its own model of the task before (eqs. 6 to 8). It sends its logits
    on the server's generated images of new classes. The server learns their mean there, and its own old model's logits
    on old classes (eqs. 9 to 11); then the clients do (eq. 12). With ``server_loss=labels`` the server learns the
    generated images' labels alone: the control that shows what the images are worth.

    Labels and logits are learned by a softmax over all outputs, in which classes without a logit have probability zero:
    at clients, at the server and in feedback (``head=joint``). Read literally, eqs. 6, 7, 9 and 10 use one softmax over
    the old outputs and another over the new ones (``head=sliced``); then nothing teaches a model to tell old classes
    from new ones. That costs 16 points after the last task (docs/findings.md). The first task is the same either
    way, and so are the control's labels at the server, which compete with all.

    The paper prints no temperature: 2, as in the code of DDDR, on which it builds, and whose w_kd is 10. Distillation
    is multiplied by tau squared (``kd_scale``), chosen on held-out images too. Numbers of images are per class (DDDR
    has 50 of new and 200 of old classes), inner "rounds" are epochs, and local ones are the recipe's epochs. The
    paper's grey images are sampled by ddpm in 500 steps (``generator.sampler``). One pool of images serves all three
    counts: each takes the first images of a class. Real and generated images are augmented alike, but for brightness.
    Examples and old classes' images pass a network one after the other, as in DDDR.
    """

    title = "FedDCL"
    paper = "FedDCL, 2025 (arXiv 2509.25977): federated data-free continual learning with diffusion prototypes"
    needs = ("generator",)
    networks = "any"
    clients_read_initial_model = True

    head: Head = option("joint", "joint: softmaxes run over all outputs; sliced: over old and new ones apart")
    tau: float = option(2.0, "softmax temperature of all distillation", low=1e-3)
    kd_scale: Scale = option("tau2", "whether all distillation is multiplied by tau squared")
    w_kd: float = option(1.0, "weight of a client's distillation of old classes", low=0.0)
    images_per_new_class: int = option(200, "generated images of each new class in a client's training; 0: none", low=0)
    images_per_old_class: int = option(100, "generated images of each old class there; 0: none", low=0)
    server_loss: Literal["kd", "labels"] = option("kd", "the server learns clients' logits, or the images' labels")
    server_epochs: int = option(2, "epochs of the server over generated images (Q k to s)", low=0)
    feedback_epochs: int = option(1, "epochs of the clients over them afterwards (Q s to k)", low=0)
    server_images_per_class: int = option(500, "generated images of each class for the server, and for feedback", low=1)

    def begin_task(self, server: Server[FedDCLServerState], clients: Cohort) -> None:
        super().begin_task(server, clients)
        extend_pool(
            self,
            server,
            clients,
            max(self.images_per_new_class, self.images_per_old_class, self.server_images_per_class),
        )
        if server.num_old_classes:
            replayed = select_images(server.state.pool, 0, server.num_old_classes, self.server_images_per_class)
            server.state.old_logits = server.predict(server.state.old_model, replayed)[:, : server.num_old_classes]

    def round(self, server: Server[FedDCLServerState], cohort: Cohort) -> None:
        send_images(server, cohort, self.receive, FedDCLImages, server.state.old_logits)
        replies = cohort.ask(self.train).values()
        consensus = mean_logits([clip_logits(reply.logits) for reply in replies], self.tau, "prob")  # eq. 9
        if self.server_loss == "kd":
            server.model = self.distill_into(server, server.model, consensus, self.server_epochs)  # eq. 11
        else:
            images = mark_generated(
                select_images(server.state.pool, 0, server.num_classes, self.server_images_per_class)
            )
            server.model = server.fit(server.model, CrossEntropy(), images, epochs=self.server_epochs).model
        cohort.start(self.feedback, consensus)  # eq. 12

    def end_task(self, server: Server[FedDCLServerState], clients: Cohort) -> None:
        server.state.old_model = server.model
        clients.ask(self.remember)

    def validate_reply(self, server: Server[FedDCLServerState], reply: Any, examples: int) -> str | None:
        if isinstance(reply, LogitReply):
            num_new = server.num_classes - server.num_old_classes
            return validate_logits(reply, num_new * self.server_images_per_class, num_new)
        return validate_prototypes(server, reply, examples) if isinstance(reply, PrototypeReply) else None

    def own_model(self, state: FedDCLClientState) -> Weights:
        return state.model

    @on_client
    def receive(self, client: Client[FedDCLClientState], message: FedDCLImages) -> None:
        """Keep the images of classes of which the client had none, and the logits on those of old classes."""
        state = client.state
        state.pool = concat(state.pool, message.pool) if state.pool else message.pool
        state.old_logits = message.old_logits

    @on_client
    def train(self, client: Client[FedDCLClientState]) -> LogitReply:
        """Train the client's own model (eqs. 6 to 8), and send its logits on the server's images of new classes."""
        state = client.state
        loss = label_loss(client, "all" if self.head == "joint" else "new")  # eq. 6
        if client.num_old_classes and self.images_per_old_class:
            labels: Loss = CrossEntropy(dataset_index=1)
            loss = loss + (labels if self.head == "joint" else ClassSubset(labels, 0, client.num_old_classes))
            # A teacher that missed a task has no output for its classes: it may only say which old class it sees.
            knows_all = len(state.old_model.get(WEIGHT, ())) == client.num_old_classes
            head: Head = self.head if knows_all else "sliced"
            loss = loss + distill_old_classes(  # eq. 7
                state.old_model, self.w_kd, self.tau, dataset_index=1, scale=self.kd_scale, head=head
            )
        start = client.expand_head(state.model) if state.model else client.initial_model
        state.model = client.fit(
            start, loss, *replay_data(client, state.pool, self.images_per_new_class, self.images_per_old_class)
        ).model
        images = select_images(state.pool, client.num_old_classes, client.num_classes, self.server_images_per_class)
        return LogitReply(client.predict(state.model, images)[:, client.num_old_classes :])

    @on_client
    def feedback(self, client: Client[FedDCLClientState], consensus: Tensor) -> None:
        """Learn the clients' mean on new classes, and the old server's logits on old ones (eq. 12)."""
        state = client.state
        state.model = self.distill_into(client, state.model, consensus, self.feedback_epochs)

    @on_client
    def remember(self, client: Client[FedDCLClientState]) -> None:
        """Keep the task's last model as the next task's teacher."""
        client.state.old_model = client.state.model

    def distill_into(self, party: Party[Any], model: Weights, consensus: Tensor, epochs: int) -> Weights:
        """Return a model that has learned the clients' logits on new classes and the old server's on old ones (eq. 11).

        ``epochs``: Epochs over the larger of both sets of images.
        """
        pool, old = party.state.pool, party.num_old_classes
        parts = [(old, select_images(pool, old, party.num_classes, self.server_images_per_class), consensus)]
        if old:
            parts.append((0, select_images(pool, 0, old, self.server_images_per_class), party.state.old_logits))
        parts.sort(key=lambda part: len(part[2]), reverse=True)  # an epoch ends with data set 0
        loss, data = ZERO_LOSS, list[Data]()
        num_outputs = party.num_classes if self.head == "joint" else 0
        for number, (start, images, logits) in enumerate(parts):
            term = soft_label_loss(
                logits,
                images,
                self.tau,
                start=start,
                dataset_index=number,
                scale=self.kd_scale,
                num_outputs=num_outputs,
            )
            loss = loss if term is ZERO_LOSS else loss + term
            data.append(mark_generated(images))
        return model if loss is ZERO_LOSS else party.fit(model, loss, *data, epochs=epochs).model
