"""Optional packages, imported only where they are used."""

from __future__ import annotations

import importlib
import os
from typing import Any

from fedkeep.errors import MissingExtra


def require_optional(module: str, what: str, extra: str) -> Any:
    """Import an optional module, with telemetry of the Hugging Face libraries turned off.

    ``what``: What needs it, for the error message.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DISABLE_TELEMETRY", "1")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(what, extra) from error
