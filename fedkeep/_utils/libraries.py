"""Optional packages, imported where they are used."""

from __future__ import annotations

import importlib
import os
from typing import Any

from fedkeep.errors import MissingExtra


def require_optional(module: str, what: str, extra: str) -> Any:
    """Return an optional module, its telemetry off.

    Parameters
    ----------
    what : needs it, for the error.
    extra : of FedKeep that brings it.

    Raises
    ------
    MissingExtra
        With the install line, where it is not installed.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DISABLE_TELEMETRY", "1")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(what, extra) from error
