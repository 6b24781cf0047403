"""FT+KD, EWC+KD and LwF+KD on the generated images of each task's classes that FedDCL has, and nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedkeep.algorithms.heterogeneous.ewc_kd import EWCKD
from fedkeep.algorithms.heterogeneous.ft_kd import FTKD
from fedkeep.algorithms.heterogeneous.logit_exchange import PublicServerState
from fedkeep.algorithms.heterogeneous.lwf_kd import LwFKD
from fedkeep.algorithms.incremental.class_incremental import mark_generated
from fedkeep.algorithms.incremental.prototype_generation import (
    PrototypeOptions,
    PrototypeReply,
    find_prototypes,
    generate_images,
    validate_prototypes,
)
from fedkeep.interface import Cohort, Server
from fedkeep.options import option


@dataclass(frozen=True)
class FTKDOnGeneratedImages(PrototypeOptions, FTKD):
    """FT+KD (`FTKD`, which has the round) in which images that are generated as a task begins are the public set.

    With the same options they are FedDCL's images, so that the methods differ only in how they learn.
    """

    title = "FT+KD on generated images"
    needs = ("generator",)

    server_images_per_class: int = option(
        500, "generated images of each new class, on which logits are exchanged", low=1
    )

    def begin_task(self, server: Server[PublicServerState], clients: Cohort) -> None:
        super().begin_task(server, clients)
        generate_public_images(self, server, clients, self.server_images_per_class)

    def validate_reply(self, server: Server[PublicServerState], reply: Any, examples: int) -> str | None:
        if isinstance(reply, PrototypeReply):
            return validate_prototypes(server, reply, examples)
        return super().validate_reply(server, reply, examples)


@dataclass(frozen=True)
class EWCKDOnGeneratedImages(PrototypeOptions, EWCKD):
    """EWC+KD (`EWCKD`; `FTKD` has the round) in which images that are generated as a task begins are the public set."""

    title = "EWC+KD on generated images"
    needs = ("generator",)

    server_images_per_class: int = option(
        500, "generated images of each new class, on which logits are exchanged", low=1
    )

    def begin_task(self, server: Server[PublicServerState], clients: Cohort) -> None:
        super().begin_task(server, clients)
        generate_public_images(self, server, clients, self.server_images_per_class)

    def validate_reply(self, server: Server[PublicServerState], reply: Any, examples: int) -> str | None:
        if isinstance(reply, PrototypeReply):
            return validate_prototypes(server, reply, examples)
        return super().validate_reply(server, reply, examples)


@dataclass(frozen=True)
class LwFKDOnGeneratedImages(PrototypeOptions, LwFKD):
    """LwF+KD (`LwFKD`; `FTKD` has the round) in which images that are generated as a task begins are the public set."""

    title = "LwF+KD on generated images"
    needs = ("generator",)

    server_images_per_class: int = option(
        500, "generated images of each new class, on which logits are exchanged", low=1
    )

    def begin_task(self, server: Server[PublicServerState], clients: Cohort) -> None:
        super().begin_task(server, clients)
        generate_public_images(self, server, clients, self.server_images_per_class)

    def validate_reply(self, server: Server[PublicServerState], reply: Any, examples: int) -> str | None:
        if isinstance(reply, PrototypeReply):
            return validate_prototypes(server, reply, examples)
        return super().validate_reply(server, reply, examples)


def generate_public_images(
    method: PrototypeOptions, server: Server[PublicServerState], clients: Cohort, count: int
) -> None:
    """Generate ``count`` images of each of the task's classes as the public set, which no client has received."""
    prototypes = find_prototypes(method, server, clients)
    images = mark_generated(generate_images(server, [prototypes], count))
    server.state.generated, server.state.receivers = images, []
