"""FedDCL: a server learns task after task from clients of other networks, through images that prototypes describe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fedkeep.algorithms.drawn import Gallery, WithDrawn, for_steps
from fedkeep.algorithms.incremental import joined, made
from fedkeep.algorithms.said import Ensemble, Said, averaged, bounded
from fedkeep.interface import Client, Cohort, Copy, Data, Server, each, on_client
from fedkeep.interface.party import Party
from fedkeep.losses import NOTHING, CrossEntropy, Objective
from fedkeep.losses.answers import taught
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass
class Shown:
    """Drawn images, equally many of each class, in order of classes; and what the server's old model says of those of
    old classes from which it is learned, logits [images, old classes], empty in the first task."""

    pool: Data = field(default_factory=dict)
    answers: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


@dataclass
class Archive(Gallery):
    """What the server keeps: also those answers, and its model of the task before."""

    answers: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    old: Weights = field(default_factory=dict)


@dataclass
class Visitor(Shown):
    """What a client keeps: also its own model, and that before the task."""

    model: Weights = field(default_factory=dict)
    old: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class FedDCL(WithDrawn[Archive, Visitor]):
    """Data-free continual learning (Algorithm 1, its slips corrected): examples stay at home, and weights too.

    *As a task begins* (eqs. 4, 5) clients look for the prototype of each new class under a frozen diffusion model, and
    the server averages them, ``proto_rounds`` times. The server then draws images of the new classes, once for all
    rounds (section V-D), and shows them to the clients. The printed algorithm draws them anew in every update; nearest
    to that is ``regen=per_round``, which draws and shows those of all classes in every round.

    *A round*: a client trains its own model by CE[new] on its examples and made images, and, on made images of old
    classes, w_ce_pre CE[old] + w_kd KD[old] from its own model of the task before (eqs. 6 to 8). It says what it thinks
    of the server's made images of new classes. The server learns their mean there, and what its own old model says of
    old classes (eqs. 9 to 11); then the clients do (eq. 12). With ``exchange=models`` clients send their models
    instead, and the server, which then knows their networks, asks these: the numbers are the same. With
    ``server_loss=labels`` it learns the made images' labels alone, the control that tells what the images are worth.

    Read literally, eqs. 6, 7, 9 and 10 put softmaxes over old and over new outputs apart (``head=sliced``), and nothing
    tells an old class from a new one. With ``head=joint`` labels and what was said are learned by a softmax over all
    outputs, in which classes that are not spoken of have probability zero: at clients, at the server and in feedback.
    The first task is the same either way, and so are the control's labels at the server, which are among all.

    The paper prints no temperature: 2 without tau^2 (``kd_scale``), as in the code of DDDR, which it builds on, whose
    w_ce_pre is 1/2, w_kd 10 and w_scl 1. Counts of images are read per class (DDDR has cur=50 and pre=200), inner
    "rounds" as passes, local ones as the recipe's epochs; ``inner_unit=step`` takes both for steps. The optimiser of
    prototypes is DDDR's too; the paper's grey images are drawn by ddpm in 500 steps. By default one pool of images
    serves all four sets, each the first of a class. Private and made images are augmented alike, but for brightness.
    One generator draws all tasks, or each has its own (``generator.by_task``). Examples and old classes' images pass a
    network one after the other, as in DDDR, or with ``bn_joint`` at once.
    """

    title = "FedDCL"
    paper = "FedDCL, 2025 (arXiv 2509.25977): federated data-free continual learning with diffusion prototypes"
    networks = "any"

    ensemble: Ensemble = option("prob", "the clients' mean is one of probabilities, or of logits")
    exchange: Literal["predictions", "models"] = option("predictions", "what clients send of what they learned")
    server_loss: Literal["kd", "labels"] = option("kd", "the server learns what clients say, or the labels of images")
    server_passes: int = option(2, "of the server over made images (Q k to s)", low=0)
    feedback_passes: int = option(1, "of the clients over them afterwards (Q s to k)", low=0)
    inner_unit: Literal["pass", "step"] = option("pass", "what these two, and the recipe's epochs, count")
    pass_len: Literal["longer", "shorter"] = option("longer", "a pass is over new or old classes' images")
    server_cur: int = option(500, "made images of each new class for the server, and for feedback", low=1)
    server_pre: int = option(500, "made images of each old class there", low=1)
    pools: Literal["shared", "independent"] = option("shared", "whether the server's are the clients' too, or others")
    regen: Literal["per_task", "per_round"] = option("per_task", "when images are made")

    def begin_task(self, server: Server[Archive], clients: Cohort) -> None:
        super().begin_task(server, clients)
        self.draw_new(server, clients)
        self.ask_old(server)

    def ask_old(self, server: Server[Archive]) -> None:
        """Keep what the server's old model says of made images of old classes."""
        kept = server.state
        if server.old:
            replayed = self.server_part(server, 0, server.old, self.server_pre)
            kept.answers = server.predict(kept.old, replayed)[:, : server.old]

    def round(self, server: Server[Archive], cohort: Cohort) -> None:
        kept = server.state
        if self.regen == "per_round" and server.round > 1:
            kept.pool, kept.shown = self.draw(server, kept.prototypes, self.images(server)), {}
            self.ask_old(server)
        fresh = {client: Shown(pool, kept.answers) for client, pool in self.unseen(server, cohort).items()}
        got = cohort.ask(self.receive, each(fresh)) if fresh else ()
        kept.shown = kept.shown | dict.fromkeys(got, server.classes)
        said = averaged([bounded(z) for z in self.replies(server, cohort)], self.tau, self.ensemble)
        if self.server_loss == "kd":
            server.model = self.distilled(server, server.model, said, self.server_passes)
        else:
            everything = self.server_part(server, 0, server.classes, self.server_cur)
            data, passes = self.gone_through(server, made(everything), self.server_passes)
            server.model = server.fit(server.model, CrossEntropy(), data, passes=passes).model
        cohort.start(self.feedback, said)

    def replies(self, server: Server[Archive], cohort: Cohort) -> list[Tensor]:
        """Let clients learn; return what each of their models says of the server's images of new classes."""
        if self.exchange == "predictions":
            return [reply.logits for reply in cohort.ask(self.learn).values()]
        shown = self.server_part(server, server.old, server.classes, self.server_cur)
        copies = cohort.ask(self.send).items()
        return [server.predict_as(client, copy.model, shown)[:, server.old :] for client, copy in copies]

    def end_task(self, server: Server[Archive], clients: Cohort) -> None:
        server.state.old = server.model
        clients.ask(self.remember)

    def fault(self, server: Server[Archive], reply: Any, examples: int) -> str | None:
        if isinstance(reply, Said):
            new = server.classes - server.old
            wanted = (new * self.per_class(self.server_cur, new), new)
            if reply.logits.shape != wanted or reply.logits.dtype != torch.float32:
                return f"logits of shape {list(reply.logits.shape)} in {reply.logits.dtype}, not {list(wanted)}"
        return super().fault(server, reply, examples)

    def own_model(self, state: Visitor) -> Weights:
        return state.model

    @on_client
    def receive(self, client: Client[Visitor], shown: Shown) -> None:
        """Keep images of classes that the client had none of, or of all, and what the old server says of old ones."""
        kept, anew = client.state, not int(shown.pool["label"][0])
        kept.pool, kept.answers = shown.pool if anew else joined(kept.pool, shown.pool), shown.answers

    @on_client
    def learn(self, client: Client[Visitor]) -> Said:
        """Train the own model, and tell what it thinks of the server's images of new classes."""
        model = self.trained(client)
        shown = self.server_part(client, client.old, client.classes, self.server_cur)
        return Said(client.predict(model, shown)[:, client.old :])

    @on_client
    def send(self, client: Client[Visitor]) -> Copy:
        """Train the own model, and hand out a copy of it."""
        return Copy(self.trained(client))

    def trained(self, client: Client[Visitor]) -> Weights:
        """Train the own model on examples and made images, keep it and return it (eqs. 6 to 8)."""
        kept = client.state
        start = client.grown(kept.model) if kept.model else client.initial
        past = self.replayed(kept.old)
        steps = client.training.epochs if self.inner_unit == "step" else 0
        kept.model = self.practised(client, start, kept.pool, past, steps).model
        return kept.model

    @on_client
    def feedback(self, client: Client[Visitor], said: Tensor) -> None:
        """Learn what all clients think of new classes' images, and the old server of old ones' (eq. 12)."""
        client.state.model = self.distilled(client, client.state.model, said, self.feedback_passes)

    @on_client
    def remember(self, client: Client[Visitor]) -> None:
        """Keep the task's last model as a teacher of the next."""
        client.state.old = client.state.model

    def distilled(self, party: Party[Any], model: Weights, said: Tensor, passes: int) -> Weights:
        """Return a model that has learned what was said of both sets of images (eq. 11)."""
        old = party.old
        parts = [(old, self.server_part(party, old, party.classes, self.server_cur), said)]
        if old:
            parts.append((0, self.server_part(party, 0, old, self.server_pre), party.state.answers))
        parts.sort(key=lambda part: len(part[2]), reverse=self.pass_len == "longer")
        lesson: Objective = NOTHING
        shown, times = [], passes
        for number, (start, images, logits) in enumerate(parts):
            data, times = self.gone_through(party, {**images, "said": logits}, passes)
            outputs = party.classes if self.head == "joint" else 0
            term = taught(data["said"], data, self.tau, start=start, on=number, scale=self.kd_scale, outputs=outputs)
            lesson = lesson if term is NOTHING else lesson + term
            shown.append(made(data))
        return model if lesson is NOTHING else party.fit(model, lesson, *shown, passes=times).model

    def gone_through(self, party: Party[Any], data: Data, count: int) -> tuple[Data, int]:
        """Return what an inner count goes through, and in how many passes."""
        return (data, count) if self.inner_unit == "pass" else (for_steps(party, data, count), 1)

    def server_part(self, party: Party[Any], start: int, stop: int, count: int) -> Data:
        """Return the server's images of each class from ``start`` to ``stop - 1``."""
        skip = 0 if self.pools == "shared" else super().images(party)
        return self.part(party.state.pool, start, stop, count, skip)

    def images(self, party: Party[Any]) -> int:
        new, seen = party.classes - party.old, party.classes
        clients = super().images(party)
        server = max(self.per_class(self.server_cur, new), self.per_class(self.server_pre, seen))
        return max(clients, server) if self.pools == "shared" else clients + server
