"""FedKeep's log messages in Flower's processes, which show what is written to standard error."""

from __future__ import annotations

import logging


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
