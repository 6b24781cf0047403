"""Client steps that several methods share; a method includes one by naming it in its class body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedkeep.interface.algorithm import on_client
from fedkeep.interface.party import Client

MOST_NOISE = 40
"""Most noise in a count that is believed, times epsilon: more has a probability of exp(-40)."""


@on_client
def send_label_counts(self: object, client: Client[Any]) -> Tensor:
    """Send the client's number of examples of each class.

    Returns: Number of examples of each class, float32 [classes].
    """
    return client.label_counts()


def invalid_counts(reply: Tensor, classes: int, examples: int, epsilon: float) -> str | None:
    """Check the reply to `send_label_counts`, which sums over clients would pass on to everyone.

    ``epsilon``: Of the noise in its counts, with which they have another sum; 0 without.
    Returns: What is wrong with the reply; None if it is valid.
    """
    if reply.shape != (classes,) or reply.dtype != torch.float32:
        return f"label counts of shape {list(reply.shape)} and type {reply.dtype} instead of {[classes]} and float32"
    if bool((reply < 0).any()) or bool((reply != reply.round()).any()):
        return "label counts that are negative or not whole numbers"
    total = int(reply.double().sum())
    if not epsilon:
        return f"label counts of {total} examples, and it has {examples}" if total != examples else None
    most = examples + MOST_NOISE / epsilon * classes
    return f"label counts of {total} examples, where noise makes {most:.0f} at most" if total > most else None


BUILTIN_STEPS: dict[str, Callable[..., Any]] = {"send_label_counts": send_label_counts}
"""Steps that the server may ask of a client for every method, if the recipe checks losses ([defense])."""
