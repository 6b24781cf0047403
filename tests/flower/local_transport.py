"""A line to sites in this process, so that the protocol can be tested in milliseconds and without Flower."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from fedkeep.flower.client_handler import handle_message
from fedkeep.flower.config import NodeConfig
from fedkeep.flower.transport import Envelope, MessageKind
from fedkeep.rounds.messages import Fault, no_reply

Tamper = Callable[[NodeConfig, MessageKind, Envelope, Envelope], Envelope | Fault | None]
"""May change what a site answers, given what it was asked; None: no answer ever."""


class LocalTransport:
    """Answers at once, through JSON, what is sent to it."""

    def __init__(self, node_configs: dict[int, NodeConfig], tamper: Tamper | None = None) -> None:
        self.node_configs = node_configs
        self.registered: dict[int, str] = {}
        self.tamper = tamper
        self.waiting: dict[str, Envelope | Fault] = {}
        self.sent: list[tuple[str, MessageKind, Envelope]] = []

    def nodes(self) -> dict[int, str]:
        return {node: self.registered.get(node, "") for node in self.node_configs}

    def send(self, node: int, kind: MessageKind, envelope: Envelope, round: int, seconds: float) -> str | Fault:
        if node not in self.node_configs:
            return no_reply("the node is gone")
        self.sent.append((self.node_configs[node].site, kind, envelope))
        arrived = Envelope(json.loads(json.dumps(envelope.head)), envelope.tensors)
        answer = handle_message(kind, arrived, self.node_configs[node])
        reply: Envelope | Fault | None = Envelope(json.loads(json.dumps(answer.head)), answer.tensors)
        if self.tamper is not None:
            assert isinstance(reply, Envelope)
            reply = self.tamper(self.node_configs[node], kind, arrived, reply)
        if reply is not None:
            self.waiting[str(len(self.sent))] = reply
        return str(len(self.sent))

    def receive(self, sent: Collection[str]) -> dict[str, Envelope | Fault]:
        return {number: self.waiting.pop(number) for number in list(sent) if number in self.waiting}


def node_configs(folder: Path, count: int = 8, **changes: object) -> dict[int, NodeConfig]:
    """Return sites that run the clients of a recipe, each on a node of its own."""
    return {
        100 + i: replace(
            NodeConfig(site=str(i), partition_id=i, num_partitions=count, state_dir=str(folder)), **changes
        )  # type: ignore[arg-type]
        for i in range(count)
    }
