"""The line between the server and the sites, and the parcels on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from fedkeep.models.weights import tensor_hash
from fedkeep.simulation.messages import ClientFailure

MessageKind = Literal["introduce", "perform"]
"""What a site can be asked: who it is, or a client step."""


@dataclass(frozen=True, eq=False)
class Envelope:
    """What travels, either way: a head that JSON can hold, and the tensors that it names."""

    head: dict[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def content_namer(collected: dict[str, Tensor], known: dict[int, tuple[str, Tensor]]) -> Callable[[Tensor], str]:
    """Return a function that names tensors by their content and collects them, so that equal ones travel once.

    Parameters
    ----------
    known : by identity, names that were found before; holds the tensors, so that no other takes their place.
    """

    def name(tensor: Tensor) -> str:
        if id(tensor) not in known:
            known[id(tensor)] = (tensor_hash(tensor), tensor)
        found = known[id(tensor)][0]
        collected[found] = tensor
        return found

    return name


class Transport(Protocol):
    """Sends parcels to nodes and receives their answers."""

    def nodes(self) -> dict[int, str]:
        """Return the nodes that are connected, each with the name that it was registered under, empty without."""

    def send(self, node: int, kind: MessageKind, parcel: Envelope, round: int, seconds: float) -> str | ClientFailure:
        """Send a parcel that is worth an answer for some seconds.

        Returns what the answer will be known by, or why the parcel was not taken.
        """

    def receive(self, sent: Collection[str]) -> dict[str, Envelope | ClientFailure]:
        """Return those answers that are there, or why there will be none; does not wait."""
