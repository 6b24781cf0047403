"""What TARGET and LANDER share: images of old classes, which the server generates from its last model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedkeep.generation.inversion import InversionProblem
from fedkeep.interface import Data, Fit, Server
from fedkeep.losses import ZERO_LOSS, Loss
from fedkeep.models.heads import truncate


@dataclass
class GeneratedReplay:
    """What a client trains on besides its own examples, in one task.

    ``images``: Generated images of all old classes.
    ``loss``: The loss on them, as data set 1. Old models were evaluated on them already, unless images are augmented at
        random.
    ``batch_size``: Generated images a step.
    """

    images: Data = field(default_factory=dict)
    loss: Loss = ZERO_LOSS
    batch_size: int = 0


@dataclass
class InversionServerState:
    """What the server keeps.

    ``replay``: What it generated for the task.
    ``receivers``: The clients that have received it.
    ``examples_per_client``: The average number of a client's examples in the last round.
    """

    replay: GeneratedReplay = field(default_factory=GeneratedReplay)
    receivers: list[str] = field(default_factory=list)
    examples_per_client: float = 0.0


def inversion_problem(server: Server[Any]) -> InversionProblem:
    """Return what is inverted: the last model, with a student that has the run's initial weights."""
    student = truncate(server.initial_model, server.num_old_classes)
    return InversionProblem(
        server.network(server.model),
        server.network(student),
        server.num_old_classes,
        server.image_format,
        server.rng("synthesis"),
    )


def mean_examples_per_client(replies: Mapping[str, Fit]) -> float:
    """Return the average number of examples of the clients that replied."""
    return sum(reply.num_examples for reply in replies.values()) / len(replies)
