"""Where the trials of a run lie, and when one is finished."""

from __future__ import annotations

from pathlib import Path

from fedkeep.experiment.recipe import Method


def trial_name(method: Method, seed: int) -> str:
    """Return the folder name of one method with one seed."""
    return f"{method.slug}-seed{seed}"


def trial_folder(folder: Path, method: Method, seed: int) -> Path:
    """Return the folder of one method with one seed in a run folder."""
    return folder / "trials" / trial_name(method, seed)


def is_finished(folder: Path) -> bool:
    """Tell whether a trial's folder holds all that a finished trial leaves."""
    return all((folder / name).exists() for name in ("trial.json", "rounds.jsonl", "result.json"))
