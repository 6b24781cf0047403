"""The Flower apps: they pass messages on to `fedkeep.flower.server` and `fedkeep.flower.client_handler`.

A message is Flower's records: tensors in an ArrayRecord, the header as JSON in a ConfigRecord. Never pickle.
"""

import json
import logging
import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.superlink.grid.http_grid import HttpGrid
from torch import Tensor

from fedkeep.errors import ConfigError, ValueRefused
from fedkeep.flower.client_handler import handle_message
from fedkeep.flower.config import read_node_config, read_run_config
from fedkeep.flower.server import serve
from fedkeep.flower.transport import Envelope, MessageKind
from fedkeep.rounds.messages import Fault, no_reply

MESSAGE_TYPES: dict[MessageKind, str] = {
    "introduce": "query.introduce",
    "perform": "train.perform",
    "aggregate": "train.aggregate",
}
"""Flower's message type for each kind of message."""
_HEAD, _TENSORS = "head", "tensors"
MAX_HEAD_SIZE = 4e6  # characters of a reply's header, which takes far more memory once it is parsed

UPLOAD_SECONDS = 60.0  # seconds in which a message must be whole, besides what its size takes
SLOWEST = 1e5  # bytes a second at which a message is read
MIN_OBJECT_SIZE = 4096  # bytes at which an object is counted, since reading a small one takes time too


def pack(envelope: Envelope) -> RecordDict:
    """Return an envelope as Flower's records."""
    text = json.dumps(envelope.head, separators=(",", ":"))
    arrays = {name: _array(tensor) for name, tensor in envelope.tensors.items()}
    return RecordDict({_HEAD: ConfigRecord({"text": text}), _TENSORS: ArrayRecord(arrays)})


def unpack(records: RecordDict, max_size: float, max_head_size: float = MAX_HEAD_SIZE) -> Envelope:
    """Return the envelope from which `pack` made records.

    ``records``: The records, perhaps from an untrusted sender.
    ``max_size``: The largest allowed size of header and tensors together, in bytes.
    ``max_head_size``: The largest allowed length of the header and the names of the tensors, in characters.
    """
    try:
        text = records.config_records[_HEAD]["text"]
        arrays = records.array_records[_TENSORS]
        if not isinstance(text, str):
            raise TypeError("its head is not text")
        written = len(text) + sum(map(len, arrays))
        size = written + sum(len(array.data) for array in arrays.values())
        if size > max_size:
            raise ValueRefused(f"{size / 1e6:.1f} MB, where at most {max_size / 1e6:.1f} MB are taken")
        if written > max_head_size:
            raise ValueRefused(
                f"a head of {written / 1e6:.1f} MB, where at most {max_head_size / 1e6:.1f} MB are taken"
            )
        head = json.loads(text)
        if not isinstance(head, dict):
            raise ValueError("its head is not a JSON object")
        return Envelope(head, {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()})
    except ValueRefused:
        raise
    except Exception as error:  # untrusted bytes may raise anything, MemoryError included
        raise ValueRefused(f"a message that FedKeep did not write: {type(error).__name__}: {error}") from error


def _array(tensor: Tensor) -> Array:
    try:
        return Array(np.ascontiguousarray(tensor.detach().cpu().numpy()).reshape(tuple(tensor.shape)))
    except TypeError as error:
        raise ValueRefused(f"{error}. Send tensors of a type that NumPy has.") from error


class FlowerTransport:
    """A transport on Flower's Grid.

    It pushes and pulls messages itself, since Flower's ``send_and_receive`` polls every three seconds only.

    ``grid``: Flower's access to the connected nodes.
    ``max_reply_size``: The largest allowed size of a reply, in bytes.
    """

    def __init__(self, grid: Grid, max_reply_size: float) -> None:
        self.grid = grid
        self.max_reply_size = max_reply_size
        self._client: _LimitedClient | None = None
        if isinstance(grid, HttpGrid):
            self._client = grid._client = _LimitedClient(grid._runtime_client, max_reply_size)  # type: ignore[assignment]

    def nodes(self) -> dict[int, str]:
        """Return the registered names of the connected nodes; see `fedkeep.flower.transport.Transport`."""
        return {int(node.node_id): str(node.name) for node in self.grid.get_nodes()}

    def send(self, node: int, kind: MessageKind, envelope: Envelope, round: int, seconds: float) -> str | Fault:
        """Send an envelope; see `fedkeep.flower.transport.Transport`."""
        message = Message(
            pack(envelope), dst_node_id=node, message_type=MESSAGE_TYPES[kind], ttl=seconds, group_id=str(round)
        )
        message_id = next(iter(self.grid.push_messages([message])), None)
        return message_id or no_reply("Flower's SuperLink did not accept the message; its log says why")

    def receive(self, message_ids: Collection[str]) -> dict[str, Envelope | Fault]:
        """Return replies that have arrived, of a SuperLink one; see `fedkeep.flower.transport.Transport`."""
        try:
            replies: list[Message] = list(self.grid.pull_messages(list(message_ids))) if message_ids else []
        except Exception as error:  # Flower builds a message from whatever a site wrote
            if self._client is None or not self._client.reading.is_whole:
                raise
            return {self._client.reading.asked: _strange(error)}
        # A site can write anything into what its reply says that it answers.
        asked = [self._client.reading.asked] if self._client else [r.metadata.reply_to_message_id for r in replies]
        return {message_id: self._read(reply) for message_id, reply in zip(asked, replies, strict=False)}

    def _read(self, reply: Message) -> Envelope | Fault:
        try:
            if reply.has_error():
                return no_reply(f"no answer: {reply.error.reason or 'Flower gives no reason'}")
            return unpack(reply.content, self.max_reply_size)
        except ValueRefused as error:
            return Fault(f"answered with {error}")
        except Exception as error:
            return _strange(error)


