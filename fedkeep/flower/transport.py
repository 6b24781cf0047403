"""The transport between the server and the sites, and the envelopes that it carries."""

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from fedkeep.models.weights import tensor_hash
from fedkeep.rounds.messages import Fault

MessageKind = Literal["introduce", "perform", "aggregate"]
"""What the server asks of a site: its name and number of examples, a client step, or a stage of secure aggregation."""


@dataclass(frozen=True, eq=False)
class Envelope:
    """A message in either direction.

    ``head``: The header, which JSON can represent. It refers to tensors by their names.
    ``tensors``: The tensors by name.
    """

    head: dict[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def content_namer(collected: dict[str, Tensor], known: dict[int, str]) -> Callable[[Tensor], str]:
    """Return a function that names tensors by the hash of their content, so that equal tensors are sent once.

    ``collected``: Receives every tensor that is named.
    ``known``: A cache of names by ``id`` of the tensor. A name is forgotten with its tensor, since the ``id`` is used
        again.
    """

    def name(tensor: Tensor) -> str:
        if id(tensor) not in known:
            known[id(tensor)] = tensor_hash(tensor)
            weakref.finalize(tensor, known.pop, id(tensor), None).atexit = False
        content_name = known[id(tensor)]
        collected[content_name] = tensor
        return content_name

    return name


class Transport(Protocol):
    """Sends envelopes to nodes and receives their replies."""

    def nodes(self) -> dict[int, str]:
        """Return the connected nodes.

        Returns: By node, the name under which Flower registered it; empty for nodes without a registered name.
        """

    def send(self, node: int, kind: MessageKind, envelope: Envelope, round: int, seconds: float) -> str | Fault:
        """Send an envelope to a node, without waiting for the reply.

        ``round``: The current round, counted over all tasks.
        ``seconds``: How long the message and its reply are valid, in seconds.
        Returns: An identifier under which `receive` returns the reply, or the reason why the message was not sent.
        """

    def receive(self, message_ids: Collection[str]) -> dict[str, Envelope | Fault]:
        """Return the replies that have arrived, without waiting.

        ``message_ids``: Identifiers that `send` returned.
        Returns: By identifier, a reply or the reason why there will be none.
        """
