"""Where and how a recipe is carried out, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeep.options import Options, option


@dataclass(frozen=True)
class Progress:
    """How far one cell is: rounds finished, of how many, the last evaluated record, if any, and the test images.

    ``doing`` is what a long round is at, such as ``"train 12/100"``; empty after a round, which is when `fedkeep.run`
    and `fedkeep.resume` tell of it.
    """

    cell: str
    done: int
    rounds: int
    record: dict[str, Any] | None
    test_total: int = 1
    doing: str = ""


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Machine(Options):
    """Where and how a recipe is carried out.

    On the same device it changes no result, but for the rounding of stacks.

    Attributes
    ----------
    device : ``cpu`` or ``cuda``. threads : of PyTorch in each process; more than one is often slower for small models.
    stack : up to how many clients of a cohort are trained as one stacked model, which changes rounding; 1: none; 0: as
        many as a trial before the first round finds quickest, which may be others on another day or with other workers
        (runs of fewer than a thousand trainings are not tried and have none). Like the device, it is kept by a resume.
    workers : processes that share the cells and, where there are fewer of those, their cohorts; 0: one per core. A
        script that asks for more than one must guard what it runs with ``if __name__ == "__main__":``, since each
        process imports it again.
    data_dir : folder of local data sets. allow_code : let the recipe import a model by name.
    use : files and modules with methods of the user's own, imported first.

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
