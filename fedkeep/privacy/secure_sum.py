"""Secure aggregation: what the server sees of a round's models is their mean, and no single one.

A simulation adds up the same integers without masks. Sites mask them with SecAgg's protocol (`fedkeep.flower.secagg`),
and end with the same sum, in whatever order clients are added.

A client's update is the difference between the model that it returns and the one that it was sent. Each number is
rounded to the nearest multiple of 2^-28, times the client's weight, as an integer modulo 2^64. Rounding is not random,
so that a repeated round has the same sum bit by bit, and masks modulo 2^64 cancel in it exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedkeep.errors import ConfigError, ValueRefused
from fedkeep.interface import Algorithm, Fit
from fedkeep.models import Weights
from fedkeep.models.weights import find_mismatch
from fedkeep.privacy.privacy_checks import reason_against_sums
from fedkeep.rounds.messages import UPDATE, Fault, StepRequest, no_reply, sent_model
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round
from fedkeep.rounds.state import SimulationState

FRACTION_BITS = 28
"""Binary digits after the point: at most 2^-29 of a number is lost, less than float32 loses of 0.04."""


def largest_weight(clipping_range: float) -> int:
    """Return the largest sum of the clients' weights whose sum of updates is known from its residue modulo 2^64."""
    return int((2**63 - 1) // max(round(clipping_range * 2**FRACTION_BITS), 1))


def vector_length(form: Weights) -> int:
    """Return how many numbers an update has: those of all floating-point tensors."""
    return sum(tensor.numel() for tensor in form.values() if tensor.is_floating_point())


@torch.no_grad()
def quantise(model: Weights, start: Weights | None, weight: int, clipping_range: float) -> Tensor:
    """Return a client's weighted update as integers.

    Buffers such as running variances are numbers like all others. Integer buffers, such as counters, are left out.

    ``start``: What it was sent, of the same form; None: zeros.
    ``weight``: How much the client counts, such as its number of examples; not negative.
    ``clipping_range``: The largest size of a number of the update. Larger ones are refused rather than cut.
    Returns: int64 [numbers], tensor by tensor in the order of their names.
    """
    if weight > largest_weight(clipping_range):
        raise ValueRefused(
            f"a weight of {weight}, where sums have room for {largest_weight(clipping_range)}. Set a smaller "
            "privacy.clipping_range."
        )
    parts = [torch.zeros(0, dtype=torch.int64)]
    for name in sorted(model):
        if not model[name].is_floating_point():
            continue
        update = model[name].detach().cpu().double()
        update = update if start is None else update - start[name].detach().cpu().double()
        if not bool((update.abs() <= clipping_range).all()):
            raise ValueRefused(
                f"a change of {name} that is not finite or larger than privacy.clipping_range={clipping_range:g}. Set "
                "a larger one, or lower the learning rate."
            )
        parts.append((update * 2**FRACTION_BITS).round().to(torch.int64).flatten() * weight)
    return torch.cat(parts)


@torch.no_grad()
def mean_of_sum(
    total: Tensor, starts: Sequence[Weights | None], weights: Sequence[int], form: Weights, clipping_range: float
) -> dict[str, Tensor]:
    """Return the weighted mean of the clients' models, of which only the sum of `quantise` is known.

    ``total``: The sum modulo 2^64, int64 [numbers].
    ``weights``: For each client, its weight; one of them at least is not 0.
    ``form``: A model of the same form. Integer buffers are the first client's `starts`, or else those of this model.
    ``clipping_range``: The largest size of a number of an update.
    """
    divisor = sum(weights)
    limit = divisor * round(clipping_range * 2**FRACTION_BITS)
    if len(total) != vector_length(form) or bool(((total < -limit) | (total > limit)).any()):
        raise ValueRefused("a sum that updates within privacy.clipping_range cannot have")
    mean: dict[str, Tensor] = {}
    position = 0
    for name in sorted(form):
        tensor = form[name]
        if not tensor.is_floating_point():
            mean[name] = tensor if starts[0] is None else starts[0][name]
            continue
        part = total[position : position + tensor.numel()].view(tensor.shape).double() / 2**FRACTION_BITS
        position += tensor.numel()
        for start, weight in zip(starts, weights, strict=True):
            if start is not None:
                part = part + start[name].detach().cpu().double() * weight
        mean[name] = (part / divisor).to(tensor)
    return {name: mean[name] for name in form}


ALONE = "is one of fewer than two clients with examples, and a sum over them would show its model"
"""The reason of a lost client that has nobody to hide among."""


def weight_of(algorithm: Algorithm[Any, Any], fit: Fit) -> int:
    """Return how much a client counts in the mean."""
    is_uniform = getattr(algorithm, "aggregation", "num_examples") == "uniform"
    return min(1, fit.num_examples) if is_uniform else fit.num_examples


def secure_update(state: SimulationState, request: StepRequest, fit: Fit) -> Weights:
    """Return a client's weighted update, as integers."""
    start = sent_model(request, state.context.runner.initial)
    update = quantise(fit.model, start, weight_of(state.algorithm, fit), state.settings.privacy.clipping_range)
    return {UPDATE: update}


def without_model(fit: Fit) -> Fit:
    """Return what the server sees of a client's reply before the sum: the number of examples."""
    return replace(fit, model={}, num_steps=0, loss=0.0)


class SecureSum(ReplyStep):
    """Puts the securely aggregated mean in the place of models that were asked for together."""

    def applies(self, state: SimulationState) -> bool:
        return state.settings.privacy.secure_aggregation

    def reason_against(self, state: SimulationState) -> str:
        settings = state.settings
        if reason := reason_against_sums(state.algorithm, settings.defense, settings.privacy, settings.run):
            return reason
        refused = "privacy.secure_aggregation: "
        if settings.run.cohort_size == 1 < len(state.federation.clients):  # a site knows itself alone
            return (
                f"{refused}with run.cohort_size=1 a round's sum is one client's update. Set run.cohort_size=2 or more."
            )
        if state.own_contexts:
            return f"{refused}clients have networks of their own ([[client_models]]), which cannot be summed."
        return ""

    def receive(self, round: Round, reply: Reply) -> None:
        """Take the model out, as a site does by itself; what remains of it is an update that nobody looks at."""
        fit, form = reply.value, round.state.context_of(reply.client).runner.initial
        if isinstance(fit, Fit):
            if fit.model and not find_mismatch(fit.model, form):
                try:
                    reply.notes[self.name] = secure_update(round.state, reply.request, fit)
                except ValueRefused as error:  # as the executor of sites says it
                    raise no_reply(f"its site says: {error}", reply.uses) from error
                fit = without_model(fit)
            reply.value = fit

    def combine(self, round: Round, replies: dict[str, Reply]) -> dict[str, Reply]:
        fits = {client: reply for client, reply in replies.items() if isinstance(reply.value, Fit)}
        if not fits:
            return replies
        with round.timed():
            others = sum(client not in round.lost and client not in fits for client in round.cohort)
            mean, faults, size = self._mean(round.state, fits, round.fewest - others)
        round.costs.up += size
        round.lose_in_sum(fits, faults)
        for client in fits.keys() - faults.keys():
            fits[client].value = replace(fits[client].value, model=mean)
        return {client: reply for client, reply in replies.items() if client not in faults}

    def _mean(
        self, state: SimulationState, fits: Mapping[str, Reply], fewest: int
    ) -> tuple[Weights, dict[str, Fault], int]:
        """Return the mean of models, the clients that are not in it, and the bytes of the vectors that the others sent.

        Whatever convex combination of the replies' models a method makes, it makes of that mean.
        """
        form, clipping_range = state.context.runner.initial, state.settings.privacy.clipping_range
        weights = {client: weight_of(state.algorithm, reply.value) for client, reply in fits.items()}
        if sum(weights.values()) > largest_weight(clipping_range):
            raise ConfigError(
                f"privacy.clipping_range={clipping_range:g} leaves room for {largest_weight(clipping_range)} examples "
                f"in a round, and this one has {sum(weights.values())}. Set it lower, or run.cohort_size."
            )
        examples = {client: reply.value.num_examples for client, reply in fits.items()}
        if sum(number > 0 for number in examples.values()) < 2:
            return {}, dict.fromkeys(fits, no_reply(ALONE)), 0
        updates = {client: reply.notes.get(self.name, {}) for client, reply in fits.items()}
        result = state.executor.sum_updates(updates, examples, fewest)
        faults = {client: no_reply(reason) for client, reason in result.lost.items()}
        summed = [client for client in fits if client not in faults]
        if not summed:
            return {}, faults, 0
        starts = [sent_model(fits[client].request, form) for client in summed]
        try:
            mean = mean_of_sum(result.total, starts, [weights[client] for client in summed], form, clipping_range)
        except ValueRefused as error:
            fault = no_reply(f"took part in {error}; which client is the cause cannot be told")
            return {}, faults | dict.fromkeys(summed, fault), 0
        return mean, faults, result.total.nbytes * len(summed)
