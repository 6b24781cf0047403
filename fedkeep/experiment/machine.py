"""Where and how a recipe is carried out, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
class Machine:
    """Where and how a recipe is carried out.

    On the same device it changes no result, but for the rounding of stacks and graphs.

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
    graphs : whether a GPU replays local steps as CUDA graphs, which may change rounding, after a resume too; kept by a
        resume. Clients are then trained one after another unless ``stack`` says otherwise, and trainings that a method
        watches or composes are not recorded.
    use : files and modules with methods of the user's own, imported first.
    """

    device: str = "cpu"
    threads: int = 1
    stack: int = 0
    workers: int = 1
    data_dir: str | None = None
    allow_code: bool = False
    use: tuple[str, ...] = ()
    graphs: bool = False
