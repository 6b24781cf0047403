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
