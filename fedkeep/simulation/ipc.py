"""Values between two processes of one machine: a structure as JSON, then each tensor as its bytes.

The codec for other machines and disks (`fedkeep.interface.codec`) makes one blob in a known format. Here that would
only cost time to write, copy and parse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor


def send(connection: Connection, structure: Any, tensors: Mapping[str, Tensor]) -> None:
    """Send a structure and its tensors.

    Parameters
    ----------
    connection : Connection
        The connection.
    structure : object
        A structure as from `fedkeep.interface.codec.to_structure`.
    tensors : Mapping[str, Tensor]
        Its tensors by name.

    Raises
    ------
    OSError
        If the other process is gone.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = [[name, str(tensor.dtype).removeprefix("torch."), tensor.shape] for name, tensor in plain.items()]
    # Everything is prepared before anything is sent: an error in between would leave half a message on the connection.
    head = json.dumps([structure, described], separators=(",", ":")).encode()
    contents = [_bytes_of(tensor) for tensor in plain.values() if tensor.numel()]
    connection.send_bytes(head)
    for content in contents:
        connection.send_bytes(content)


def receive(connection: Connection) -> tuple[Any, dict[str, Tensor]]:
    """Receive what `send` has sent.

    Parameters
    ----------
    connection : Connection
        The connection.

    Returns
    -------
    structure : object
        The structure.
    tensors : dict[str, Tensor]
        Its tensors by name, on the CPU.

    Raises
    ------
    EOFError, OSError
        If the other process is gone.
    """
    structure, described = json.loads(connection.recv_bytes())
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in described}
    for tensor in tensors.values():
        if tensor.numel():
            connection.recv_bytes_into(_bytes_of(tensor))
    return structure, tensors


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data
