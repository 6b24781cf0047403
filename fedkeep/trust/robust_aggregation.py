"""Robust aggregation of replies, before a method sees them, so that every method that averages models has it."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from statistics import median_low
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedkeep.aggregation import robust
from fedkeep.interface import Fit
from fedkeep.interface.pytree import replace_nodes
from fedkeep.models import Weights
from fedkeep.models.weights import distance, form_of, joint_norm
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round
from fedkeep.rounds.reply_store import ReplyStore, is_weights
from fedkeep.rounds.run_settings import MIN_FOR_MEDIAN, Defense
from fedkeep.rounds.state import SimulationState

log = logging.getLogger(__name__)
T = TypeVar("T")
KRUM = ("krum", "multi_krum")
"""The rules that are defined for less than half of the clients, see `max_byzantine`."""


class RobustAggregation(ReplyStep):
    """Applies the recipe's robust aggregation to models that were asked for together."""

    def __init__(self) -> None:
        self.left_out: list[str] = []
        self.less_robust: list[str] = []
        self.has_warned = False

    def applies(self, state: SimulationState) -> bool:
        return state.settings.defense.robust_aggregation != "mean"

    def reason_against(self, state: SimulationState) -> str:
        rule, reason = state.settings.defense.robust_aggregation, state.algorithm.reason_against_merging
        if rule in KRUM or not reason:
            return ""
        return (
            f"defense.robust_aggregation={rule} makes new values of those that clients return, and "
            f"{state.algorithm.name()} cannot bear that: {reason} Choose krum or multi_krum, or another method."
        )

    def begin_round(self, state: SimulationState, number: int) -> None:
        self.left_out, self.less_robust = [], []

    def combine(self, round: Round, replies: dict[str, Reply]) -> dict[str, Reply]:
        state, store = round.state, ReplyStore(round.state.weights_file)
        values = {client: reply.value for client, reply in replies.items()}
        sent = {client: reply.sent for client, reply in replies.items() if reply.sent is not None}
        if reason := reason_less_robust(values, sent, state.settings.defense):
            self.less_robust.append(reason)
            if not self.has_warned:
                log.warning(
                    "Round %d is less robust than asked: %s Further such rounds have it in their record.",
                    round.number,
                    reason,
                )
                self.has_warned = True
        kept = robust_replies(values, sent, state.settings.defense, store.keep, state.context.runner.parameters)
        for client, reply in replies.items():
            if client not in kept:
                self.left_out.append(client)
                if state.settings.defense.robust_aggregation in KRUM and isinstance(reply.value, Fit):
                    round.restore(reply)  # Krum did not choose it: what it trained never happened, for itself too
        return {client: replies[client].with_value(value) for client, value in kept.items()}

    def record(self, round: Round) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.less_robust:
            found["less_robust"] = list(dict.fromkeys(self.less_robust))
        return found | ({"left_out": self.left_out} if self.left_out else {})


def robust_replies(
    replies: Mapping[str, Any],
    sent: Mapping[str, Weights],
    defense: Defense,
    keep: Callable[[Fit], Fit] = lambda fit: fit,
    parameters: Collection[str] | None = None,
) -> dict[str, Any]:
    """Make replies robust against a minority of malicious clients.

    ``median`` and ``trimmed_mean`` put the robust model in the place of each client's, so that any mean of them is that
    model; numbers of steps and other tensors of the replies, such as SCAFFOLD's control variates, are treated alike.
    ``norm_clipping`` shortens updates to the median of their norms. ``krum`` and ``multi_krum`` keep one, or all but
    the assumed number of malicious clients. Norms and distances are those of parameters, since batch norm's statistics
    may move much farther than a training; norm clipping shortens the change of these by itself, and each further field
    of the replies.
    """
    fits = {client: reply for client, reply in replies.items() if isinstance(reply, Fit)}
    trained = {client: fit for client, fit in fits.items() if fit.num_steps}
    if defense.robust_aggregation == "mean" or len(trained) < MIN_FOR_MEDIAN or len(fits) < len(replies):
        return dict(replies)
    malicious = _assumed_byzantine(defense, len(trained))
    if defense.robust_aggregation in KRUM:
        count = 1 if defense.robust_aggregation == "krum" else len(trained) - malicious
        chosen = sorted(robust.select_krum([fit.model for fit in trained.values()], malicious, count, parameters))
        names = list(trained)
        return {names[position]: trained[names[position]] for position in chosen}
    if defense.robust_aggregation == "norm_clipping":
        return _clipped(fits, sent, keep, parameters)
    if defense.robust_aggregation == "median":
        return dict(_merged(trained, robust.coordinate_median))
    return dict(_merged(trained, partial(robust.trimmed_mean, cut=malicious)))


