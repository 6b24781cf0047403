"""The ClientApp: FedKeep's client half, hung into Flower."""

from __future__ import annotations

import math

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedkeep.errors import ConfigError, ValueRefused
from fedkeep.flower.client_handler import handle_message
from fedkeep.flower.config import read_node_config
from fedkeep.flower.logs import show_logs
from fedkeep.flower.records import pack, unpack
from fedkeep.flower.transport import Envelope, MessageKind

app = ClientApp()


@app.query("introduce")
def introduce(message: Message, context: Context) -> Message:
    """Say who this site is."""
    return _answered("introduce", message, context)


@app.train("perform")
def perform(message: Message, context: Context) -> Message:
    """Perform a client step."""
    return _answered("perform", message, context)


def _answered(kind: MessageKind, message: Message, context: Context) -> Message:
    log = show_logs()
    try:
        place = read_node_config(context.node_config, context.run_config)
        # The site runs what this server sends it, so it takes messages of any size from it.
        parcel = handle_message(kind, unpack(message.content, math.inf, math.inf), place)
    except (ConfigError, ValueRefused) as error:
        log.error("this site cannot answer: %s", error)
        parcel = Envelope({"error": str(error)})
    return Message(pack(parcel), reply_to=message)
