"""Whether a client's training raised the loss on the classes that the client holds.

Honest training lowers that loss, however different clients are, and whatever it makes the model forget of other
classes. So no honest client is refused for being different, and a client that sends anything but the result of a
training stands out: its update turned round, random weights, a training on wrong labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

CHECKERS = 3
"""Number of clients that measure a model, so that one liar among them decides nothing."""

CLIENTS_SLACK = 5.0
"""How much more of a rise clients allow than the server: they measure on few examples, on which they have trained."""


def losses_by_class(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the mean cross-entropy of each class.

    Parameters
    ----------
    logits : Tensor
        [n, classes].
    labels : Tensor
        [n], int64.
    classes : int
        Number of classes.

    Returns
    -------
    Tensor
        float64 [classes]; not a number for classes without examples.
    """
    losses = cross_entropy(logits.double(), labels, reduction="none")
    total = torch.zeros(classes, dtype=torch.float64, device=losses.device).index_add_(0, labels, losses)
    return total / torch.bincount(labels, minlength=classes)


def loss_change(before: Tensor, after: Tensor, counts: Tensor) -> float | None:
    """Return by how much the loss rose on the classes that a client holds.

    Parameters
    ----------
    before, after : Tensor
        Mean losses by class (see `losses_by_class`) of the model that was sent and of the one that was returned.
    counts : Tensor
        The client's label counts, [classes].

    Returns
    -------
    float or None
        The change in nats, weighted as the client's labels are; None if none of its classes was measured.
    """
    weights = counts.to(before) * ~(before.isnan() | after.isnan())
    if not weights.any():
        return None
    return float(((after - before).nan_to_num(0.0) * weights).sum() / weights.sum())


def choose_checkers(client: str, cohort: Sequence[str], counts: Mapping[str, Tensor]) -> list[str]:
    """Choose the clients that measure another one's model on their examples.

    Parameters
    ----------
    client : str
        Whose model is measured.
    cohort : Sequence[str]
        The clients of the round, in order.
    counts : Mapping[str, Tensor]
        Label counts by client, of those that can be asked.

    Returns
    -------
    list[str]
        The next clients in the order of the cohort, of those that hold some of its classes; at most `CHECKERS`.
    """
    start = cohort.index(client) if client in cohort else 0
    following = [name for name in (*cohort[start + 1 :], *cohort[:start]) if name != client and name in counts]
    return [name for name in following if bool((counts[name] * counts[client] > 0).any())][:CHECKERS]
