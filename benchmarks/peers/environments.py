"""An environment of its own for each peer: their dependencies contradict each other."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TORCH = ("torch==2.13.0",)  # alone and first: what is there already is not replaced by a newer build for CUDA
STEPS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "pfl": (TORCH, ("pfl==0.6.0",)),
    # 1.42 needs a certifi that no registry had on the day this was written.
    "flower": (TORCH, ("flwr[simulation]==1.41.0",)),
    # FedLab asks for torchvision, which would bring a newer torch for CUDA, and needs it only for data sets that are
    # not used here (see runners/with_fedlab.py): so its own requirements, without that one, come first.
    "fedlab": (
        (*TORCH, "numpy==2.4.6", "pandas==3.1.1", "scikit-learn==1.9.1", "munch==4.0.0", "pynvml==13.0.1",
         "tqdm==4.70.1", "pillow==13.0.0"),
        ("--no-deps", "fedlab==1.3.0"),
    ),
    # The newest jax under which FedJAX runs: later ones have no jax.tree_map. The bounds keep what goes with it.
    "fedjax": (
        ("fedjax==0.0.17", "jax==0.4.30", "jaxlib==0.4.30", "numpy==1.26.4", "dm-haiku==0.0.13", "optax==0.2.3"),
    ),
    "py-spy": (("py-spy==0.4.3",),),
}  # fmt: skip


class CannotInstall(Exception):
    """A peer's environment could not be set up; the message says why."""


def python_of(peer: str, cache: Path) -> Path:
    """Return the interpreter of a peer's environment, set up if it is not there yet.

    Parameters
    ----------
    peer : a key of `STEPS` (the last is no peer but a profiler), or ``fedkeep`` for the environment that runs this.
    cache : the folder of the environments.

    Raises
    ------
    CannotInstall
        With the end of what pip said.
    """
    if peer == "fedkeep":
        return Path(sys.executable)
    folder, steps = cache / peer, STEPS[peer]
    python, mark = folder / "bin" / "python", folder / "set-up.json"
    wanted = hashlib.sha256(json.dumps(steps).encode()).hexdigest()
    if mark.is_file() and json.loads(mark.read_text()) == wanted:
        return python
    print(f"setting up {peer} in {folder} (once; some minutes)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run([os.environ.get("PEERS_PYTHON", sys.executable), "-m", "venv", str(folder)], peer)
    for step in steps:
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *step], peer)
    mark.write_text(json.dumps(wanted))
    return python


def _run(command: list[str], peer: str) -> None:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(f"{peer}: {error}") from error
    if done.returncode:
        last = [line for line in done.stdout.splitlines() if "WARNING" not in line][-5:]
        raise CannotInstall(f"{peer}: `{' '.join(command)}` failed:\n  " + "\n  ".join(last))
