"""The Flower apps: they pass messages on to `fedkeep.flower.server` and `fedkeep.flower.client_handler`."""

from __future__ import annotations

import logging
import math

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedkeep.errors import ConfigError, ValueRefused
from fedkeep.flower.client_handler import handle_message
from fedkeep.flower.config import read_node_config, read_run_config
from fedkeep.flower.records import FlowerTransport, pack, unpack
from fedkeep.flower.server import serve
from fedkeep.flower.transport import Envelope, MessageKind

client, server = ClientApp(), ServerApp()


@client.query("introduce")
def introduce(message: Message, context: Context) -> Message:
    """Reply with this site's name and its number of examples.

    ``message``: The server's message, with the recipe and a description of the data.
    ``context``: Flower's context, with the node's and the run's configuration.
    Returns: The reply, or the reason why the site cannot take part.
    """
    return _reply("introduce", message, context)


@client.train("perform")
def perform(message: Message, context: Context) -> Message:
    """Run a client step on this site's examples.

    ``message``: The server's message, with the step and its arguments.
    ``context``: Flower's context, with the node's and the run's configuration.
    Returns: The step's result, or the reason why there is none.
    """
    return _reply("perform", message, context)


@client.train("aggregate")
def aggregate(message: Message, context: Context) -> Message:
    """Answer in one stage of secure aggregation.

    ``message``: The server's message, with the stage and its question.
    ``context``: Flower's context, with the node's and the run's configuration.
    Returns: The answer, or the reason why there is none.
    """
    return _reply("aggregate", message, context)


def _reply(kind: MessageKind, message: Message, context: Context) -> Message:
    log = show_logs()
    try:
        config = read_node_config(context.node_config, context.run_config)
        # The site already runs the steps that this server asks for, so it accepts messages of any size from it.
        reply = handle_message(kind, unpack(message.content, math.inf, math.inf), config)
    except (ConfigError, ValueRefused) as error:
        log.error("this site cannot answer: %s", error)
        reply = Envelope({"error": str(error)})
    return Message(pack(reply), reply_to=message)


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
