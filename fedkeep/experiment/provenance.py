"""What plays: versions of the packages that results rest on, and the revision of these sources."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results rest on, by name."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": version("numpy")}


def player() -> str:
    """Return what plays here, in words: ``FedKeep 0.1.0 (1a2b3c4), PyTorch 2.13.0+cpu``."""
    commit = revision()
    return f"FedKeep {version('fedkeep')}{f' ({commit})' if commit else ''}, PyTorch {torch.__version__}"


@cache
def revision() -> str | None:
    """Return the revision of the sources that run, if they are a checkout, with a mark if they were changed since."""
    here = Path(__file__)

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=here.parent, capture_output=True, timeout=5, check=True, encoding="utf-8"
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # not the repository of a user who installed the package in his
        return git("describe", "--always", "--dirty") or None
    except (OSError, subprocess.SubprocessError):
        return None
