"""Secure aggregation: what the server sees of a round's models is their mean, and no single one.

A simulation adds up the same integers without masks. `fedkeep.flower.secagg_site` and `fedkeep.flower.secagg_server`
mask them with SecAgg's protocol, and end with the same sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedkeep.aggregation.fixed_point import largest_weight, mean_of_sum, quantise
from fedkeep.errors import ConfigError, ValueRefused
from fedkeep.interface import Algorithm, Fit
from fedkeep.simulation.messages import UPDATE, StepRequest, sent_model
from fedkeep.simulation.state import SimulationState

ALONE = "is one of fewer than two clients with examples, and a sum over them would show its model"
"""The reason of a lost client that has nobody to hide among."""


def weight_of(algorithm: Algorithm[Any, Any], fit: Fit) -> int:
    """Return how much a client counts in the mean.

    ``algorithm``: The method. If it has the option ``aggregation`` with the value ``"uniform"``, all clients with
        examples count alike.
    Returns: 0 or 1, or the number of its examples.
    """
    is_uniform = getattr(algorithm, "aggregation", "num_examples") == "uniform"
    return min(1, fit.num_examples) if is_uniform else fit.num_examples


def secure_update(state: SimulationState, request: StepRequest, fit: Fit) -> Fit:
    """Return a client's reply with its weighted update, as integers, in the place of its model.

    ``request``: What the client was asked.
    Returns: The update alone, and the number of examples. Loss and number of steps are 0: nobody adds them up.
    """
    start = sent_model(request, state.context.runner.initial)
    update = quantise(fit.model, start, weight_of(state.algorithm, fit), state.privacy.clipping_range)
    return replace(fit, model={UPDATE: update}, num_steps=0, loss=0.0)


def without_update(fit: Fit) -> Fit:
    """Return what the server sees of a client's reply before the sum: the number of examples.

    Returns: The reply without model, number of steps and loss.
    """
    return replace(fit, model={}, num_steps=0, loss=0.0)


def secure_mean(
    state: SimulationState, fits: Mapping[str, Fit], requests: Mapping[str, StepRequest], least: int = 0
) -> tuple[dict[str, Fit], dict[str, str], int]:
    """Put the securely aggregated mean in the place of each client's model.

    Whatever convex combination of the replies' models a method makes, it makes of that mean.

    ``fits``: Replies by client; at least one.
    ``requests``: What the clients were asked.
    ``least``: With fewer clients in the mean the round is rolled back, so that nothing is summed up.
    Returns: The replies as the method sees them; clients that are not in the mean, and why; bytes of the vectors that
        the others sent.
    """
    form, clipping_range = state.context.runner.initial, state.privacy.clipping_range
    weights = {client: weight_of(state.algorithm, fit) for client, fit in fits.items()}
    if sum(weights.values()) > largest_weight(clipping_range):
        raise ConfigError(
            f"privacy.clipping_range={clipping_range:g} leaves room for {largest_weight(clipping_range)} examples in a "
            f"round, and this one has {sum(weights.values())}. Set it lower, or run.cohort_size."
        )
    examples = {client: fit.num_examples for client, fit in fits.items()}
    if sum(number > 0 for number in examples.values()) < 2:
        return {}, dict.fromkeys(fits, ALONE), 0
    result = state.executor.sum_updates({client: fit.model for client, fit in fits.items()}, examples, least)
    summed = [client for client in fits if client not in result.lost]
    if not summed:
        return {}, result.lost, 0
    starts = [sent_model(requests[client], form) for client in summed]
    try:
        mean = mean_of_sum(result.total, starts, [weights[client] for client in summed], form, clipping_range)
    except ValueRefused as error:
        reason = f"took part in {error}; which client is the cause cannot be told"
        return {}, {**result.lost, **dict.fromkeys(summed, reason)}, 0
    seen = {client: replace(without_update(fits[client]), model=mean) for client in summed}
    return seen, result.lost, result.total.nbytes * len(summed)
