"""The folders and files of a run's trials, and whether what lies in a run folder belongs to it.

That is told from recipe.toml and run.json alone: nothing is imported.
"""

import shlex
import tomllib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.resources.abc import Traversable
from pathlib import Path, PurePath
from typing import Any

from fedkeep._utils import digests
from fedkeep._utils.digests import Digest, ForeignFile, Identity, digest_of, read_json, read_manifest, read_toml
from fedkeep._utils.files import atomic_write
from fedkeep.errors import RunError, in_one_line
from fedkeep.experiment.plugins import code_of, source_of
from fedkeep.experiment.recipe import Method, slug
from fedkeep.trials.checkpoint import load_manifest, manifests
from fedkeep.trials.trial import MANIFEST

TRIALS = "trials"
"""The folder in a run folder that holds one folder for each trial."""
TRIAL_FILE = "trial.json"
"""The file in a trial's folder that describes the trial."""
ARCHIVE_SUFFIX = ".zip"
"""The suffix of a file with the records of a run folder (see `fedkeep.reporting.run_folder`)."""
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


def find_damage(trial: Traversable, *, without_models: bool = False) -> list[str]:
    """Return what is wrong with the files of a finished trial.

    ``trial``: The trial's folder, on disk or in an archive, with a manifest.
    ``without_models``: Models may be missing: archives do not hold them and reports do not read them.
    """
    try:
        files, _ = read_manifest(trial / MANIFEST)
    except RunError as error:
        return [str(error)]
    for name in [*files] if without_models else ():
        if PurePath(name).suffix not in RECORD_SUFFIXES and not (trial / name).is_file():
            del files[name]
    return _find_damage(trial, files)


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


def _find_damage(folder: Traversable, files: Mapping[str, Digest], beginning: bool = False) -> list[str]:
    found = []
    for name, digest in files.items():
        try:
            digests.check_file(folder / name, digest, beginning=beginning)
        except RunError as error:
            found.append(str(error))
    return found


CODE = "code"
"""The folder in a run folder with copies of the user's own code."""
NOT_SETTINGS = frozenset({"title", "seeds", "methods", "log", "paper"})
"""What of a recipe no trial's result depends on."""
UNKNOWN = "made before files said to what they belong: cannot tell whether it belongs to this run"


def settings_of(recipe: Mapping[str, Any], label: str | None = None) -> dict[str, Any]:
    """Return the options of a recipe's table by name, such as ``"training.lr"``, with those of a method's too."""
    own: Mapping[str, Any] = next((method for method in recipe.get("methods", ()) if method.get("label") == label), {})
    sections = {name: part for name, part in recipe.items() if name not in NOT_SETTINGS}
    sections["methods"] = {name: value for name, value in own.items() if name not in ("label", "grid_of")}
    settings = {}
    for section, part in sections.items():
        named = {f"{section}.{name}": v for name, v in part.items()} if isinstance(part, dict) else {section: part}
        settings.update(named)
    return settings


@lru_cache(maxsize=4)
def _parse(text: str) -> tuple[dict[str, Any], dict[str, tuple[str, int]]]:
    """Return a recipe's table, and label and seed of its trials by their folders' names."""
    recipe = tomllib.loads(text)
    names = {str(method.get("label")): slug(str(method.get("label"))) for method in recipe.get("methods", ())}
    return recipe, {f"{names[label]}-seed{seed}": (label, seed) for label in names for seed in recipe.get("seeds", ())}


