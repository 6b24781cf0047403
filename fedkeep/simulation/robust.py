"""Robust aggregation of replies, before a method sees them, so that every method that averages models has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median_low
from typing import Any

from torch import Tensor

from fedkeep.aggregation.robust import clip_norm, coordinate_median, joint_norm, select_krum, trimmed_mean
from fedkeep.interface import Fit
from fedkeep.interface.pytree import replace_tensors, tree_tensors
from fedkeep.models import Weights
from fedkeep.simulation.defense import MIN_NORMS, Defense


def robust_replies(replies: Mapping[str, Any], sent: Mapping[str, Weights], defense: Defense) -> dict[str, Any]:
    """Make replies robust against a minority of malicious clients.

    ``median`` and ``trimmed_mean`` put the robust model in the place of each client's, so that any mean of them is that
    model; other tensors of the replies, such as SCAFFOLD's control variates, are treated alike. ``norm_clipping``
    shortens updates to the median of their norms. ``krum`` and ``multi_krum`` keep one, or all but the assumed number
    of malicious clients.

    Parameters
    ----------
    replies : Mapping[str, object]
        By client, as they were asked for together. Replies without a model stay as they are.
    sent : Mapping[str, Weights]
        The models that the clients were sent.
    defense : Defense
        The rule, and the share of malicious clients that is assumed.

    Returns
    -------
    dict[str, object]
        The replies as the method sees them; clients that Krum does not choose are missing.
    """
    fits = {client: reply for client, reply in replies.items() if isinstance(reply, Fit)}
    if defense.aggregation == "mean" or len(fits) < MIN_NORMS or len(fits) < len(replies):
        return dict(replies)
    malicious = int(defense.byzantine * len(fits))
    if defense.aggregation in ("krum", "multi_krum"):
        count = 1 if defense.aggregation == "krum" else len(fits) - malicious
        chosen = sorted(select_krum([fit.model for fit in fits.values()], malicious, count))
        names = list(fits)
        return {names[position]: fits[names[position]] for position in chosen}
    if defense.aggregation == "norm_clipping":
        return dict(_clipped(fits, sent))
    if defense.aggregation == "median":
        return dict(_merged(fits, coordinate_median))
    return dict(_merged(fits, partial(trimmed_mean, cut=malicious)))


def _merged(fits: Mapping[str, Fit], rule: Callable[[Sequence[Tensor]], Tensor]) -> dict[str, Fit]:
    """Return the replies with each tensor replaced by what a rule makes of all clients' tensors."""
    tensors = [[tensor for tensor, _ in tree_tensors(fit)] for fit in fits.values()]
    shapes = {tuple(tensor.shape for tensor in row) for row in tensors}
    if len(shapes) > 1:  # what differs in form between clients cannot be merged: only models are
        models = [fit.model for fit in fits.values()]
        merged = {name: _merge([model[name] for model in models], rule) for name in models[0]}
        return {client: replace(fit, model=merged) for client, fit in fits.items()}
    columns = [_merge(list(column), rule) for column in zip(*tensors, strict=True)]
    return {client: replace_tensors(fit, columns) for client, fit in fits.items()}


def _merge(column: Sequence[Tensor], rule: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    return rule(column) if column[0].is_floating_point() else column[0]


def _clipped(fits: Mapping[str, Fit], sent: Mapping[str, Weights]) -> dict[str, Fit]:
    """Return the replies with updates no longer than their median norm."""
    known = {client: fit for client, fit in fits.items() if client in sent}
    if not known:
        return dict(fits)
    names = [name for name, tensor in next(iter(known.values())).model.items() if tensor.is_floating_point()]
    starts = {client: [sent[client][name] for name in names] for client in known}
    ends = {client: [fit.model[name] for name in names] for client, fit in known.items()}
    norms = {c: joint_norm([end - start for end, start in zip(ends[c], starts[c], strict=True)]) for c in known}
    limit = median_low(norms.values())
    clipped = {c: clip_norm(ends[c], starts[c], limit) if norms[c] else ends[c] for c in known}
    return {
        client: replace(fit, model={**fit.model, **dict(zip(names, clipped[client], strict=True))})
        if client in known
        else fit
        for client, fit in fits.items()
    }
