"""The machine on which a recipe runs, its versions of packages, and progress reports."""

import logging
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from fedkeep._utils.digests import read_json
from fedkeep.errors import ConfigError
from fedkeep.options import Options, option

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """A report of one trial's progress.

    ``trial``: The trial's name.
    ``done``: The number of finished rounds.
    ``rounds``: The number of all rounds.
    ``record``: The record of the last evaluated round.
    ``test_total``: The number of test images in that evaluation.
    ``at_chance``: Whether its accuracy cannot be told from guessing.
    ``not_finite``: How many local trainings so far ended in numbers that are not finite.
    ``activity``: What the trial does within a long round, such as ``"train 12/100"``; empty in reports after a round.
        `fedkeep.run` and `fedkeep.resume` report only after rounds.
    ``share``: Which part of the present round is done, from 0 to 1, as far as that is known.
    """

    trial: str
    done: int
    rounds: int
    record: dict[str, Any] | None
    test_total: int = 1
    activity: str = ""
    at_chance: bool = False
    not_finite: int = 0
    share: float = 0.0


OnProgress = Callable[[Progress], None]
"""Receives progress reports."""


def check_run_arguments(machine: object, on_progress: object) -> None:
    """Raise `ConfigError` if what says where a run is carried out and who is told of it is nothing of the kind."""
    if not isinstance(machine, Machine | None):
        raise ConfigError(f"machine is a fedkeep.Machine, such as fedkeep.Machine(workers=4), not {machine!r:.80}.")
    if not (on_progress is None or callable(on_progress)):
        raise ConfigError(f"on_progress is a function that is called after every round, not {on_progress!r:.80}.")


@dataclass(frozen=True)
class Machine(Options):
    """Where and how a recipe is run.

    On the same device no option changes a result, except for rounding: with other ``threads``, or a ``stack`` but 1.

    Attributes
    ----------
    device : str
        ``cpu`` or ``cuda``.
    threads : int
        PyTorch threads in each process; more than one is often slower for small models.
    stack : int
        The most clients of a cohort that are trained as one stacked model, which changes rounding. 1: no stacking. 0:
        the quickest number in a measurement before the first round, which can differ between days and between numbers
        of workers (runs of fewer than a thousand local trainings are not measured, and do not stack). Like the device,
        it stays the same when a run is resumed.
    workers : int
        Processes that share the trials and, if there are fewer trials than processes, their cohorts; 0: one per core.
        On a Ray cluster: the workers of all trials together; 0: one for each CPU, or for each GPU if the device is one.
        A script that uses more than one must guard its code with ``if __name__ == "__main__":``, since each process
        imports the script.
    data_dir : str, optional
        Folder of local data sets.
    executor : {"processes", "ray"}
        What carries out client steps: processes of this machine, or workers on a Ray cluster.
    address : str, optional
        The address of the Ray cluster, ``HOST:PORT``; default: ``auto``, the one that this machine belongs to.
    allow_code : bool
        Let the recipe import a model by name.
    use : tuple[str, ...]
        Files and modules with the user's own methods, which are imported first.

    Raises
    ------
    ConfigError
        For a value of another type, or a number out of range.
    """

    device: str = option("cpu", "where networks compute, cpu or cuda")
    threads: int = option(1, "PyTorch threads in each process; another number changes rounding", low=1)
    stack: int = option(
        0,
        "train up to so many clients of a cohort as one stacked model; 1: no stacking, reproducible bit for bit; 0: "
        "the quickest in a measurement before round 1; a resumed trial keeps its own",
        low=0,
    )
    workers: int = option(1, "processes that share the trials; 0: one for each core", low=0)
    data_dir: str | None = option(None, "folder of local data sets (default: $FEDKEEP_DATA)")
    executor: Literal["processes", "ray"] = option(
        "processes", "what trains the clients: processes of this machine, or workers on a Ray cluster"
    )
    address: str | None = option(None, "HOST:PORT of the Ray cluster (default: auto, the one of this machine)")
    allow_code: bool = option(False, "let a recipe import its model as package.module:function")
    use: tuple[str, ...] = option((), "a .py file of your own methods, metrics, partitions, reply steps and callbacks")

    def check(self) -> None:
        if self.address is not None and self.executor != "ray":
            raise ConfigError("an address is that of a Ray cluster. Leave it out, or set executor to ray.")


def usable_cores() -> int:
    """Return how many cores this process may use: in a job of Slurm or a container, those that it was given."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def recorded_machine(folder: Path, machine: Machine) -> Machine:
    """Return a machine with the device, threads and stack that a run folder records; results depend on them.

    ``machine``: The machine, which gives all other options, and the device if the recorded one is not here.
    """
    info = read_json(folder / "run.json")
    stack = int(info.get("stack", 1))  # older runs were not stacked
    device = str(info["device"])
    import torch  # only here: the command line describes a machine before it needs PyTorch

    if device != "cpu" and not torch.cuda.is_available():
        log.warning(
            f"{folder} was begun on device {device!r}, which this machine lacks. What is left runs on "
            f"{machine.device!r}: slower, and with results that agree up to rounding."
        )
        device = machine.device
    return replace(machine, device=device, threads=int(info["threads"]), stack=stack)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which results depend.

    Returns: Versions by name.
    """
    return {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")}


def describe_version() -> str:
    """Describe the versions of FedKeep and PyTorch.

    Returns: The description, such as ``FedKeep 0.1.0 (1a2b3c4), PyTorch 2.13.0+cpu``.
    """
    commit = revision()
    return f"FedKeep {version('fedkeep')}{f' ({commit})' if commit else ''}, PyTorch {version('torch')}"


@cache
def revision() -> str | None:
    """Return the last Git revision that changed the package.

    Returns: The abbreviated hash, with ``-dirty`` if there are uncommitted changes; None outside a checkout.
    """
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # take no lock that would disturb another process
        return subprocess.check_output(
            ["git", *arguments], cwd=package, stderr=subprocess.DEVNULL, timeout=30, encoding="utf-8", env=environment
        ).strip()

    try:
        # This fails if the repository is not FedKeep's, but one into which a user installed FedKeep.
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = "-dirty" if git("status", "--porcelain", "--", ".") else ""
        return git("log", "-1", "--format=%h", "--", ".") + changed or None
    except (OSError, subprocess.SubprocessError):
        return None
