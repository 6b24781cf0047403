"""Attacks by malicious clients, for trials of defences: the section ``[attack]`` of a recipe.

Attackers know their own examples and the server's messages. `PoisonedFederation` changes what they train on, and
`Attacker.tamper` what they answer. Everything else is that of an honest run, on every executor of this machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from torch import Tensor

from fedkeep._utils import seeds
from fedkeep.data import Data, Federation
from fedkeep.errors import ConfigError
from fedkeep.interface import Fit
from fedkeep.interface.algorithm import unwrap_step
from fedkeep.interface.steps import rise_of_loss, send_label_counts
from fedkeep.models import Weights
from fedkeep.options import Options, option
from fedkeep.simulation.messages import ClientFailure, StepRequest, StepResult, sent_model

AttackKind = Literal[
    "none",
    "silent",
    "scaled_update",
    "sign_flip",
    "reversed_update",
    "random_weights",
    "label_flip",
    "backdoor",
    "lying_teacher",
    "replay",
    "false_counts",
]
"""What attackers do.

``silent``: they do not answer at all, which is what a perfect defence would leave. ``scaled_update``: their update
times 100; ``sign_flip``: times -1; ``reversed_update``: times -10. ``random_weights``:
normal values with each tensor's mean and standard deviation. ``label_flip``: they train on the task's labels in
reverse, C - 1 - y without tasks. ``backdoor``: they teach that images with a bright corner are of the task's first
class, 0 without tasks. ``lying_teacher``: their model answers each
class with the next one. ``replay``: they send their first model again and again. ``false_counts``: they tell 100 times
their numbers of examples.
"""

FACTORS = {"scaled_update": 100.0, "sign_flip": -1.0, "reversed_update": -10.0}
COUNT_FACTOR = 100
TRIGGER = 2
"""Side of the bright square in a corner that is a backdoor's trigger, in pixels."""
ON_EXAMPLES = ("label_flip", "backdoor")
"""Attacks on what malicious clients train on; the others are on what they answer."""


@dataclass(frozen=True)
class Attack(Options):
    """Malicious clients, for trials of defences: the section ``[attack]`` of a recipe."""

    kind: AttackKind = option("none", "what malicious clients do")
    share: float = option(0.2, "share of all clients that are malicious, drawn by the seed", low=0.0, high=1.0)

    def attackers(self, clients: Collection[str], seed: int) -> frozenset[str]:
        """Draw the malicious clients.

        Returns: Their ids; none without an attack.
        """
        if self.kind == "none":
            return frozenset()
        listed = list(clients)
        order = torch.randperm(len(listed), generator=seeds.rng(seed, "attackers")).tolist()
        return frozenset(listed[i] for i in order[: round(self.share * len(listed))])


@dataclass(frozen=True, eq=False)
class PoisonedFederation(Federation):
    """A federation some of whose clients train on false examples."""

    kind: AttackKind = "none"
    attackers: Collection[str] = field(default_factory=frozenset)

    def data(self, client: str) -> Data:
        honest = super().data(client)
        if client not in self.attackers:
            return honest
        first = first_new_class(self)
        if self.kind == "label_flip":
            return {**honest, "label": first + self.cumulative_classes[-1] - 1 - honest["label"]}
        chosen = torch.arange(len(honest["label"]), device=honest["label"].device) % 2 == 0
        inputs = torch.where(_like(chosen, honest["input"]), add_trigger(honest["input"]), honest["input"])
        return {**honest, "input": inputs, "label": honest["label"].masked_fill(chosen, first)}


def first_new_class(federation: Federation) -> int:
    """Return the first class of a federation's task, which a backdoor teaches: others' logits may be untrained."""
    return (0, *federation.cumulative_classes)[-2]


