"""Parcels as Flower's records: tensors as an ArrayRecord, the head as text in a ConfigRecord. Never pickle."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedkeep.errors import ValueRefused
from fedkeep.flower.transport import Envelope, MessageKind
from fedkeep.simulation.messages import ClientFailure

MESSAGES: dict[MessageKind, str] = {"introduce": "query.introduce", "perform": "train.perform"}
_HEAD, _TENSORS = "head", "tensors"
MAX_HEAD_SIZE = 4e6  # characters of an answer's head, which takes far more memory once it is read


def pack(parcel: Envelope) -> RecordDict:
    """Return a parcel as Flower's records.

    Raises
    ------
    ValueRefused
        For a tensor of a type that NumPy, in whose format Flower writes arrays, does not have, such as bfloat16.
    """
    text = json.dumps(parcel.head, separators=(",", ":"))
    arrays = {name: _array(tensor) for name, tensor in parcel.tensors.items()}
    return RecordDict({_HEAD: ConfigRecord({"text": text}), _TENSORS: ArrayRecord(arrays)})


def unpack(records: RecordDict, limit: float, largest_head: float = MAX_HEAD_SIZE) -> Envelope:
    """Return the parcel that `pack` wrote.

    Parameters
    ----------
    limit : the most bytes that it may have, head and tensors together.
    largest_head : the most characters that the head may have, with the names of the tensors.

    Raises
    ------
    ValueRefused
        If it is larger, or is anything but a head and tensors.
    """
    try:
        text = records.config_records[_HEAD]["text"]
        arrays = records.array_records[_TENSORS]
        if not isinstance(text, str):
            raise TypeError("its head is no text")
        written = len(text) + sum(map(len, arrays))
        size = written + sum(len(array.data) for array in arrays.values())
        if size > limit:
            raise ValueRefused(f"{size / 1e6:.1f} MB, where at most {limit / 1e6:.1f} MB are taken")
        if written > largest_head:
            raise ValueRefused(f"a head of {written / 1e6:.1f} MB, where at most {largest_head / 1e6:.1f} MB are taken")
        head = json.loads(text)
        if not isinstance(head, dict):
            raise ValueError("its head is no object")
        return Envelope(head, {name: _tensor(array) for name, array in arrays.items()})
    except ValueRefused:
        raise
    except Exception as error:  # a stranger's bytes may trip over anything, MemoryError included
        raise ValueRefused(f"a message that FedKeep did not write: {type(error).__name__}: {error}") from error


def _array(tensor: Tensor) -> Array:
    try:
        return Array(np.ascontiguousarray(tensor.detach().cpu().numpy()).reshape(tuple(tensor.shape)))
    except TypeError as error:
        raise ValueRefused(f"{error}. Send tensors of a type that NumPy has.") from error


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.array(array.numpy()))


class FlowerTransport:
    """The line that Flower's Grid is.

    It pushes and pulls, since ``send_and_receive`` sleeps three seconds between looks.

    Parameters
    ----------
    limit : the most bytes that an answer may have.
    """

    def __init__(self, grid: Grid, limit: float) -> None:
        self.grid = grid
        self.limit = limit

    def nodes(self) -> dict[int, str]:
        return {int(node.node_id): str(node.name) for node in self.grid.get_nodes()}

    def send(self, node: int, kind: MessageKind, parcel: Envelope, round: int, seconds: float) -> str | ClientFailure:
        message = Message(pack(parcel), dst_node_id=node, message_type=MESSAGES[kind], ttl=seconds, group_id=str(round))
        sent = next(iter(self.grid.push_messages([message])), None)
        return sent or ClientFailure("Flower's SuperLink did not take the message; its log says why")

    def receive(self, sent: Collection[str]) -> dict[str, Envelope | ClientFailure]:
        replies: Any = self.grid.pull_messages(list(sent)) if sent else []
        return {reply.metadata.reply_to_message_id: self._read(reply) for reply in replies}

    def _read(self, reply: Message) -> Envelope | ClientFailure:
        if reply.has_error():
            return ClientFailure(f"no answer: {reply.error.reason or 'Flower gives no reason'}")
        try:
            return unpack(reply.content, self.limit)
        except ValueRefused as error:
            return ClientFailure(f"answered with {error}")
