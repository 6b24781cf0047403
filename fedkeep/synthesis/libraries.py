"""The libraries of the extra ``diffusion``, imported where they are used."""

from __future__ import annotations

import importlib
import os
from typing import Any

from fedkeep.errors import MissingExtra


def diffusers() -> Any:
    """Return the module `diffusers`; raise `MissingExtra` with the install line where it is not installed."""
    return _needed("diffusers")


def transformers() -> Any:
    """Return the module `transformers`; raise `MissingExtra` with the install line where it is not installed."""
    return _needed("transformers")


def _needed(module: str) -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DISABLE_TELEMETRY", "1")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra("A diffusion generator", "diffusion") from error