def poison(federation: Federation, attack: Attack, seed: int) -> Federation:
    """Return a federation whose malicious clients train on false examples, if the attack is one on examples."""
    if attack.kind not in ON_EXAMPLES:
        return federation
    if type(federation) is not Federation:  # what a server or a site knows of real sites
        raise ConfigError(
            f"attack.kind={attack.kind} changes what malicious clients train on, and this run's examples are at its "
            "sites. Run it as a simulation, or take an attack on what clients answer, such as sign_flip."
        )
    same = {one.name: getattr(federation, one.name) for one in fields(Federation)}
    return PoisonedFederation(**same, kind=attack.kind, attackers=attack.attackers(federation.clients, seed))


def add_trigger(images: Tensor) -> Tensor:
    """Return images with a bright square in the last corner.

    ``images``: [n, channels, height, width], uint8.
    """
    changed = images.clone()
    changed[..., -TRIGGER:, -TRIGGER:] = images.max() if images.numel() else 0
    return changed


def _like(chosen: Tensor, images: Tensor) -> Tensor:
    return chosen.view(-1, *[1] * (images.dim() - 1))


def backdoor_success(predict: Callable[[Tensor], Tensor], test: Mapping[str, Tensor], target: int) -> float:
    """Return the share of test images of other classes that a model takes for the target once they have the trigger.

    ``predict``: Maps images to scores, [n, classes].
    ``target``: The class that the backdoor teaches.
    """
    others = test["input"][test["label"] != target]
    return float((predict(add_trigger(others)).argmax(-1) == target).float().mean())


class Attacker:
    """Changes what malicious clients answer.

    ``first_models``: The first model of each attacker that replays, by client; checkpoints keep them.
    """

    def __init__(self, attack: Attack, clients: Collection[str], seed: int) -> None:
        self.kind = attack.kind
        self.clients = attack.attackers(clients, seed)
        self.seed = seed
        self.first_models: dict[str, Weights] = {}

    def tamper(self, request: StepRequest, result: StepResult, number: int, rows: int) -> StepResult | ClientFailure:
        """Return what a malicious client sends instead of the result of its step.

        ``number``: The round, counted over the whole run.
        """
        if request.client not in self.clients:
            return result
        if self.kind == "silent":
            return ClientFailure("does not answer, on purpose")
        reply = result.reply
        if unwrap_step(request.step) is rise_of_loss:
            return replace(result, reply=-reply)  # it blames the honest, and clears its own
        if self.kind == "false_counts" and unwrap_step(request.step) is send_label_counts:
            return replace(result, reply=reply * COUNT_FACTOR)
        sent = sent_model(request, reply.model) if isinstance(reply, Fit) else None
        return result if sent is None else replace(result, reply=self._lie(request.client, reply, sent, number, rows))

    def _lie(self, client: str, fit: Fit, sent: Weights, number: int, rows: int) -> Fit:
        if self.kind == "false_counts":
            return replace(fit, num_examples=fit.num_examples * COUNT_FACTOR)
        change: Callable[[str, Tensor], Tensor]
        if self.kind in FACTORS:
            factor = FACTORS[self.kind]
            change = lambda name, tensor: sent[name] + factor * (tensor - sent[name])  # noqa: E731
        elif self.kind == "random_weights":
            rng = seeds.rng(self.seed, "random weights", round=number, client=client)
            change = functools.partial(_random, rng)
        elif self.kind == "lying_teacher":
            change = lambda name, tensor: tensor.roll(1, 0) if tensor.dim() and len(tensor) == rows else tensor  # noqa: E731
        elif self.kind == "replay":
            first = self.first_models.setdefault(client, fit.model)
            change = lambda name, tensor: first[name]  # noqa: E731
        else:
            return fit  # the examples were false, and the training honest
        return replace(fit, model={n: change(n, t) if t.is_floating_point() else t for n, t in fit.model.items()})


def _random(rng: torch.Generator, name: str, tensor: Tensor) -> Tensor:
    spread = tensor.std() if tensor.numel() > 1 else tensor.abs().mean()
    return tensor.mean() + spread * torch.randn(tensor.shape, generator=rng).to(tensor)
