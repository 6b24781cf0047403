"""FedKeep's log lines in Flower's processes, which show what is written to standard error."""

from __future__ import annotations

import logging


def show_logs() -> logging.Logger:
    """Let FedKeep's log lines be seen, and return its logger; once in a process is enough, twice does no harm."""
    logger = logging.getLogger("fedkeep")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, logging.StreamHandler) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s fedkeep: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    return logger
