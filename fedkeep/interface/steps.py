"""Client steps that several methods share; a method includes one by naming it in its class body."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedkeep.interface.algorithm import on_client
from fedkeep.interface.party import Client


@on_client
def label_counts(self: object, client: Client[Any]) -> Tensor:
    """Count the client's examples of each class.

    Parameters
    ----------
    client : Client
        The client.

    Returns
    -------
    Tensor
        Number of examples of each class, float32 [classes].
    """
    return torch.bincount(client.data["label"], minlength=client.num_classes).float()


def invalid_counts(reply: Tensor, classes: int, examples: int) -> str | None:
    """Check the reply to `label_counts`, which sums over clients would pass on to everyone.

    Parameters
    ----------
    reply : Tensor
        The reply.
    classes : int
        Number of classes.
    examples : int
        Number of the client's examples.

    Returns
    -------
    str or None
        What is wrong with the reply; None if it is valid.
    """
    if reply.shape != (classes,) or reply.dtype != torch.float32:
        return f"label counts of shape {list(reply.shape)} and type {reply.dtype} instead of {[classes]} and float32"
    if bool((reply < 0).any()) or bool((reply != reply.round()).any()):
        return "label counts that are negative or not whole numbers"
    total = int(reply.double().sum())
    return f"label counts of {total} examples, and it has {examples}" if total != examples else None
