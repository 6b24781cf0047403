"""Tensors on their way to a device, without anybody waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device, itself if that is the CPU.

    A copy from ordinary memory waits until a GPU has done all that was asked of it before; from pinned memory the GPU
    fetches it when its turn comes.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