def reason_less_robust(replies: Mapping[str, Any], sent: Mapping[str, Weights], defense: Defense) -> str | None:
    """Say why replies are less robust than the recipe asks."""
    rule = defense.robust_aggregation
    fits = {client: reply for client, reply in replies.items() if isinstance(reply, Fit)}
    if rule == "mean" or not fits:
        return None
    if others := len(replies) - len(fits):
        return f"{rule} was not applied: {others} of {len(replies)} replies are no models."
    trained = sum(fit.num_steps > 0 for fit in fits.values())
    if trained < MIN_FOR_MEDIAN:
        return f"{rule} was not applied: it needs {MIN_FOR_MEDIAN} trained models, and there were {trained}."
    if rule == "norm_clipping" and (unknown := sum(client not in sent for client in fits)):
        return f"{rule} was not applied to {unknown} of {len(fits)} models, since their clients were sent no model."
    if rule in ("median", "norm_clipping"):
        return None
    if not defense.byzantine:
        return f"{rule} assumed no malicious client, since defense.byzantine=0."
    asked, assumed = defense.num_byzantine(trained), _assumed_byzantine(defense, trained)
    if assumed == asked:
        return None
    return f"{rule} assumed {assumed} malicious clients, not {asked}: more are not possible among {trained} models."


def _assumed_byzantine(defense: Defense, count: int) -> int:
    """Return how many of some trained models are assumed to be malicious; with Krum as many as it is defined for."""
    malicious = defense.num_byzantine(count)
    return min(malicious, robust.max_byzantine(count)) if defense.robust_aggregation in KRUM else malicious


def _merged(fits: Mapping[str, Fit], rule: robust.Rule) -> dict[str, Fit]:
    """Return the replies with each tensor replaced by what a rule makes of all clients' tensors.

    All tell the same number of steps: FedNova goes further than the models that it is given where these differ.
    """
    steps = median_low(fit.num_steps for fit in fits.values())
    nodes = {client: _tensors_of(fit) for client, fit in fits.items()}
    forms = {tuple(tuple(t.shape for t in form_of(node).values()) for node in found) for found in nodes.values()}
    if len(forms) > 1:  # what differs in form between clients cannot be merged: only models are
        model = robust.merge([fit.model for fit in fits.values()], rule)
        return {client: replace(fit, model=model, num_steps=steps) for client, fit in fits.items()}
    merged = [robust.merge(column, rule) for column in zip(*nodes.values(), strict=True)]
    return {client: replace(_replaced(fit, merged), num_steps=steps) for client, fit in fits.items()}


def _tensors_of(tree: Any) -> list[Weights]:
    """Return the tensors of a reply or a part of it: those with names together, each other one under the name ''."""
    found: list[Weights] = []
    replace_nodes(tree, _holds_tensors, lambda node: found.append({"": node} if isinstance(node, Tensor) else node))
    return found


def _replaced(tree: T, tensors: Sequence[Weights]) -> T:
    """Return a reply, or a part of it, with other tensors, in the order of `_tensors_of`."""
    remaining = iter(tensors)

    def following(node: Any) -> Any:
        return next(remaining)[""] if isinstance(node, Tensor) else next(remaining)

    return replace_nodes(tree, _holds_tensors, following)


def _holds_tensors(node: Any) -> bool:
    return isinstance(node, Tensor) or is_weights(node)


def _clipped(
    fits: Mapping[str, Fit],
    sent: Mapping[str, Weights],
    keep: Callable[[Fit], Fit],
    parameters: Collection[str] | None,
) -> dict[str, Any]:
    """Return the replies with updates no longer than the median norm of those that took steps.

    Parameters, buffers and each other field of the replies have a norm of their own.
    """
    known = {client: fit for client, fit in fits.items() if client in sent}
    trained = [fit for fit in fits.values() if fit.num_steps]
    form = form_of(next(iter(known.values())).model) if any(fit.num_steps for fit in known.values()) else {}
    floats = [name for name, tensor in form.items() if tensor.is_floating_point()]
    are_trained = {name: parameters is None or name in parameters for name in floats}
    groups = [[name for name in floats if are_trained[name] == value] for value in set(are_trained.values())]
    limits = [
        median_low(distance(fit.model, sent[client], names) for client, fit in known.items() if fit.num_steps)
        for names in groups
    ]
    others = [field.name for field in fields(next(iter(fits.values()))) if field.name != "model"]
    norms = {name: [joint_norm(_floats_of(getattr(fit, name))) for fit in trained] for name in others}
    other_limits = {name: median_low(found) for name, found in norms.items() if any(found)}

    def clipped(client: str, fit: Fit) -> Fit:
        changes = {name: _shortened(getattr(fit, name), limit) for name, limit in other_limits.items()}
        if client in known:
            changes["model"] = dict(fit.model)
            for names, limit in zip(groups, limits, strict=True):
                changes["model"] |= robust.clip_model(fit.model, sent[client], names, limit)
        return keep(replace(fit, **changes))

    return {client: clipped(client, fit) for client, fit in fits.items()}


def _floats_of(tree: Any) -> list[Tensor]:
    """Return the tensors below a node that are not integers."""
    named = [(node, name, form) for node in _tensors_of(tree) for name, form in form_of(node).items()]
    return [node[name] for node, name, form in named if form.is_floating_point()]


def _shortened(tree: Any, limit: float) -> Any:
    """Return a field of a reply whose tensors together are at most as long as a limit; all by the same factor."""
    tensors = _floats_of(tree)
    if not tensors:
        return tree
    remaining = iter(robust.clip_norm(tensors, [torch.zeros_like(tensor) for tensor in tensors], limit))
    nodes = [
        {name: next(remaining) if form.is_floating_point() else node[name] for name, form in form_of(node).items()}
        for node in _tensors_of(tree)
    ]
    return _replaced(tree, nodes)
