"""Whether the files of a run are what was written: every trial of a run folder, or of an archive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

from fedkeep._utils.digests import is_sealed, read_json, read_toml
from fedkeep._utils.identity import ForeignFile
from fedkeep.errors import RunError
from fedkeep.experiment.belonging import UNKNOWN, check_inputs, check_recipe, check_trial, find_code_damage
from fedkeep.experiment.paths import TRIAL_FILE, find_checkpoint_damage, find_damage
from fedkeep.reporting.archive import open_run, read_bytes
from fedkeep.reporting.run_folder import read_run, trial_folders
from fedkeep.trials.checkpoint import manifests
from fedkeep.trials.trial import MANIFEST

Status = Literal["finished", "unfinished", "no digests", "damaged", "foreign"]


@dataclass(frozen=True)
class Verification:
    """What was found of one trial, or of the run's own files.

    ``name``: The trial's folder; ``run`` for the run's own files.
    ``status``: What the trial is. Older versions wrote no digests; such files were read, and could be. Foreign files
        are whole, and belong to another run or trial.
    ``details``: What was checked, or a sentence for each damaged or foreign file.
    """

    name: str
    status: Status
    details: tuple[str, ...]


def verify_run(path: str | Path) -> list[Verification]:
    """Check that every file of a run is whole and belongs to it, models and checkpoints included.

    ``path``: A run folder, an archive of one, or a folder in an archive.
    Returns: First the run's own files, then its trials by name.
    """
    root = open_run(Path(path))
    if not (root / "run.json").is_file():
        read_run(path)  # says what is there instead
    sealed = is_sealed(read_bytes(root / "run.json"))
    found: list[str] = []
    for name, read in (("run.json", read_json), ("recipe.toml", read_toml)):
        try:
            if sealed or (root / name).is_file():
                read(root / name, required=sealed)
        except RunError as error:
            found.append(str(error))
    status: Status = "damaged" if found else "finished" if sealed else "no digests"
    folders = trial_folders(root)
    if sealed and not found and (damage := find_code_damage(root)):
        status, found = "damaged", damage
    elif sealed and not found:
        try:
            check_recipe(root)
            check_inputs(filter(None, map(_inputs, folders)))
        except ForeignFile as error:
            status, found = "foreign", [str(error)]
    whole = sealed and status == "finished"
    run = Verification("run", status, tuple(found or ["run.json, recipe.toml and copies of your own code"]))
    trials = [(folder, _verify_trial(folder, sealed, isinstance(root, Path))) for folder in folders]
    return [run, *(_verify_belonging(root, trial, folder) if whole else trial for folder, trial in trials)]


def _inputs(trial: Traversable) -> tuple[object, int, dict[str, str]] | None:
    """Return folder, seed and hashes of the data of a trial, if they can be read."""
    try:
        info = read_json(trial / TRIAL_FILE)
        return trial, int(info["seed"]), dict(info.get("dependencies", {}))
    except (RunError, KeyError, TypeError, ValueError):
        return None


def _verify_belonging(root: Traversable, found: Verification, trial: Traversable) -> Verification:
    """Add to what was found of a trial's files whether they belong to the run, whose own files are whole."""
    try:
        is_told = check_trial(root, trial)
    except ForeignFile as error:
        return replace(
            found, status="foreign", details=(str(error), *(found.details if found.status == "damaged" else ()))
        )
    return found if is_told or found.status == "damaged" else replace(found, details=(*found.details, UNKNOWN))


def _verify_trial(trial: Traversable, sealed: bool, models: bool) -> Verification:
    """Check a trial; an archive holds no models and checkpoints."""
    if (trial / MANIFEST).is_file():
        found = find_damage(trial, only_records=not models)
        return Verification(
            trial.name, "damaged" if found else "finished", tuple(found or ["all files of its manifest"])
        )
    if not sealed:
        return Verification(trial.name, "no digests", ("written by a version without digests",))
    names = manifests(trial / "checkpoint")
    found = [damage for name in names for damage in find_checkpoint_damage(trial, name)]
    try:
        if names or (trial / TRIAL_FILE).is_file():
            read_json(trial / TRIAL_FILE)
    except RunError as error:
        found.append(str(error))
    checked = f"checkpoints of rounds {', '.join(name[9:-5] for name in reversed(names))}" if names else "no checkpoint"
    return Verification(trial.name, "damaged" if found else "unfinished", tuple(dict.fromkeys(found)) or (checked,))
