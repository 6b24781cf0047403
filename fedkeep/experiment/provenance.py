"""The versions of FedKeep and of the packages on which results depend."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which results depend.

    Returns: Versions by name.
    """
    return {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": version("numpy")}


def describe_version() -> str:
    """Describe the versions of FedKeep and PyTorch.

    Returns: The description, such as ``FedKeep 0.1.0 (1a2b3c4), PyTorch 2.13.0+cpu``.
    """
    commit = revision()
    return f"FedKeep {version('fedkeep')}{f' ({commit})' if commit else ''}, PyTorch {torch.__version__}"


@cache
def revision() -> str | None:
    """Return the last Git revision that changed the package.

    Returns: The abbreviated hash, with ``-dirty`` if there are uncommitted changes; None outside a checkout.
    """
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # take no lock that would disturb another process
        result = subprocess.run(
            ["git", *arguments],
            cwd=package,
            capture_output=True,
            timeout=30,
            check=True,
            encoding="utf-8",
            env=environment,
        )
        return result.stdout.strip()

    try:
        # This fails if the repository is not FedKeep's, but one into which a user installed FedKeep.
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = "-dirty" if git("status", "--porcelain", "--", ".") else ""
        return git("log", "-1", "--format=%h", "--", ".") + changed or None
    except (OSError, subprocess.SubprocessError):
        return None