def _strange(error: Exception) -> Fault:
    return Fault(f"answered with a message that FedKeep did not write: {type(error).__name__}: {error}")


@dataclass
class _Reading:
    """The message that is read now.

    ``asked``: The message that it answers, as the SuperLink says.
    ``size``: What was read of it, in bytes, where a small object counts as a larger one.
    ``is_whole``: Whether all of it was read.
    """

    asked: str = ""
    began: float = field(default_factory=time.monotonic)
    size: int = 0
    num_bytes: int = 0
    is_whole: bool = False


class _LimitedClient:
    """A connection to the SuperLink that stops to read a message which is too large, before all of it is in memory.

    A message is a tree of objects, none of which tells its size before it is read. Flower reads them one by one and
    answers `ObjectPullError` with a message that says why there is no other. It would read a message of any size, and
    wait for two hours while a site uploads one. Messages are handed on one at a time, so that one which Flower cannot
    build takes no other with it.

    ``max_size``: The largest allowed size of a message, in bytes.
    """

    def __init__(self, client: Any, max_size: float) -> None:
        self._client = client
        self._max_size = max_size
        self._arrived: dict[str, tuple[Any, Any]] = {}  # messages that the SuperLink gave, by what they answer
        self.reading = _Reading()
        self._lock = Lock()  # objects are read in several threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullMessages(self, request: Any) -> Any:
        if not any(asked in self._arrived for asked in request.message_ids):
            response = self._client.PullMessages(request)
            for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
                self._arrived[message.metadata.reply_to_message_id] = message, tree
        self.reading = _Reading(next((asked for asked in request.message_ids if asked in self._arrived), ""))
        if not self.reading.asked:
            return PullAppMessagesResponse()
        message, tree = self._arrived.pop(self.reading.asked)
        return PullAppMessagesResponse(messages_list=[message], message_object_trees=[tree])

    def PullObject(self, request: Any) -> Any:
        message = self.reading  # a thread that Flower has given up may read on, and must not count for the next
        self._check(request.object_id, message)
        response = self._client.PullObject(request)
        with self._lock:
            message.num_bytes += len(response.object_content)
            message.size += max(len(response.object_content), MIN_OBJECT_SIZE)
        self._check(request.object_id, message)
        return response

    def ConfirmMessageReceived(self, request: Any) -> Any:
        response = self._client.ConfirmMessageReceived(request)
        self.reading.is_whole = True
        return response

    def _check(self, part: str, message: _Reading) -> None:
        if message.size > self._max_size + MAX_HEAD_SIZE:
            raise ObjectPullError(part, f"its message has more than {self._max_size / 1e6:.1f} MB, which are taken")
        seconds = time.monotonic() - message.began
        if seconds > UPLOAD_SECONDS + message.num_bytes / SLOWEST:
            raise ObjectPullError(part, f"its message was not whole after {seconds:.0f} s")


client, server = ClientApp(), ServerApp()


def _reply(kind: MessageKind, message: Message, context: Context) -> Message:
    """Return the reply to the server's message; ``context`` holds the node's and the run's configuration."""
    log = show_logs()
    try:
        config = read_node_config(context.node_config, context.run_config)
        # The site already runs the steps that this server asks for, so it accepts messages of any size from it.
        reply = handle_message(kind, unpack(message.content, math.inf, math.inf), config)
    except (ConfigError, ValueRefused) as error:
        log.error("this site cannot answer: %s", error)
        reply = Envelope({"error": str(error)})
    return Message(pack(reply), reply_to=message)


introduce = client.query("introduce")(partial(_reply, "introduce"))
"""Replies with this site's name and its number of examples, or the reason why the site cannot take part."""
perform = client.train("perform")(partial(_reply, "perform"))
"""Runs a client step on this site's examples, and replies with its result, or the reason why there is none."""
aggregate = client.train("aggregate")(partial(_reply, "aggregate"))
"""Answers in one stage of secure aggregation, or with the reason why there is no answer."""


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the recipe that the run configuration names.

    ``grid``: Flower's access to the connected nodes.
    """
    show_logs()
    config = read_run_config(context.run_config)
    serve(FlowerTransport(grid, config.largest_reply * 1e6), config)


def show_logs() -> logging.Logger:
    """Send FedKeep's log messages to standard error. A second call in the same process changes nothing."""
    logger = logging.getLogger("fedkeep")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, logging.StreamHandler) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s fedkeep: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    return logger
