"""Functions that sequential methods with teachers call: choosing them, and asking them while a client waits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fedkeep.interface import Client, Server
from fedkeep.losses import ZERO_LOSS, Distillation, Loss, PerTeacher, Scale, WeightRule
from fedkeep.losses.discrepancy import Discrepancy, proportions, select_complementary
from fedkeep.models import Weights

TeacherSelection = Literal["greedy", "random"]


@dataclass
class PreviousRound:
    """What the server keeps from round to round.

    ``models``: The models of the last round by client, in the order in which the clients trained, each right after it
        did.
    ``label_counts``: [classes] by client, of all clients that ever took part.
    """

    models: dict[str, Weights] = field(default_factory=dict)
    label_counts: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class PreparedDistillation:
    """What a client keeps from `prepare` to `train`.

    ``distillation``: Its teachers' part of the loss.
    """

    distillation: Loss = ZERO_LOSS


def select_teachers(
    server: Server[PreviousRound], count: int, selection: TeacherSelection, metric: Discrepancy
) -> list[str]:
    """Choose the round's teachers among the clients of the last round whose models beat chance.

    ``server``: Keeps the candidates' models and label counts.
    ``count``: How many teachers there shall be.
    ``selection``: ``greedy`` is SFedKD's algorithm 1: together the teachers cover the classes evenly. ``random`` is the
        baseline of its table 3.
    ``metric``: How the distance from even coverage is measured.
    Returns: The teachers' client ids; fewer than ``count`` if there are fewer candidates.
    """
    state = server.state
    candidates = [name for name, model in state.models.items() if server.may_teach(model, state.label_counts[name])]
    if selection == "random":
        order = torch.randperm(len(candidates), generator=server.rng("teachers")).tolist()
        return [candidates[i] for i in order[:count]]
    shares = {client: proportions(state.label_counts[client]) for client in candidates}
    return select_complementary(candidates, shares, count, metric)


def log_teachers(server: Server[Any], teachers: Sequence[str], rules: Sequence[PerTeacher] = ()) -> None:
    """Record who teaches in this round, and how much on average.

    ``server``: Whose record gets ``teachers``, and with weights ``target_weights`` and ``nontarget_weights``.
    ``teachers``: Client ids; nothing is recorded without any.
    ``rules``: The weights of the teachers for each student of the round.
    """
    if teachers:
        server.log("teachers", list(teachers))
        if rules:
            for name in ("target", "nontarget"):
                means = torch.stack([getattr(rule, name) for rule in rules]).mean(0)
                server.log(f"{name}_weights", [round(weight, 4) for weight in means.tolist()])


def prepare_distillation(
    client: Client[PreparedDistillation], teachers: Sequence[Weights], rule: WeightRule | None, tau: float, scale: Scale
) -> None:
    """Compute the teachers' outputs on a client's examples, and keep them until it trains.

    ``rule``: How they are weighted; None without teachers.
    ``scale``: Whether the distillation is multiplied by tau squared.
    """
    distillation = ZERO_LOSS if rule is None else Distillation(tuple(teachers), rule, tau, scale)
    client.state.distillation = client.cache_teachers(distillation)


def take_distillation(client: Client[PreparedDistillation]) -> Loss:
    """Return what `prepare_distillation` kept, and forget it."""
    distillation, client.state.distillation = client.state.distillation, ZERO_LOSS
    return distillation
