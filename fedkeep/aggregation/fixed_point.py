"""Sums of updates as fixed-point integers, for secure aggregation: exact, in whatever order clients are added.

A client's update is the difference between the model that it returns and the one that it was sent. Each number is
rounded to the nearest multiple of 2^-28, times the client's weight, as an integer modulo 2^64. Rounding is not random,
so that a repeated round has the same sum bit by bit, and masks modulo 2^64 cancel in it exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkeep.errors import ValueRefused
from fedkeep.models import Weights

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