def _read_recipe(root: Traversable) -> tuple[dict[str, Any], dict[str, tuple[str, int]]]:
    try:
        return _parse(read_toml(root / "recipe.toml"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{root / 'recipe.toml'} is no TOML: {in_one_line(error, 200)}.") from error


def run_identity(root: Traversable) -> Identity:
    """Return what run.json says of the recipe's options and of the user's code; nothing in older runs."""
    path = root / "run.json"
    return Identity.from_table(path, read_json(path).get("identity"))


def identity_of(root: Traversable, label: str, seed: int) -> Identity:
    """Return the identity of a trial of a run: what its files must say."""
    return Identity(label, seed, settings_of(_read_recipe(root)[0], label), run_identity(root).code)


def trial_names(root: Traversable) -> set[str]:
    """Return the names of all trials that a run's recipe asks for."""
    return set(_read_recipe(root)[1])


def check_recipe(root: Traversable) -> None:
    """Raise `ForeignFile` if recipe.toml is not the one with which the run was begun."""
    found = Identity(settings=settings_of(_read_recipe(root)[0]))
    advice = "Put back the recipe.toml with which this run was begun, or begin a new run."
    found.check(root / "recipe.toml", run_identity(root), advice)


def identities(trial: Traversable) -> dict[str, Identity]:
    """Return what the files of a trial say to what they belong; a finished trial's manifest speaks for all."""
    found = {}
    try:
        if (trial / MANIFEST).is_file():
            return {MANIFEST: Identity.from_table(trial / MANIFEST, read_manifest(trial / MANIFEST)[1].get("identity"))}
        if (trial / TRIAL_FILE).is_file():
            described = read_json(trial / TRIAL_FILE)
            found[TRIAL_FILE] = Identity.from_table(trial / TRIAL_FILE, described.get("identity"))
    except RunError:
        return {}  # a damaged file is found and named where it is read
    for name in manifests(trial / "checkpoint"):
        try:
            found[f"checkpoint/{name}"] = load_manifest(trial / "checkpoint" / name).identity
        except RunError:
            continue
    return found


def check_trial(root: Traversable, trial: Traversable) -> bool:
    """Raise `ForeignFile` if a trial's folder belongs to another run or trial; return whether that can be told."""
    known = {name: one for name, one in identities(trial).items() if one != Identity()}
    if not known:
        return False
    _, trials = _read_recipe(root)
    if trial.name not in trials:
        named = next(iter(known.values()))
        raise ForeignFile(
            f"{trial} does not belong here: it is of {named.method} with seed {named.seed}, which recipe.toml does not "
            "name. Remove it, or put back the recipe.toml with which it was run."
        )
    expected = identity_of(root, *trials[trial.name])
    for name, identity in known.items():
        identity.check(
            trial / name,
            expected,
            f"Remove {trial} to run this trial again, or put back what belongs to it: its folder, or recipe.toml.",
        )
    return True


def check_inputs(trials: Iterable[tuple[object, int, Mapping[str, str]]]) -> None:
    """Raise `ForeignFile` if two trials of a run with one seed had other data, partitions or pretrained networks.

    Each is given as its folder, its seed, and the hashes that its trial.json holds.
    """
    first: dict[tuple[int, str], tuple[object, str]] = {}
    for folder, seed, inputs in trials:
        for name, digest in inputs.items():
            other, before = first.setdefault((seed, name), (folder, digest))
            if before != digest:
                raise ForeignFile(
                    f"{folder} and {other} do not belong together: they were run with another {name}. Remove the one "
                    "that had the wrong one, and run its trial again."
                )


def keep_code(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Copy the user's code into a run folder, and return what run.json says of it."""
    names = list(names)
    copies = {path: name for name, path in code_of(names).items()}
    contents = {name: path.read_bytes() for path, name in copies.items()}
    for name, content in contents.items():
        atomic_write(folder / CODE / name, content)
    use = [f"{CODE}/{copies[source_of(name)]}" if name.endswith(".py") else name for name in names]
    return {
        "use": list(dict.fromkeys(use)),  # a file may be given by name, and for its classes too
        "code": {name: digest_of(content).sha256 for name, content in contents.items()},
    }


def check_code(folder: Path, used_now: Iterable[str]) -> None:
    """Raise `RunError` if the user's code, which was imported, is not that with which a run was begun."""
    recorded = run_identity(folder).code
    now = code_digests(used_now, main=True).values() if recorded else ()
    if not (changed := [name for name, digest in recorded.items() if digest not in now]):
        return
    names, copies = used(folder), folder / CODE
    alone = {name: str(copies / f"{name}.py") for name in names if f"{name}.py" in recorded}
    # Of a package, a file alone may lack what stands beside it.
    packages = any(not name.endswith(".py") and name not in alone for name in names)
    use = " ".join(f"--use {shlex.quote(alone.get(name, name))}" for name in names)
    use += f", with {copies} in PYTHONPATH" if packages else ""
    damaged = "".join(f" {damage}" for damage in find_code_damage(folder))
    raise RunError(
        f"{folder} was begun with code of its own, and {' and '.join(changed)} was changed since, or is not given: its "
        f"rounds would not belong together. Go on with the copies in {copies} ({use}), or begin a new run."
        f"{damaged}"
    )


def code_digests(names: Iterable[str], *, main: bool = False) -> dict[str, str]:
    """Return the SHA-256 of each file of the user's code that was imported; with ``main``, of the program too."""
    return {name: digest_of(path.read_bytes()).sha256 for name, path in code_of(names, main=main).items()}


def find_code_damage(root: Traversable) -> list[str]:
    """Return a sentence for each copy of the user's code that is not what run.json says."""
    found = []
    for name, digest in run_identity(root).code.items():
        path = root.joinpath(CODE, *name.split("/"))
        if not path.is_file():
            found.append(f"{path} is missing.")
        elif digest_of(path.read_bytes()).sha256 != digest:
            found.append(f"{path} is damaged or was edited since the run began.")
    return found


def used(folder: Path) -> list[str]:
    """Return what ``--use`` is given to go on with a run: the copies in its folder, and names of modules."""
    path = folder / "run.json"
    names = read_json(path).get("use", []) if path.is_file() else []
    return [str(folder / name) if str(name).endswith(".py") else str(name) for name in names]
