"""The mean of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fedkeep.interface import Fit
from fedkeep.models import Weights
from fedkeep.models.weights import add, mean, scale

Fusion = Literal["by_count", "uniform"]


def weighted_mean(replies: Mapping[str, Fit]) -> Weights:
    """Return sum_i n_i w_i / sum_i n_i over the replies, n_i the examples (McMahan et al., 2017).

    The whole state dict is averaged; integer buffers are the first reply's. If nobody had an example, all count alike.
    """
    examples = [float(reply.examples) for reply in replies.values()]
    return mean([reply.model for reply in replies.values()], examples if any(examples) else None)


def fused(replies: Mapping[str, Fit], how: Fusion) -> Weights:
    """Return the mean of the replies' models, weighted by examples or all alike."""
    return weighted_mean(replies) if how == "by_count" else mean([reply.model for reply in replies.values()])


def moved(average: Weights, new: Weights, decay: float) -> Weights:
    """Return ``decay * average + (1 - decay) * new``; ``new`` where there is no average yet, which is empty."""
    return add(scale(average, decay), new, 1 - decay) if average else new
