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
    return torch.bincount(client.data["label"], minlength=client.classes).float()


def not_counts(reply: Tensor, classes: int) -> str | None:
    """Return why a reply is not what `label_counts` gives, or None: sums over clients would carry it to all others."""
    if reply.shape != (classes,) or reply.dtype != torch.float32:
        return f"label counts of shape {list(reply.shape)} and type {reply.dtype} instead of {[classes]} and float32"
    return "negative label counts" if bool((reply < 0).any()) else None
