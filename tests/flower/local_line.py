"""A line to sites in this process, so that the protocol can be tested in milliseconds and without Flower."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from fedkeep.flower.client_handler import handle_message
from fedkeep.flower.config import NodeConfig
from fedkeep.flower.transport import Envelope, MessageKind
from fedkeep.simulation.messages import ClientFailure

Tamper = Callable[[NodeConfig, MessageKind, Envelope, Envelope], Envelope | ClientFailure | None]
"""May change what a site answers, given what it was asked; None: no answer ever."""


class LocalLine:
    """Answers at once, through JSON, what is sent to it."""

    def __init__(self, places: dict[int, NodeConfig], tamper: Tamper | None = None) -> None:
        self.places = places
        self.registered: dict[int, str] = {}
        self.tamper = tamper
        self.waiting: dict[str, Envelope | ClientFailure] = {}
        self.sent: list[tuple[str, MessageKind, Envelope]] = []

    def nodes(self) -> dict[int, str]:
        return {node: self.registered.get(node, "") for node in self.places}

    def send(self, node: int, kind: MessageKind, parcel: Envelope, round: int, seconds: float) -> str | ClientFailure:
        if node not in self.places:
            return ClientFailure("the node is gone")
        self.sent.append((self.places[node].site, kind, parcel))
        arrived = Envelope(json.loads(json.dumps(parcel.head)), parcel.tensors)
        said = handle_message(kind, arrived, self.places[node])
        reply: Envelope | ClientFailure | None = Envelope(json.loads(json.dumps(said.head)), said.tensors)
        if self.tamper is not None:
            assert isinstance(reply, Envelope)
            reply = self.tamper(self.places[node], kind, arrived, reply)
        if reply is not None:
            self.waiting[str(len(self.sent))] = reply
        return str(len(self.sent))

    def receive(self, sent: Collection[str]) -> dict[str, Envelope | ClientFailure]:
        return {number: self.waiting.pop(number) for number in list(sent) if number in self.waiting}


def places(folder: Path, count: int = 8, **changes: object) -> dict[int, NodeConfig]:
    """Return sites that play the clients of a recipe, each on a node of its own."""
    return {
        100 + i: replace(
            NodeConfig(site=str(i), partition_id=i, num_partitions=count, state_dir=str(folder)), **changes
        )  # type: ignore[arg-type]
        for i in range(count)
    }
