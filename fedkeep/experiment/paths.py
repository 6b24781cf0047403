"""Where the trials of a run lie, what their files are called, and when a trial is finished."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from pathlib import Path

from fedkeep.experiment.recipe import Method

TRIALS = "trials"
"""The folder of a run folder that holds one folder for each trial: a method with a seed."""
TRIAL_FILE = "trial.json"
"""The file of a trial's folder that describes the trial."""
ARCHIVE_SUFFIX = ".zip"
"""Of a file with the records of a run folder (see `fedkeep.reporting.archive`)."""


def trial_name(method: Method, seed: int) -> str:
    """Return the folder name of one method with one seed."""
    return f"{method.slug}-seed{seed}"


def trial_folder(folder: Path, method: Method, seed: int) -> Path:
    """Return the folder of one method with one seed in a run folder."""
    return folder / TRIALS / trial_name(method, seed)


def is_finished(trial: Traversable) -> bool:
    """Tell whether a trial's folder, or its place in an archive, holds all that a finished trial leaves."""
    return all((trial / name).is_file() for name in (TRIAL_FILE, "rounds.jsonl", "result.json"))
