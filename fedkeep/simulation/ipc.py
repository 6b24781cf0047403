"""Values over a line between two processes of one machine: a structure as JSON, then each tensor as its bytes.

Between machines and on disk values are one blob in a known format (`fedkeep.interface.codec`). Here that would be
written, copied and parsed for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor


def send(connection: Connection, structure: Any, tensors: Mapping[str, Tensor]) -> None:
    """Send what `fedkeep.interface.codec.to_structure` gives; raises OSError if nobody is there any more."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = [[name, str(tensor.dtype).removeprefix("torch."), tensor.shape] for name, tensor in plain.items()]
    # All is made before any is sent: half a message could not be told from another.
    head = json.dumps([structure, described], separators=(",", ":")).encode()
    contents = [_bytes_of(tensor) for tensor in plain.values() if tensor.numel()]
    connection.send_bytes(head)
    for content in contents:
        connection.send_bytes(content)


def receive(connection: Connection) -> tuple[Any, dict[str, Tensor]]:
    """Receive what `send` sent; raises EOFError or OSError if nobody is there any more."""
    structure, described = json.loads(connection.recv_bytes())
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in described}
    for tensor in tensors.values():
        if tensor.numel():
            connection.recv_bytes_into(_bytes_of(tensor))
    return structure, tensors


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data
