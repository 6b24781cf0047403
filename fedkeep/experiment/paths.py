"""The folders and files of a run's trials, and how a finished trial is recognised."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from pathlib import Path

from fedkeep.experiment.recipe import Method

TRIALS = "trials"
"""The folder in a run folder that holds one folder for each trial."""
TRIAL_FILE = "trial.json"
"""The file in a trial's folder that describes the trial."""
ARCHIVE_SUFFIX = ".zip"
"""The suffix of a file with the records of a run folder (see `fedkeep.reporting.archive`)."""


def trial_name(method: Method, seed: int) -> str:
    """Return the name of a trial's folder.

    Parameters
    ----------
    method : Method
        The trial's method.
    seed : int
        The trial's seed.

    Returns
    -------
    str
        The name, such as ``sfedkd-seed0``.
    """
    return f"{method.slug}-seed{seed}"


def trial_folder(folder: Path, method: Method, seed: int) -> Path:
    """Return the path of a trial's folder.

    Parameters
    ----------
    folder : Path
        The run folder.
    method : Method
        The trial's method.
    seed : int
        The trial's seed.

    Returns
    -------
    Path
        The trial's folder.
    """
    return folder / TRIALS / trial_name(method, seed)


def is_finished(trial: Traversable) -> bool:
    """Return whether a trial's folder holds all files of a finished trial.

    Parameters
    ----------
    trial : Traversable
        The trial's folder, on disk or in an archive.

    Returns
    -------
    bool
        True for a finished trial.
    """
    return all((trial / name).is_file() for name in (TRIAL_FILE, "rounds.jsonl", "result.json"))
