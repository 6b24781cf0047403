"""The folders and files of a run's trials, and how a finished trial is recognised."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path, PurePath

from fedkeep._utils.digests import Digest, check_file, read_manifest
from fedkeep.errors import RunError
from fedkeep.experiment.recipe import Method
from fedkeep.trials.checkpoint import load_manifest
from fedkeep.trials.trial import MANIFEST

TRIALS = "trials"
"""The folder in a run folder that holds one folder for each trial."""
TRIAL_FILE = "trial.json"
"""The file in a trial's folder that describes the trial."""
ARCHIVE_SUFFIX = ".zip"
"""The suffix of a file with the records of a run folder (see `fedkeep.reporting.archive`)."""
RECORD_SUFFIXES = frozenset({".json", ".jsonl", ".toml"})
"""The suffixes of the files that an archive holds, and that reports are made of."""


def trial_name(method: Method, seed: int) -> str:
    """Return the name of a trial's folder.

    Returns: The name, such as ``sfedkd-seed0``.
    """
    return f"{method.slug}-seed{seed}"


def trial_folder(folder: Path, method: Method, seed: int) -> Path:
    """Return the path of a trial's folder."""
    return folder / TRIALS / trial_name(method, seed)


def is_finished(trial: Traversable) -> bool:
    """Return whether a trial is finished: it has a manifest, and every file is what the manifest lists.

    Returns: True for a finished trial. A damaged one is not finished: a resume repeats its last rounds.
    """
    return (trial / MANIFEST).is_file() and not find_damage(trial)


def find_damage(trial: Traversable, *, only_records: bool = False) -> list[str]:
    """Return what is wrong with the files of a finished trial.

    ``trial``: The trial's folder, on disk or in an archive, with a manifest.
    ``only_records``: Do not check the model, which archives do not hold and reports do not read.
    """
    try:
        files, _ = read_manifest(trial / MANIFEST)
    except RunError as error:
        return [str(error)]
    return _find_damage(trial, files, only_records)


def find_checkpoint_damage(trial: Traversable, manifest: str, *, only_records: bool = False) -> list[str]:
    """Return what is wrong with the files of a checkpoint.

    ``manifest``: The name of the checkpoint's manifest (see `fedkeep.trials.checkpoint.manifests`).
    """
    folder = trial / "checkpoint"
    try:
        checkpoint = load_manifest(folder / manifest)
    except RunError as error:
        return [str(error)]
    found = _find_damage(trial, checkpoint.records, beginning=True)
    return found if only_records else found + _find_damage(folder, checkpoint.files)


def _find_damage(
    folder: Traversable, files: Mapping[str, Digest], only_records: bool = False, beginning: bool = False
) -> list[str]:
    found = []
    for name, digest in files.items():
        if not only_records or PurePath(name).suffix in RECORD_SUFFIXES:
            try:
                check_file(folder / name, digest, beginning=beginning)
            except RunError as error:
                found.append(str(error))
    return found
