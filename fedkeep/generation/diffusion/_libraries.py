"""The libraries of the extra ``diffusion``, imported on first use."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from fedkeep.errors import MissingExtra, require_optional

_WHAT, _EXTRA = "A diffusion generator", "diffusion"


def diffusers() -> Any:
    """Return the module `diffusers`; raise `MissingExtra` with the install line if it is missing."""
    return require_optional("diffusers", _WHAT, _EXTRA)


def transformers() -> Any:
    """Return the module `transformers`; raise `MissingExtra` with the install line if it is missing."""
    return require_optional("transformers", _WHAT, _EXTRA)


def check_installed() -> None:
    """Raise `MissingExtra` if `diffusers` is missing, without the seconds that importing it takes."""
    if find_spec("diffusers") is None:
        raise MissingExtra(_WHAT, _EXTRA)
