"""Client steps that several methods share; a method includes one by naming it in its class body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedkeep.interface.algorithm import Algorithm, on_client
from fedkeep.interface.party import Client
from fedkeep.models import Weights

MOST_NOISE = 40
"""Most noise in a count that is believed, times epsilon: more has a probability of exp(-40)."""
MOST_CHECKED = 64
"""Most examples on which a client measures another one's model."""


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


@on_client
def rise_of_loss(
    self: Algorithm[Any, Any], client: Client[Any], before: Weights, after: Weights, counts: Tensor
) -> float:
    """Measure by how much another client's training raised the loss on the classes that it holds.

    ``before``, ``after``: The model that the other client was sent, and the one that it returned.
    ``counts``: The other client's label counts, [classes].
    Returns: The change in nats, weighted as the other client's labels are; 0.0 if this client holds none of its
        classes.
    """
    labels = client.data["label"]
    chosen = (counts.to(labels.device)[labels] > 0).nonzero()[:MOST_CHECKED, 0]
    if not len(chosen):
        return 0.0
    data = {name: column[chosen] for name, column in client.data.items()}
    weight = counts.to(labels.device)[data["label"]] / torch.bincount(data["label"])[data["label"]]
    losses = []
    for model in (before, after):
        logits = client.predict(model, data)[:, :: self.rows_per_class]
        losses.append(cross_entropy(logits.double(), data["label"], reduction="none"))
    return float(((losses[1] - losses[0]) * weight).sum() / weight.sum())


BUILTIN_STEPS: dict[str, Callable[..., Any]] = {"send_label_counts": send_label_counts, "rise_of_loss": rise_of_loss}
"""Steps that the server may ask of a client for every method, if the recipe checks losses ([defense])."""
