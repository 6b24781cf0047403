"""Where the cells of a run lie, and when one is finished."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedkeep.experiment.recipe import Method


def trial_name(method: Method, seed: int) -> str:
    """Return the folder name of one method with one seed."""
    return f"{method.slug}-seed{seed}"


def trial_folder(folder: Path, method: Method, seed: int) -> Path:
    """Return the folder of one method with one seed in a run folder."""
    return folder / "trials" / trial_name(method, seed)


def is_finished(cell: Path) -> bool:
    """Tell whether a cell's folder holds all that a finished cell leaves."""
    return all((cell / name).exists() for name in ("trial.json", "rounds.jsonl", "result.json"))
