"""Values between a run and its workers: a structure as JSON, then each tensor as its bytes.

The codec for sites and disks (`fedkeep.interface.codec`) makes one blob in a known format. Here that would only cost
time to write, copy and parse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

PIECE = 2**20
"""Bytes that are sent at a time: `multiprocessing` holds another copy of what it receives at once."""


def send(connection: Connection, structure: Any, tensors: Mapping[str, Tensor]) -> None:
    """Send a structure and its tensors.

    ``structure``: A structure as from `fedkeep.interface.codec.to_structure`.
    ``tensors``: Its tensors by name.
    """
    # Everything is prepared before anything is sent: an error in between would leave half a message on the connection.
    head, *parts = pack(structure, tensors)
    connection.send_bytes(head)
    for part in parts:
        for start in range(0, len(part), PIECE):
            connection.send_bytes(part[start : start + PIECE])


def receive(connection: Connection) -> tuple[Any, dict[str, Tensor]]:
    """Receive what `send` has sent.

    Returns: Its tensors by name, on the CPU.
    """
    structure, tensors = _empty(connection.recv_bytes())
    for tensor in tensors.values():
        content = _bytes_of(tensor)
        for start in range(0, len(content), PIECE):
            connection.recv_bytes_into(content[start : start + PIECE])
    return structure, tensors


def pack(structure: Any, tensors: Mapping[str, Tensor]) -> list[Any]:
    """Return a structure and its tensors as bytes.

    ``structure``: A structure as from `fedkeep.interface.codec.to_structure`.
    ``tensors``: Its tensors by name.
    Returns: The structure and the tensors' forms as JSON, then the memory of each tensor that is not empty, uint8
        [bytes].
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = [[name, str(tensor.dtype).removeprefix("torch."), tensor.shape] for name, tensor in plain.items()]
    head = json.dumps([structure, described], separators=(",", ":")).encode()
    return [head, *(_bytes_of(tensor) for tensor in plain.values() if tensor.numel())]


def unpack(parts: Sequence[Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return what `pack` has packed.

    ``parts``: What it returned; the arrays may be read-only.
    Returns: Its tensors by name, on the CPU, in memory of their own.
    """
    structure, tensors = _empty(parts[0])
    for tensor, content in zip((t for t in tensors.values() if t.numel()), parts[1:], strict=True):
        _bytes_of(tensor)[:] = content
    return structure, tensors


def _empty(head: bytes) -> tuple[Any, dict[str, Tensor]]:
    structure, described = json.loads(head)
    return structure, {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in described}


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the memory of a contiguous tensor."""
    return tensor.flatten().view(torch.uint8).numpy()
