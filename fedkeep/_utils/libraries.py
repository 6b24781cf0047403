"""Optional packages, imported only where they are used."""

from __future__ import annotations

import importlib
import os
from typing import Any

from fedkeep.errors import MissingExtra


def require_optional(module: str, what: str, extra: str) -> Any:
    """Import an optional module, with telemetry of the Hugging Face libraries turned off.

    Parameters
    ----------
    module : str
        The name of the module.
    what : str
        What needs it, for the error message.
    extra : str
        The extra of FedKeep that installs it.

    Returns
    -------
    ModuleType
        The module.

    Raises
    ------
    MissingExtra
        If it is not installed; the message contains the command that installs it.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DISABLE_TELEMETRY", "1")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(what, extra) from error
