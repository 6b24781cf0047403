"""Client steps that several methods share; a method takes one by naming it in its class body."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedkeep.interface.algorithm import on_client
from fedkeep.interface.party import Client


@on_client
def label_counts(self: object, client: Client[Any]) -> Tensor:
    """Tell how many examples of each class the client holds: float32 [classes]."""
    return torch.bincount(client.data["label"], minlength=client.num_classes).float()


def invalid_counts(reply: Tensor, classes: int, examples: int) -> str | None:
    """Return why a reply is not what `label_counts` gives of so many examples, or None.

    Sums over clients would carry it to all others.
    """
    if reply.shape != (classes,) or reply.dtype != torch.float32:
        return f"label counts of shape {list(reply.shape)} and type {reply.dtype} instead of {[classes]} and float32"
    if bool((reply < 0).any()) or bool((reply != reply.round()).any()):
        return "label counts that are negative or no whole numbers"
    told = int(reply.double().sum())
    return f"label counts of {told} examples, and it has {examples}" if told != examples else None
