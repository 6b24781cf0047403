"""What methods with synthetic images share: the server makes them as a task begins, and clients learn from them too."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import TypeVar

from fedkeep.aggregation import Fusion, fused
from fedkeep.algorithms.incremental import made
from fedkeep.interface import Algorithm, Client, Cohort, Data, Fit, Server, on_client
from fedkeep.interface.training import PassEnds
from fedkeep.losses import NOTHING, Objective
from fedkeep.models import Weights
from fedkeep.models.heads import shrunk
from fedkeep.options import option
from fedkeep.generation.inversion import Inversion, Problem


@dataclass
class Replay:
    """What a client trains on besides its own examples, in one task.

    Attributes
    ----------
    images : synthetic, of all old classes. lesson : what is learned from them; old models have been asked already
        unless images are augmented at random.
    batch : how many a step sees.
    """

    images: Data = field(default_factory=dict)
    lesson: Objective = NOTHING
    batch: int = 0


@dataclass
class Made:
    """What the server keeps: what it made for the task, who has it, and how many examples clients had on average."""

    replay: Replay = field(default_factory=Replay)
    holders: list[str] = field(default_factory=list)
    examples: float = 0.0


M = TypeVar("M", bound=Made, default=Made)


@dataclass(frozen=True)
class WithSynthetic(Inversion, Algorithm[M, Replay]):
    """Base of methods that replay old classes by synthetic images, which the server makes out of the last model.

    They are made once a task, from the seed and that model alone, and travel once to every client that is asked.
    ``pass_ends`` says with what a client's pass ends, its own examples or the shorter of both.
    """

    pass_ends: ClassVar[PassEnds] = "first"

    tau: float = option(2.0, "softmax temperature of what the old model teaches; there is no tau squared", low=1e-3)
    fusion: Fusion = option("uniform", "whether clients count by their examples, or all alike")

    def begin_task(self, server: Server[M], clients: Cohort) -> None:
        kept = server.state
        images = self.images(server) if server.old else {}
        lesson = server.settle(self.lesson(server), {}, images)
        kept.replay, kept.holders = Replay(images, lesson, self.batch(server)), []
        super().begin_task(server, clients)

    def round(self, server: Server[M], cohort: Cohort) -> None:
        kept = server.state
        kept.holders += cohort.without(kept.holders).ask(self.keep, kept.replay)
        replies = cohort.ask(self.train, server.model)
        self.note(server, replies)
        server.model = fused(replies, self.fusion)

    def note(self, server: Server[M], replies: Mapping[str, Fit]) -> None:
        """Keep what later tasks need to know of a round; ``server.model`` is still the model that was sent."""
        server.state.examples = sum(reply.examples for reply in replies.values()) / len(replies)

    @abstractmethod
    def images(self, server: Server[M]) -> Data:
        """Return synthetic images of all old classes, made from ``server.model``, which has not grown yet."""

    @abstractmethod
    def lesson(self, server: Server[M]) -> Objective:
        """Return what a task's clients learn besides the labels; synthetic images are its data set 1."""

    @abstractmethod
    def batch(self, server: Server[M]) -> int:
        """Return how many synthetic images a step sees."""

    @abstractmethod
    def labels(self, client: Client[Any]) -> Objective:
        """Return what a client learns of its own examples' labels."""

    @on_client
    def keep(self, client: Client[Replay], replay: Replay) -> None:
        """Keep the task's synthetic images, and what is to be learned from them."""
        client.state.images, client.state.lesson, client.state.batch = replay.images, replay.lesson, replay.batch

    @on_client
    def train(self, client: Client[Replay], model: Weights) -> Fit:
        """Train the global model on own and synthetic images side by side."""
        kept = client.state
        objective = self.labels(client) + kept.lesson
        if not kept.images:
            return client.fit(model, objective)
        sizes = (0, kept.batch)
        images = made(kept.images)
        return client.fit(model, objective, client.data, images, batch_sizes=sizes, pass_ends=self.pass_ends)

    def problem(self, server: Server[M]) -> Problem:
        """Return what is inverted: the last model, with a student that begins where the run did."""
        student = shrunk(server.initial, server.old)
        return Problem(
            server.network(server.model),
            server.network(student),
            server.old,
            server.format,
            server.rng("synthesis"),
        )
