"""Where and how a recipe is carried out, and how far it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedkeep.errors import RunError
from fedkeep.options import Options, option


@dataclass(frozen=True)
class Progress:
    """How far one trial is.

    Attributes
    ----------
    trial : str
        Its name.
    done, rounds : int
        Rounds finished, of how many.
    record : dict, optional
        Of the last evaluated round.
    test_total : int
        Test images that the record is about.
    activity : str
        What a long round is at, such as ``"train 12/100"``; empty after a round, which is when `fedkeep.run` and
        `fedkeep.resume` report.
    """

    trial: str
    done: int
    rounds: int
    record: dict[str, Any] | None
    test_total: int = 1
    activity: str = ""


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Machine(Options):
    """Where and how a recipe is carried out.

    On the same device it changes no result, but for the rounding of stacks.

    Attributes
    ----------
    device : str
        ``cpu`` or ``cuda``.
    threads : int
        Of PyTorch in each process; more than one is often slower for small models.
    stack : int
        Up to how many clients of a cohort are trained as one stacked model, which changes rounding; 1: none; 0: as many
        as a measurement before the first round finds quickest, which may be others on another day or with other workers
        (runs of fewer than a thousand trainings are not measured and have none). Like the device, it is kept by a
        resume.
    workers : int
        Processes that share the trials and, where there are fewer of those, their cohorts; 0: one per core. A script
        that asks for more than one must guard what it runs with ``if __name__ == "__main__":``, since each process
        imports it again.
    data_dir : str, optional
        Folder of local data sets.
    allow_code : bool
        Let the recipe import a model by name.
    use : tuple[str, ...]
        Files and modules with methods of the user's own, imported first.

    Raises
    ------
    ConfigError
        For values of another type, and numbers that cannot be.
    """

    device: str = option("cpu", "where networks compute")
    threads: int = option(1, "of PyTorch in each process", low=1)
    stack: int = option(0, "clients trained as one", low=0)
    workers: int = option(1, "processes; 0: one per core", low=0)
    data_dir: str | None = option(None, "folder of local data sets")
    allow_code: bool = option(False, "let the recipe import a model")
    use: tuple[str, ...] = option((), "files and modules with methods")

    def __post_init__(self) -> None:
        if isinstance(self.data_dir, Path):
            object.__setattr__(self, "data_dir", str(self.data_dir))
        super().__post_init__()


def recorded_machine(folder: Path, machine: Machine) -> Machine:
    """Return a machine with what results depend on as a run folder records it: device, threads and stacks."""
    try:
        info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        stack = int(info.get("stack", 1))  # runs of versions without stacks did not name them
        return replace(machine, device=str(info["device"]), threads=int(info["threads"]), stack=stack)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"cannot read {folder / 'run.json'}: {type(error).__name__}: {error}") from error
