"""Aggregation that a minority of malicious clients cannot steer: median, trimmed mean, norm clipping and Krum."""

from collections.abc import Callable, Collection, Iterator, Sequence
from math import isfinite
from typing import TypeAlias

import torch
from torch import Tensor

from fedkeep.models import Weights
from fedkeep.models.weights import form_of, joint_norm, part_of

MAX_ELEMENTS = 2**23
"""How many numbers of all models together are compared at a time."""

Rule: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""Maps one tensor of each model to that of the result, element by element."""


@torch.no_grad()
def trimmed_mean(tensors: Sequence[Tensor], cut: int) -> Tensor:
    """Return the coordinate-wise mean without the smallest and the largest values (Yin et al., 2018, definition 2).

    ``tensors``: One tensor of each client, all of one shape.
    ``cut``: How many values are left out at either end.
    Returns: Of the same shape and type.
    """
    if not 0 <= 2 * cut < len(tensors):
        raise ValueError(f"Cutting {cut} of {len(tensors)} values at either end leaves none.")
    ordered = torch.stack(list(tensors)).sort(0).values
    return ordered[cut : len(tensors) - cut].mean(0)


def coordinate_median(tensors: Sequence[Tensor]) -> Tensor:
    """Return the coordinate-wise median (Yin et al., 2018, definition 1); the mean of the two middle values if even.

    ``tensors``: One tensor of each client, all of one shape; at least one.
    Returns: Of the same shape and type.
    """
    return trimmed_mean(tensors, (len(tensors) - 1) // 2)


@torch.no_grad()
def clip_norm(tensors: Sequence[Tensor], starts: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Shorten the update of several tensors together to a norm, without changing its direction (Sun et al., 2019).

    ``tensors``: What a client returned.
    ``starts``: What it was sent, in the same order.
    Returns: The tensors themselves if the norm is at most ``limit``; ``starts`` if it is not finite.
    """
    updates = torch._foreach_sub(list(tensors), list(starts))
    norm = joint_norm(updates)
    if not isfinite(norm):  # float32 has no squares of numbers above 2e19, and not all differences
        updates = torch._foreach_sub([tensor.double() for tensor in tensors], list(starts))
        norm = joint_norm(updates)
    if norm <= limit:
        return list(tensors)
    if not isfinite(norm):  # it cannot be shortened: infinity times 0 is no number
        return list(starts)
    clipped = torch._foreach_add(list(starts), updates, alpha=limit / norm)
    return [tensor.to(start) for tensor, start in zip(clipped, starts, strict=True)]


def max_byzantine(count: int) -> int:
    """Return the largest number f of malicious clients among n for which Krum is defined: 2f + 2 < n; -1 for none."""
    return max(-1, (count - 3) // 2)


@torch.no_grad()
def select_krum(
    models: Sequence[Weights], malicious: int, count: int, names: Collection[str] | None = None
) -> list[int]:
    """Choose the models that lie nearest to their n - f - 2 nearest neighbours (Blanchard et al., 2017).

    ``malicious``: f, the number of malicious clients that is assumed.
    ``count``: How many are chosen: 1 for Krum, more for Multi-Krum.
    ``names``: The tensors by which distances are measured; default: all that are not integers.
    Returns: The positions of the chosen models, the best first.
    """
    if malicious > max_byzantine(len(models)):
        raise ValueError(f"Krum needs {2 * malicious + 3} models for {malicious} malicious clients, not {len(models)}.")
    distances = torch.zeros(len(models), len(models), dtype=torch.float64)
    for columns in _columns(models, names):
        distances += torch.stack([(columns - one).square().sum(1) for one in columns]).cpu()
    scores = distances.sort(1).values[:, 1 : len(models) - malicious - 1].sum(1)
    return [int(position) for position in scores.argsort(stable=True)[:count]]


@torch.no_grad()
def merge(models: Sequence[Weights], rule: Rule) -> dict[str, Tensor]:
    """Make one model of several, of which only a part is in memory at a time.

    ``models``: At least one, all of one form.
    ``rule``: What is computed of one tensor of each model.
    Returns: The result; tensors of integers are the first model's.
    """
    merged, width = {}, _width(len(models))
    for name, form in form_of(models[0]).items():
        if form.is_floating_point():
            starts = range(0, form.numel(), width) or [0]
            parts = [rule([part_of(model, name, start, start + width) for model in models]) for start in starts]
            merged[name] = torch.cat(parts).view(form.shape)
        else:
            merged[name] = models[0][name]
    return merged


def clip_model(model: Weights, start: Weights, names: Sequence[str], limit: float) -> dict[str, Tensor]:
    """Return some tensors of a model, with an update of at most a norm (see `clip_norm`).

    ``model``, ``start``: What the client returned, and what it was sent.
    Returns: The tensors by name.
    """
    clipped = clip_norm([model[name] for name in names], [start[name] for name in names], limit)
    return dict(zip(names, clipped, strict=True))


def _width(count: int) -> int:
    """Return how many elements of each of some models may be in memory at the same time."""
    return max(1, MAX_ELEMENTS // count)


def _columns(models: Sequence[Weights], names: Collection[str] | None) -> Iterator[Tensor]:
    """Yield elements of models side by side, float64 [models, elements], as many at a time as memory allows."""
    width = room = _width(len(models))
    parts: list[tuple[str, int, int]] = []
    for name, tensor in form_of(models[0]).items():
        start, stop = 0, 0
        counts = tensor.is_floating_point() and (names is None or name in names)
        while counts and stop < tensor.numel():
            start, stop = stop, min(tensor.numel(), stop + room)
            parts.append((name, start, stop))
            room -= stop - start
            if not room:
                yield _stack(models, parts)
                parts, room = [], width
    if parts:
        yield _stack(models, parts)


def _stack(models: Sequence[Weights], parts: Sequence[tuple[str, int, int]]) -> Tensor:
    return torch.stack([torch.cat([part_of(model, *part).double() for part in parts]) for model in models])
