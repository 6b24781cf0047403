"""LANDER: features are bound to embeddings of class names, and so are the generated images of old classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log2, sqrt

from torch import Tensor

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.algorithms.incremental.class_incremental import distill_old_classes, label_loss, mark_generated
from fedkeep.algorithms.incremental.generated_replay import (
    GeneratedReplay,
    InversionServerState,
    inversion_config,
    inversion_problem,
)
from fedkeep.errors import ConfigError
from fedkeep.generation.inversion import FORMATS, TextInverter, read_anchors
from fedkeep.interface import Algorithm, Client, Cohort, Data, Fit, Server, on_client
from fedkeep.losses import BoundingLoss, FeatureMSE, Loss, Scaled
from fedkeep.models import Weights
from fedkeep.models.heads import WEIGHT
from fedkeep.options import option

TAU = 2.0  # temperature of the distillation; there is no tau squared


@dataclass
class LANDERServerState(InversionServerState):
    """What the server keeps besides the replay.

    ``best_model``: The task's model with the lowest loss at clients.
    """

    best_model: Weights = field(default_factory=dict)
    lowest_loss: float = inf


@dataclass(frozen=True)
class LANDER(Algorithm[LANDERServerState, GeneratedReplay]):
    """Label-text anchors: A (CE[new] + w_bounding * bounding) on own examples + B (KD[old] + MSE of features) on rest.

    An anchor is the embedding of a class's name by a language model, a vector as wide as the network's features (512
    in the paper). The bounding loss, max(0, MSE(features, anchor) - r), exerts no pull within that distance. The
    last global model of the task before teaches logits, at temperature 2 without tau squared, and features, and the
    server inverts it into images through the anchors (see `fedkeep.generation.inversion.TextInverter`). With n classes
    of which n_old are old, a = log2(n / 2 + 1) and b = sqrt(n_old / n), A = w_new (1 + 1 / a) / b and B = w_old a b. In
    the first task A is 1 and B is 0.

    ``anchors`` names the file, which the server alone reads: a .csv with a line for each class, its name and then the
    numbers; or a .safetensors with a vector under each class's name.

    A task ends with the global model that had the lowest loss at clients, not with the last one. The code sums the
    losses of a local training's first epoch; here it is the mean over all its steps, and the model of the first round,
    which does not know the new classes, is no candidate. Its learning rate falls from 0.04 to 0.001 on a cosine:
    ``training.lr_schedule = "cosine"``.
    """

    title = "LANDER"
    paper = "Tran et al., 2024: Text-enhanced data-free approach for federated class-incremental learning"
    needs = ("images",)
    only_averages = False  # it needs the losses
    reason_against_dp_sgd = (
        "LANDER trains on two data sets at once from the second task on, and DP-SGD takes one. Take FedLwF."
    )

    anchors: str = option("", "file with a vector for each class name: .csv or .safetensors")
    w_bounding: float = option(5.0, "weight of the bounding loss", low=0.0)
    radius: float = option(0.015, "mean squared distance from the anchor that costs nothing", low=0.0)
    w_new: float = option(0.2, "factor of the loss on own examples", low=0.0)
    w_old: float = option(0.4, "factor of the loss on generated images", low=0.0)
    replay_batch_size: int = option(128, "generated images a step; the code has as many as own examples", low=2)
    num_images: int = option(10000, "generated images", low=2)
    synthesis_batch_size: int = option(256, "images that are generated at a time", low=2)
    generator_steps: int = option(40, "steps of the generator for each batch of images", low=1)
    warmup: int = option(10, "batches that are discarded, before a student is trained and challenged", low=0)
    generator_channels: int = option(64, "channels of the generator's last feature maps; twice as many before", low=1)
    student_steps: int = option(50, "steps of the student after each batch of images", low=0)
    aggregation: Aggregation = option("uniform", "whether clients count by their examples, or all alike")

    def check(self) -> None:
        if not self.anchors:
            raise ConfigError(f"LANDER needs vectors for what classes are called. Set anchors to {FORMATS}.")

    def check_classes(self, label_names: Sequence[str]) -> None:
        read_anchors(self.anchors, label_names)

    def begin_task(self, server: Server[LANDERServerState], clients: Cohort) -> None:
        state = server.state
        state.best_model, state.lowest_loss = {}, inf
        images = self.synthesize(server) if server.num_old_classes else {}
        loss = server.cache_teachers(self.replay_loss(server), {}, images)
        state.replay, state.receivers = GeneratedReplay(images, loss, self.replay_batch_size), []
        super().begin_task(server, clients)

    def round(self, server: Server[LANDERServerState], cohort: Cohort) -> None:
        state = server.state
        state.receivers = state.receivers + list(cohort.without(state.receivers).ask(self.receive, state.replay))
        replies = cohort.ask(self.train, server.model)
        self.update_best(server, replies)
        server.model = aggregate(replies, self.aggregation)

    def end_task(self, server: Server[LANDERServerState], clients: Cohort) -> None:
        server.model = server.state.best_model or server.model

    def update_best(self, server: Server[LANDERServerState], replies: Mapping[str, Fit]) -> None:
        """Keep the model that was sent, if clients had the lowest loss of the task with it."""
        examples = sum(reply.num_examples for reply in replies.values())
        if server.round == 1 or not examples:
            return
        loss = sum(max(reply.loss, 0.0) * reply.num_examples for reply in replies.values()) / examples
        if loss < server.state.lowest_loss:
            server.state.best_model, server.state.lowest_loss = server.model, loss

    def synthesize(self, server: Server[LANDERServerState]) -> Data:
        """Return images of all old classes, generated from the last model before its head is expanded."""
        config = inversion_config(self, w_batch_norm=1.0, student_batch_size=128, student_lr=0.1)
        inverter = TextInverter(
            config, inversion_problem(server), self.read_anchors(server), self.w_bounding, self.radius
        )
        return inverter.synthesize(config.num_batches, num_discarded=self.warmup)

    def replay_loss(self, server: Server[LANDERServerState]) -> Loss:
        """Return A * w_bounding * the bounding loss + B (KD[old] + MSE of features)."""
        own_factor, old_factor = self.loss_factors(server.num_old_classes, server.num_classes)
        bounding = Scaled(own_factor * self.w_bounding, BoundingLoss(self.read_anchors(server), self.radius))
        if not server.num_old_classes:
            return bounding
        features = Scaled(old_factor, FeatureMSE(server.model, dataset_index=1))
        return bounding + distill_old_classes(server.model, old_factor, TAU, dataset_index=1) + features

    def loss_factors(self, num_old: int, num_classes: int) -> tuple[float, float]:
        """Return A and B."""
        if not num_old:
            return 1.0, 0.0
        a, b = log2(num_classes / 2 + 1), sqrt(num_old / num_classes)
        return self.w_new * (1 + 1 / a) / b, self.w_old * a * b

    def read_anchors(self, server: Server[LANDERServerState]) -> Tensor:
        """Return the anchors of all classes known now, [classes, width], on the server's device."""
        head = server.model[WEIGHT]
        anchors = read_anchors(self.anchors, server.label_names)
        if anchors.shape[1] != head.shape[1]:
            raise ConfigError(
                f"LANDER compares features with anchors: this network's features are {head.shape[1]} wide, and the "
                f"vectors in {self.anchors!r} have {anchors.shape[1]} numbers. Use a model with features as wide, such "
                "as resnet18 for 512, or another embedding."
            )
        return anchors.to(head.device)

    @on_client
    def receive(self, client: Client[GeneratedReplay], replay: GeneratedReplay) -> None:
        """Keep the task's generated images, and the loss on them."""
        client.state.images, client.state.loss, client.state.batch_size = replay.images, replay.loss, replay.batch_size

    @on_client
    def train(self, client: Client[GeneratedReplay], model: Weights) -> Fit:
        """Train the global model on the client's own and on generated images."""
        state = client.state
        labels = Scaled(self.loss_factors(client.num_old_classes, client.num_classes)[0], label_loss(client, "new"))
        loss = labels + state.loss
        if not state.images:
            return client.fit(model, loss)
        return client.fit(model, loss, client.data, mark_generated(state.images), batch_sizes=(0, state.batch_size))
