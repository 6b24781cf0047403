"""What plays: versions of the packages that results rest on, and the revision of these sources."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results rest on, by name."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": version("numpy")}


def describe_version() -> str:
    """Return what plays here, in words: ``FedKeep 0.1.0 (1a2b3c4), PyTorch 2.13.0+cpu``."""
    commit = revision()
    return f"FedKeep {version('fedkeep')}{f' ({commit})' if commit else ''}, PyTorch {torch.__version__}"


@cache
def revision() -> str | None:
    """Return the last revision that changed the package, if it is a checkout, with a mark if it was changed since."""
    here = Path(__file__).parents[1]

    def git(*words: str) -> str:
        calm = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # no lock that another process would find
        done = subprocess.run(
            ["git", *words], cwd=here, capture_output=True, timeout=30, check=True, encoding="utf-8", env=calm
        )
        return done.stdout.strip()

    try:
        # Not the repository of a user who installed the package in his.
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = "-dirty" if git("status", "--porcelain", "--", ".") else ""
        return git("log", "-1", "--format=%h", "--", ".") + changed or None
    except (OSError, subprocess.SubprocessError):
        return None
