"""TARGET: the server inverts its old model into images, on which that model teaches the old classes."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.algorithms.incremental.class_incremental import distill_old_classes, label_loss, mark_generated
from fedkeep.algorithms.incremental.generated_replay import (
    GeneratedReplay,
    InversionServerState,
    inversion_config,
    inversion_problem,
)
from fedkeep.generation.inversion import LatentInverter
from fedkeep.interface import Algorithm, Client, Cohort, Data, Fit, Server, on_client
from fedkeep.models import Weights
from fedkeep.options import option

RELEASED_BATCHES = 10  # that the released code generates for CIFAR-100, all within its warm-up


@dataclass(frozen=True)
class TARGET(Algorithm[InversionServerState, GeneratedReplay]):
    """Exemplar-free distillation: CE[new] on the client's examples + w_kd * KD[old] on generated images.

    The teacher is the last global model of the task before, from which the server has generated the images (see
    `fedkeep.generation.inversion.LatentInverter`). KD is the cross-entropy with the teacher's probabilities among the
    old classes, at temperature 2 and without tau squared. The first task is Finetune's, bit for bit. Clients get once
    a task ``num_images`` images and, unless images are augmented at random, the teacher's outputs in place of the
    teacher.

    As in the code, an epoch ends with the shorter of two: the client's examples in batches of the recipe's size, and
    the images in batches such that an average client would come to the end of ``num_images`` at the same time. Here
    that average is over the clients of the last round of the task before.

    The paper generates images until there are ``num_images``, challenged by a student that learns from them. The
    released code, with 10 batches and a warm-up of 20, never trains that student and has 2,560 images, but sizes
    batches as if it had all: ``compat=repo``. It keeps the batches of its warm-up, which are discarded here. It has a
    cosine schedule for the student's learning rate, which is left out: it would fall by 6 % here. Its options ``act``,
    ``reset_bn`` and ``reset_l0`` have no effect as it is released, and are left out too. Other settings are its values
    for CIFAR-100 (`InversionConfig`).
    """

    title = "TARGET"
    paper = "Zhang et al., 2023: TARGET, federated class-continual learning via exemplar-free distillation"
    needs = ("images",)
    reason_against_dp_sgd = (
        "TARGET trains on two data sets at once from the second task on, and DP-SGD takes one. Take FedLwF."
    )

    w_kd: float = option(25.0, "weight of the distillation on generated images", low=0.0)
    tau: float = option(2.0, "softmax temperature of the distillation; there is no tau squared", low=1e-3)
    compat: Literal["paper", "repo"] = option("paper", "`num_images` after a warm-up, or ten batches and no student")
    num_images: int = option(8000, "generated images", low=2)
    synthesis_batch_size: int = option(256, "images that are generated at a time", low=2)
    generator_steps: int = option(10, "steps of the generator for each batch of images", low=1)
    warmup: int = option(
        20, "batches that are discarded, before a student is trained and challenged", low=0, only=("compat", "paper")
    )
    generator_channels: int = option(64, "channels of the generator's last feature maps; twice as many before", low=1)
    student_steps: int = option(400, "steps of the student after each batch of images", low=0, only=("compat", "paper"))
    student_batch_size: int = option(256, "images in each of these", low=2, only=("compat", "paper"))
    aggregation: Aggregation = option("uniform", "whether clients count by their examples, or all alike")

    def idle_part(self, num_classes: int, num_tasks: int) -> str:
        return "with one task there are no old classes to distil" if num_tasks == 1 else ""

    def begin_task(self, server: Server[InversionServerState], clients: Cohort) -> None:
        state = server.state
        images = self.synthesize(server) if server.num_old_classes else {}
        loss = distill_old_classes(server.model if server.num_old_classes else {}, self.w_kd, self.tau, dataset_index=1)
        steps = ceil(state.examples_per_client / server.training.batch_size)
        batch_size = max(2, self.num_images // max(1, steps))  # batch norm cannot train on one image
        state.replay, state.receivers = GeneratedReplay(images, server.cache_teachers(loss, {}, images), batch_size), []
        super().begin_task(server, clients)

    def round(self, server: Server[InversionServerState], cohort: Cohort) -> None:
        state = server.state
        state.receivers = state.receivers + list(cohort.without(state.receivers).ask(self.receive, state.replay))
        replies = cohort.ask(self.train, server.model)
        state.examples_per_client = sum(reply.num_examples for reply in replies.values()) / len(replies)
        server.model = aggregate(replies, self.aggregation)

    def synthesize(self, server: Server[InversionServerState]) -> Data:
        """Return images of all old classes, generated from the last model before its head is expanded."""
        config, problem = inversion_config(self), inversion_problem(server)
        if self.compat == "repo":  # whose warm-up does not end
            config = replace(config, warmup=RELEASED_BATCHES)
            return LatentInverter(config, problem).synthesize(RELEASED_BATCHES, num_discarded=0)
        inverter = LatentInverter(config, problem)
        return inverter.synthesize(config.num_batches, num_discarded=self.warmup)

    @on_client
    def receive(self, client: Client[GeneratedReplay], replay: GeneratedReplay) -> None:
        """Keep the task's generated images, and the loss on them."""
        client.state.images, client.state.loss, client.state.batch_size = replay.images, replay.loss, replay.batch_size

    @on_client
    def train(self, client: Client[GeneratedReplay], model: Weights) -> Fit:
        """Train the global model on the client's own and on generated images."""
        state = client.state
        loss = label_loss(client, "new") + state.loss
        if not state.images:
            return client.fit(model, loss)
        images = mark_generated(state.images)
        return client.fit(
            model, loss, client.data, images, batch_sizes=(0, state.batch_size), epoch_ends_with="shortest"
        )
