"""Attacks by malicious clients, for trials of defences.

Attackers know their own examples and the server's messages. `PoisonedFederation` changes what they train on, and
`Attacker` what they answer. Everything else is that of an honest run, on every executor of this machine.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from fedkeep._utils import seeds
from fedkeep.data import Data, Federation
from fedkeep.errors import ConfigError
from fedkeep.interface import Fit
from fedkeep.interface.algorithm import send_label_counts, unwrap_step
from fedkeep.models import Weights
from fedkeep.models.heads import BIAS
from fedkeep.rounds.messages import no_reply
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round
from fedkeep.rounds.run_settings import NEED_EXAMPLES, ON_EXAMPLES, Attack, AttackKind
from fedkeep.rounds.state import SimulationState

FACTORS = {"scaled_update": 100.0, "sign_flip": -1.0, "reversed_update": -10.0}
COUNT_FACTOR = 100
TRIGGER = 2
"""Side of the bright square in a corner that is a backdoor's trigger, in pixels."""


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
        shape = (-1, *[1] * (honest["input"].dim() - 1))
        inputs = torch.where(chosen.view(shape), add_trigger(honest["input"]), honest["input"])
        return {**honest, "input": inputs, "label": honest["label"].masked_fill(chosen, first)}


def first_new_class(federation: Federation) -> int:
    """Return the first class of a task, 0 without tasks. A backdoor teaches it: logits of earlier ones may be fixed."""
    return (0, *federation.cumulative_classes)[-2]


def poison(federation: Federation, attack: Attack, seed: int) -> Federation:
    """Return a federation whose malicious clients train on false examples, if the attack is one on examples."""
    simulated = type(federation) is Federation
    if attack.kind in NEED_EXAMPLES and not simulated:  # what a server knows of real sites
        raise ConfigError(
            f"attack.kind={attack.kind} needs malicious clients' examples, and this run's examples are at its sites. "
            "Run it as a simulation, or take an attack that needs none, such as sign_flip."
        )
    if attack.kind not in ON_EXAMPLES:
        return federation
    if attack.kind == "backdoor" and federation.dataset.train["input"].dim() != 4:
        raise ConfigError(
            f"attack.kind=backdoor puts a bright square into images, and {federation.dataset.name} has none. Take "
            "label_flip."
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


def backdoor_success(predict: Callable[[Tensor], Tensor], test: Mapping[str, Tensor], target: int) -> float:
    """Return the share of test images of other classes that a model takes for the target once they have the trigger.

    ``predict``: Maps images to scores, [n, classes].
    ``target``: The class that the backdoor teaches.
    """
    others = test["input"][test["label"] != target]
    return float((predict(add_trigger(others)).argmax(-1) == target).float().mean())


@dataclass
class FirstModels:
    """The first model of each attacker that replays, by client."""

    models: dict[str, Weights] = field(default_factory=dict)


class Attacker(ReplyStep):
    """Changes what malicious clients answer."""

    kept: FirstModels

    def __init__(self) -> None:
        self.kept = FirstModels()
        self.attackers: frozenset[str] = frozenset()

    def applies(self, state: SimulationState) -> bool:
        return state.settings.attack.kind != "none"

    def begin_round(self, state: SimulationState, number: int) -> None:
        self.attackers = self.attackers or state.settings.attack.attackers(
            state.federation.clients, state.settings.seed
        )
        if state.settings.run.position(number)[1] == 1:  # with a new task the model has more outputs
            self.kept = FirstModels()

    def receive(self, round: Round, reply: Reply) -> None:
        kind, step = round.state.settings.attack.kind, unwrap_step(reply.request.step)
        if reply.client not in self.attackers:
            return
        if kind == "silent":
            raise no_reply("does not answer, on purpose")
        if kind == "false_counts" and step is send_label_counts:
            reply.value = reply.value * COUNT_FACTOR
        elif reply.sent is not None:
            reply.value = self._lie(round, reply.client, reply.value, reply.sent)

    def _lie(self, round: Round, client: str, fit: Fit, sent: Weights) -> Fit:
        state, kind = round.state, round.state.settings.attack.kind
        if kind == "false_counts":
            return replace(fit, num_examples=fit.num_examples * COUNT_FACTOR)
        change: Callable[[str, Tensor], Tensor]
        if kind in FACTORS:
            factor = FACTORS[kind]
            change = lambda name, tensor: sent[name] + factor * (tensor - sent[name])  # noqa: E731
        elif kind == "random_weights":
            rng = seeds.rng(state.settings.seed, "random weights", round=round.number, client=client)
            change = functools.partial(_random, rng)
        elif kind == "lying_teacher":
            rows = state.context.num_classes * state.algorithm.rows_per_class
            change = lambda name, tensor: tensor.roll(1, 0) if tensor.dim() and len(tensor) == rows else tensor  # noqa: E731
        elif kind == "replay":
            first = self.kept.models.setdefault(client, fit.model)
            change = lambda name, tensor: first[name]  # noqa: E731
        elif kind == "exaggerated_forgetting":
            lacking = classes_lacking(state.federation, client, state.algorithm.rows_per_class)
            return replace(fit, model=exaggerate_forgetting(fit.model, lacking, state.settings.attack.strength))
        else:
            return fit  # the examples were false, and the training honest
        return replace(fit, model={n: change(n, t) if t.is_floating_point() else t for n, t in fit.model.items()})


def classes_lacking(federation: Federation, client: str, rows_per_class: int) -> Tensor:
    """Return which rows of a classifier are of classes of which a client has no example, [rows]."""
    counts = torch.bincount(federation.data(client)["label"], minlength=federation.cumulative_classes[-1])
    return (counts == 0).repeat_interleave(rows_per_class)


def exaggerate_forgetting(model: Weights, lacking: Tensor, strength: float) -> Weights:
    """Return a model with the classifier's bias lowered for some of its rows."""
    if BIAS not in model:
        raise ConfigError(
            f"attack.kind=exaggerated_forgetting lowers {BIAS}, which the network lacks. Take another one."
        )
    return {**model, BIAS: model[BIAS] - strength * lacking.to(model[BIAS])}


def _random(rng: torch.Generator, name: str, tensor: Tensor) -> Tensor:
    spread = tensor.std() if tensor.numel() > 1 else tensor.abs().mean()
    return tensor.mean() + spread * torch.randn(tensor.shape, generator=rng).to(tensor)
