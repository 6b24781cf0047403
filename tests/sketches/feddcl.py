"""FedDCL on the real interface: models stay at home; predictions on images that the server made travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedkeep.interface import Algorithm, Client, Cohort, Server, on_client
from fedkeep.interface.party import Party
from fedkeep.models import Weights
from fedkeep.objectives import Batch, Data, Objective, Student
from fedkeep.options import option


@dataclass(frozen=True, eq=False)
class Slice(Objective):
    """Cross-entropy among the classes first..last-1 of data set ``on``, with its labels or, tempered, its answers."""

    first: int
    last: int
    on: int = 0
    tau: float | None = None

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.on]
        logits = student.logits(batch)[:, self.first : self.last]
        if self.tau is None:
            return cross_entropy(logits, batch.data["label"] - self.first)
        return cross_entropy(logits / self.tau, batch.data["answer"])


@dataclass
class Images:
    """What everybody keeps: the task's images, those of earlier tasks, an old model, and how many classes are old."""

    current: Data = field(default_factory=dict)
    previous: Data = field(default_factory=dict)  # a client's with ``answer``, its own old model's
    old: Weights | None = None
    known: int = 0


@dataclass
class Bank(Images):
    """What the server keeps besides: who has the task's images."""

    welcomed: list[str] = field(default_factory=list)


@dataclass
class Own(Images):
    """What a client keeps besides: its model."""

    model: Weights | None = None


@dataclass(frozen=True)
class FedDCL(Algorithm[Bank, Own]):
    """Data-free continual learning: local training on real and made images, distillation both ways on made ones."""

    title = "Sketch FedDCL"

    images: int = option(4, "images made per class", low=1)
    tau: float = option(2.0, "softmax temperature", low=1e-3)

    def begin_task(self, server: Server[Bank], clients: Cohort) -> None:
        super().begin_task(server, clients)
        kept = server.state
        prototypes = torch.stack(list(clients.ask(self.invert, kept.known).values())).mean(0)  # eqs. 4, 5: many times
        noise = torch.rand(self.images, *prototypes.shape, generator=server.rng("synthesis")).to(prototypes.device)
        labels = torch.arange(kept.known, server.classes, device=prototypes.device).repeat(self.images)
        made = (prototypes / 2 + 127 * noise).flatten(0, 1).to(torch.uint8)  # in place of a diffusion model
        kept.current, kept.welcomed = {"image": made, "label": labels}, []

    def round(self, server: Server[Bank], cohort: Cohort) -> None:
        kept = server.state
        new = cohort.without(kept.welcomed)
        kept.welcomed += new.ask(self.keep, server.model, kept.current, kept.previous, kept.known)
        answer = self.told(torch.stack(list(cohort.ask(self.local).values()))).mean(0)
        old = self.told(server.predict(kept.old, kept.previous)[:, : kept.known]) if kept.old else None
        server.model = self.distil(server, server.model, answer, old, passes=2)
        cohort.ask(self.feedback, answer, old)

    def end_task(self, server: Server[Bank], clients: Cohort) -> None:
        kept = server.state
        kept.old, kept.known, kept.previous = server.model, server.classes, joined(kept.previous, kept.current)
        clients.ask(self.remember)

    def told(self, logits: Tensor) -> Tensor:
        """Return tempered probabilities."""
        return (logits / self.tau).softmax(-1)

    def distil(self, party: Party[Any], model: Weights, answer: Tensor, old: Tensor | None, passes: int) -> Weights:
        """Return a model taught what all clients said of the task's images, and the old server of the others."""
        kept: Images = party.state
        loss, sets = Slice(kept.known, party.classes, tau=self.tau), [{**kept.current, "answer": answer}]
        if old is None:
            return party.fit(model, loss, *sets, passes=passes).model
        sets.append({**kept.previous, "answer": old})
        return party.fit(model, loss + Slice(0, kept.known, on=1, tau=self.tau), *sets, passes=passes).model

    @on_client
    def invert(self, client: Client[Own], known: int) -> Tensor:
        """Return a prototype for each new class, here its mean image: [new classes, channels, height, width]."""
        images, labels = client.data["image"].float(), client.data["label"] - known
        count = client.classes - known
        sums = images.new_zeros(count, *images.shape[1:]).index_add(0, labels, images)
        return sums / labels.bincount(minlength=count).clamp(min=1).view(-1, 1, 1, 1)

    @on_client
    def keep(self, client: Client[Own], start: Weights, current: Data, previous: Data, known: int) -> None:
        """Keep the task's images, and what the own old model says of those before; a newcomer begins at ``start``."""
        kept = client.state
        kept.model = kept.model or start  # an architecture of its own would have an initial model of its own
        kept.current, kept.previous, kept.known = current, previous, known
        if kept.old:
            kept.previous = {**previous, "answer": self.told(client.predict(kept.old, previous)[:, :known])}

    @on_client
    def local(self, client: Client[Own]) -> Tensor:
        """Train the own model on real and made images; say what it thinks of the made ones: [n, new classes]."""
        kept = client.state
        assert kept.model is not None
        loss: Objective = Slice(kept.known, client.classes)
        sets = [joined(client.data, kept.current)]
        if kept.old:
            loss = loss + Slice(0, kept.known, on=1) + Slice(0, kept.known, on=1, tau=self.tau)
            sets.append(kept.previous)
        kept.model = client.fit(kept.model, loss, *sets).model
        return client.predict(kept.model, kept.current)[:, kept.known : client.classes]

    @on_client
    def feedback(self, client: Client[Own], answer: Tensor, old: Tensor | None) -> None:
        """Learn what all clients together think of the task's images, and the old server of the others."""
        assert client.state.model is not None
        client.state.model = self.distil(client, client.state.model, answer, old, passes=1)

    @on_client
    def remember(self, client: Client[Own]) -> None:
        """Keep the task's last model as a teacher of the next."""
        client.state.old = client.state.model


def joined(*parts: Data) -> Data:
    """Return the images and labels of several sets, one after the other."""
    return {name: torch.cat([part[name] for part in parts if part]) for name in ("image", "label")}
