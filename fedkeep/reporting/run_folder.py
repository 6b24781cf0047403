"""Read what a run wrote, from its folder or from an archive of it: one `Run` with its trials.

A run that was killed leaves a cut last line and trials without a result; both are expected here, and marked. Whatever
is read is checked against its digest (see `fedkeep._utils.digests`), and `verify_run` checks all files.

An archive is a ZIP file with the records of runs, which is read without being unpacked. Of one run it has the run
folder's own names; of several runs it has a folder for each, and ``results/choices.zip/confirm-sfedkd`` is the path of
one. Models, checkpoints and what `fedkeep report` writes again stay out of it.
"""

import io
import json
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from fedkeep._utils import digests
from fedkeep._utils.digests import ForeignFile, read_all, read_json, read_toml
from fedkeep._utils.files import atomic_write, check_utf8
from fedkeep.errors import RunError
from fedkeep.experiment import provenance
from fedkeep.experiment.provenance import ARCHIVE_SUFFIX, RECORD_SUFFIXES, TRIAL_FILE, TRIALS
from fedkeep.interface import algorithms
from fedkeep.reporting.trial import TrialResult, Window
from fedkeep.rounds.run_settings import AVERAGE_SUFFIX, RunSettings
from fedkeep.trials.checkpoint import manifests
from fedkeep.trials.trial import LEDGER, MANIFEST

NUMBERS = {
    "task", "round", "loss", "examples", "down", "up", "test_loss", "train", "teachers", "evaluate", "round_seconds",
    "checkpoint", "server",
}  # fmt: skip
KINDS = {"seed": int, "rounds": int, "options": dict, "test_total": list, "versions": list}  # in a trial's description


@dataclass(frozen=True)
class Run:
    """A run folder: `info` is its run.json, `recipe` the text of its resolved recipe."""

    path: Path
    info: Mapping[str, Any]
    recipe: str
    trials: tuple[TrialResult, ...]

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Return the recipe as a table; empty where it is missing or is no TOML."""
        try:
            return tomllib.loads(self.recipe)
        except (ValueError, RecursionError):
            return {}

    @property
    def title(self) -> str:
        """Return the title of the run, or else the recipe's name, or else the folder's."""
        return str(self.info.get("title") or self.info.get("recipe") or self.path.name)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels of the methods, in the recipe's order."""
        return tuple(dict.fromkeys(trial.label for trial in self.trials))


def read_run(path: str | Path) -> Run:
    """Read a run, finished or not.

    Trials come in the order in which the recipe names their methods, then by seed.

    ``path``: A run folder, an archive of one, or a folder in an archive of several.
    """
    path = Path(path)
    root = open_run(path)
    if not (root / "run.json").is_file():
        raise RunError(_not_a_run(path))
    info, text, folders = read_json(root / "run.json"), read_toml(root / "recipe.toml"), trial_folders(root)
    provenance.check_recipe(root)
    for folder in folders:
        provenance.check_trial(root, folder)
    trials = [_read_trial(folder, path / TRIALS / folder.name) for folder in folders]
    provenance.check_inputs((trial.path, trial.seed, trial.info.get("dependencies", {})) for trial in trials)
    run = Run(path, info, text, ())
    trials = [result for trial in _with_window(trials, run.settings) for result in _by_evaluation_model(trial)]
    named = [str(method.get("label")) for method in run.settings.get("methods", ())]

    def rank(trial: TrialResult) -> tuple[int, str, int]:
        place = named.index(trial.method) if trial.method in named else len(named)  # an average beside its method
        return (place, trial.label, trial.seed)

    return Run(path, info, text, tuple(sorted(trials, key=rank)))


def trial_folders(root: Traversable) -> list[Traversable]:
    """Return the folders of the trials that were begun.

    ``root``: The run folder, on disk or in an archive.
    Returns: The folders, by name.
    """
    held = root / TRIALS
    folders = sorted(held.iterdir(), key=lambda folder: folder.name) if held.is_dir() else []
    return [folder for folder in folders if (folder / TRIAL_FILE).is_file() or (folder / MANIFEST).is_file()]


def _check_records(trial: Traversable) -> bool:
    """Check what a report of a trial is made of, and return whether the trial is finished."""
    finished, found = (trial / MANIFEST).is_file(), []
    if finished:
        found = provenance.find_damage(trial, without_models=True)
    elif last := manifests(trial / "checkpoint")[:1]:
        found = provenance.find_checkpoint_damage(trial, last[0], only_records=True)
        # A trial that is running may have replaced its checkpoint meanwhile.
        found = found if manifests(trial / "checkpoint")[:1] == last else []
    if found:
        raise RunError(
            f"{' '.join(found)} Restore it from a copy, or repeat what is damaged with `fedkeep resume`; "
            "`fedkeep verify` checks all files."
        )
    return finished


def _with_window(trials: list[TrialResult], settings: Mapping[str, Any]) -> list[TrialResult]:
    """Return trials that know over which rounds tables average: the same of all methods of a run.

    Where a method treats one client of its cohort apart in each round, in turn, its accuracy has the period of a turn.
    The window is then of whole turns.
    """
    known = {name for name, one in algorithms().items() if one.has_rotating_role}
    cohorts = [t.info for t in trials if t.algorithm in known and t.info.get("cohort_size")]
    # Of a cohort that is drawn anew in each round, no client has its turn after so many rounds.
    turns = [int(of["cohort_size"]) for of in cohorts if of["cohort_size"] == of.get("num_clients")]
    section = settings.get("run")
    given = section.get("evaluation_window") if isinstance(section, Mapping) else None
    usual = RunSettings()  # old recipes name no window
    share = float(given) if isinstance(given, int | float) and given > 0 else usual.evaluation_window
    memory = _memory(section) if isinstance(section, Mapping) else 0.0
    window = Window(share, max(turns, default=1), memory or 1 / (1 - usual.ema_decay))
    return [replace(trial, window=window) for trial in trials]


def _read_trial(folder: Traversable, path: Path) -> TrialResult:
    finished = _check_records(folder)
    description, partition = folder / TRIAL_FILE, folder / "partition.json"
    info = read_json(description)
    missing = [name for name in ("label", "algorithm", "seed", "test_total") if name not in info]
    if missing:
        raise RunError(f"{description} lacks {', '.join(missing)}: it was not written by this version of FedKeep.")
    wrong = [name for name, kind in KINDS.items() if name in info and not isinstance(info[name], kind)]
    if wrong or not all(type(count) in (int, float) for count in info["test_total"]):
        names = ", ".join(wrong or ["test_total"])
        raise RunError(f"{description} holds {names} of another kind than a run writes. Restore it, or repeat the run.")
    rounds = _by_round(_read_lines(folder / "rounds.jsonl"))
    classes = len(info["test_total"])
    if longer := [row["round"] for row in rounds if len(row.get("correct") or ()) > classes]:
        where = f"{folder / 'rounds.jsonl'}, round {longer[0]}"
        raise RunError(f"{where}: 'correct' counts more classes than the {classes} of the test set. {REPEAT}")
    return TrialResult(
        label=str(info["label"]),
        rounds=rounds,
        timings=_by_round(_read_lines(folder / "timings.jsonl")),
        ledger=_read_lines(folder / LEDGER),
        partition=read_json(partition) if partition.is_file() else {},
        info=info,
        finished=finished,
        path=path,
        confusions=_read_confusions(folder / "confusion.json", classes),
    )


def _read_confusions(path: Traversable, classes: int) -> tuple[tuple[int, ...], ...]:
    """Read how often each class was taken for each; empty where that was not recorded."""
    counts = read_json(path).get("counts") if path.is_file() else []
    rows: list[Any] = counts if isinstance(counts, list) else [None]
    whole = all(isinstance(row, list) and len(row) == classes and all(type(n) is int for n in row) for row in rows)
    if not whole or len(rows) not in (0, classes):
        raise RunError(f"{path} should hold counts of {classes} classes by {classes}. Restore it, or remove it.")
    return tuple(tuple(row) for row in rows)


def _by_evaluation_model(trial: TrialResult) -> Iterator[TrialResult]:
    """Yield a trial as it stands, and once more for every other model that was evaluated beside the first."""
    first, *others = trial.info.get("evaluation_models") or ["last"]
    for name in (first, *others):
        rounds = []
        for row in trial.rounds:
            plain = {key: value for key, value in row.items() if key != "evaluation_models"}
            if name != first and "correct" in row:
                plain |= row["evaluation_models"][name]
            rounds.append(plain)
        yield replace(
            trial,
            label=trial.label + AVERAGE_SUFFIX[name],
            evaluation_model=name,
            rounds=rounds,
            confusions=trial.confusions if name == first else (),
            window=trial.window if name == "moving" else replace(trial.window, memory=_memory(trial.options)),
        )


def _memory(options: Mapping[str, Any]) -> float:
    """Return on how many rounds a moving average of such options depends, as SeqKeep's own; 0 where there is none."""
    decay = options.get("ema_decay")
    return 1 / (1 - decay) if isinstance(decay, int | float) and 0 <= decay < 1 else 0.0


REPEAT = "Restore the file, or repeat the run from its recipe.toml."


def _read_lines(path: Traversable) -> list[dict[str, Any]]:
    """Read a file of one JSON object a line; a last line cut short by a kill is left out."""
    if not path.is_file():
        return []
    lines = [(number, line) for number, line in enumerate(read_all(path).split(b"\n"), start=1) if line.strip()]
    rows = []
    for place, (number, line) in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:  # includes text cut inside a character
            if place == len(lines):
                break
            raise RunError(
                f"{path}, line {number} is damaged: expected one JSON object a line; only the last may be cut. {REPEAT}"
            ) from None
        if not isinstance(row, dict) or type(row.get("round")) is not int or type(row.get("task", 1)) is not int:
            raise RunError(f"{path}, line {number}: expected an object with a 'round' and a 'task', two integers.")
        if wrong := [name for name, value in row.items() if not _fits(name, value)]:
            raise RunError(f"{path}, line {number}: {wrong[0]!r} is of another kind than a run writes. {REPEAT}")
        rows.append(row)
    return rows


def _fits(name: str, value: Any) -> bool:
    """Tell whether a value in a round's record is of the kind that a run writes under this name."""
    if name in ("lost", "log", "served", "clients"):
        return isinstance(value, dict)
    if name in ("cohort", "correct", "refused", "total"):
        return isinstance(value, list) and (name in ("cohort", "refused") or all(map(_is_number, value)))
    if name in NUMBERS or name.startswith("step "):
        return value is None or _is_number(value)
    return True


def _is_number(value: Any) -> bool:
    # Of larger integers there is no float.
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _by_round(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep one record a round, the latest: a resumed run may write a round again."""
    latest = {(row.get("task", 1), row["round"]): row for row in rows}
    return [latest[key] for key in sorted(latest)]


def _not_a_run(path: Path) -> str:
    root = open_run(path)
    if path.is_file() and (held := runs_in(path)):
        return f"{path} holds {len(held)} runs. Name one of them: {', '.join(map(str, held))}."
    what = "has no run.json" if root.is_dir() or root.is_file() else "does not exist"
    near = [*(place for place in path.parents if (place / "run.json").is_file()), *runs_in(path), *runs_in(path.parent)]
    nearby = f"Runs nearby: {', '.join(map(str, near[:8]))}." if near else "There is no run nearby."
    return (
        f"{path} is not a run: it {what}. A run folder is what `fedkeep run` writes: run.json, recipe.toml and "
        f"{TRIALS}/. {nearby}"
    )


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder or an archive, by name.

    Returns: Run folders, archives of one run, and the runs in archives of several; an archive that cannot be read as it
        is.
    """
    root = open_run(folder)
    found: list[Path] = []
    for name in sorted(child.name for child in root.iterdir()) if root.is_dir() else ():
        path = folder / name
        if (root / name / "run.json").is_file():
            found.append(path)
        elif path.suffix == ARCHIVE_SUFFIX and path.is_file():
            found += _runs_of_archive(path)
    return found


def _runs_of_archive(path: Path) -> list[Path]:
    try:
        with zipfile.ZipFile(path) as archive:  # only its directory is read
            names = set(archive.namelist())
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError):
        return [path]
    if "run.json" in names:
        return [path]
    return [path / name.partition("/")[0] for name in sorted(names) if name.partition("/")[2] == "run.json"]


Status = Literal["finished", "unfinished", "damaged", "foreign"]


@dataclass(frozen=True)
class Verification:
    """What was found of one trial, or of the run's own files.

    ``name``: The trial's folder; ``run`` for the run's own files.
    ``status``: What the trial is. Foreign files are whole, and belong to another run or trial.
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
    found = [*_errors(read_json, root / "run.json"), *_errors(read_toml, root / "recipe.toml")]
    found = found or provenance.find_code_damage(root)
    status: Status = "damaged" if found else "finished"
    folders = trial_folders(root)
    if not found:
        try:
            provenance.check_recipe(root)
            provenance.check_inputs(inputs for folder in folders for inputs in _inputs(folder))
        except ForeignFile as error:
            status, found = "foreign", [str(error)]
    run = Verification("run", status, tuple(found or ["run.json, recipe.toml and copies of your own code"]))
    missing = provenance.trial_names(root) - {folder.name for folder in folders} if status == "finished" else set()
    return [
        run,
        *(_verify_trial(root, folder, belongs=status == "finished") for folder in folders),
        *(Verification(name, "unfinished", ("there is nothing of it",)) for name in sorted(missing)),
    ]


def _errors(read: Callable[[Traversable], object], path: Traversable) -> list[str]:
    """Return what reading a file raises."""
    try:
        read(path)
    except RunError as error:
        return [str(error)]
    return []


def _inputs(trial: Traversable) -> Iterator[tuple[object, int, dict[str, str]]]:
    """Yield folder, seed and hashes of the data of a trial, if they can be read."""
    with suppress(RunError, KeyError, TypeError, ValueError):
        info = read_json(trial / TRIAL_FILE)
        yield trial, int(info["seed"]), dict(info.get("dependencies", {}))


def _verify_trial(root: Traversable, trial: Traversable, *, belongs: bool) -> Verification:
    """Check a trial, and whether it belongs to the run if that is asked; an archive holds no models and checkpoints."""
    status: Status = "finished"
    if (trial / MANIFEST).is_file():
        found = provenance.find_damage(trial, without_models=not isinstance(root, Path))
        checked = "all files of its manifest"
    else:
        status, names = "unfinished", manifests(trial / "checkpoint")
        damage = {name: provenance.find_checkpoint_damage(trial, name) for name in names}
        kept = manifests(trial / "checkpoint")  # a trial that is running may have replaced the others meanwhile
        found = [each for name in names if name in kept for each in damage[name]]
        found += _errors(read_json, trial / TRIAL_FILE) if names or (trial / TRIAL_FILE).is_file() else []
        rounds = ", ".join(name[9:-5] for name in reversed(names))
        checked = f"checkpoints of rounds {rounds}" if names else "no checkpoint"
    details = list(dict.fromkeys(found)) or [checked]
    try:
        if belongs and not provenance.check_trial(root, trial) and not found:
            details.append(provenance.UNKNOWN)
    except ForeignFile as error:
        return Verification(trial.name, "foreign", (str(error), *found))
    return Verification(trial.name, "damaged" if found else status, tuple(details))


MAX_FILES = 100_000
MAX_BYTES = 1 << 30
"""Of an archive, and of all that it unpacks to: an archive that says it holds more is refused."""

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # which can be unpacked in parts of a size that is asked for


def open_run(path: Path) -> Traversable:
    """Return the root of a run's files.

    ``path``: A run folder, an archive of one, or a folder in an archive.
    Returns: The folder itself, on disk or in the archive. What does not exist is returned as it is given.
    """
    check_utf8(path)
    file = None if path.is_dir() else next((place for place in (path, *path.parents) if place.is_file()), None)
    if file is None:
        return path
    inside, path = path.relative_to(file).parts, file
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RunError(f"{path} is larger than {MAX_BYTES:,} bytes, which no archive of a run is.")
        # The whole file is read, so that none stays open for as long as somebody may still look into it.
        archive = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise RunError(f"{path} is neither a run folder nor an archive of one ({error}).") from None
    _check_entries(path, archive)
    archive.filename = str(path)  # what errors call it
    return zipfile.Path(archive).joinpath(*inside)


def write_archive(runs: Mapping[str, Path], target: Path, further: Mapping[str, bytes] | None = None) -> Path:
    """Write the records of run folders into one file; the same records give the same bytes.

    ``runs``: Run folders by their names in the archive; an empty name makes it an archive of this run only.
    ``target``: The file. In one that exists runs of the same names are replaced, unless files would be lost; others
        stay.
    ``further``: More files by name.
    """
    held, files = _files_of(target), dict(further or {})
    for name, run in runs.items():
        folder = f"{name}/" if name else ""
        found = {f"{folder}{path}": content for path, content in _records(run).items()}
        if lost := sorted(path for path in held if path.startswith(folder) and path not in found):
            raise RunError(
                f"{target} holds {lost[0]}{f' and {len(lost) - 1} more files' * (len(lost) > 1)}, which {run} has not. "
                "Choose another --out, or remove it."
            )
        if (started := _started(held.get(f"{folder}run.json"))) not in ("", _started(found[f"{folder}run.json"])):
            raise RunError(
                f"{target} holds another run{f' named {name}' if name else ''}, which was started at {started}. Rename "
                f"{run}, or choose another --out."
            )
        files |= found
    if "run.json" in held and "" not in runs:
        raise RunError(f"{target} is the archive of one run; others cannot be added to it. Choose another --out.")
    files = held | files
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", compresslevel=9) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name)  # with no time of its own: 1980
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name], zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(packed) as archive:
        _check_entries(target, archive)  # what could not be read again is not written
    return atomic_write(target, packed.getvalue())


def _started(info: bytes | None) -> str:
    """Return when the run of a run.json was started; empty without a file that tells it."""
    with suppress(ValueError):
        return str(json.loads(info or b"{}").get("started", ""))
    return ""


def _files_of(target: Path) -> dict[str, bytes]:
    """Return the files of an archive, none if there is no such archive yet."""
    if not target.is_file():
        return {}
    root = open_run(target)
    assert isinstance(root, zipfile.Path)
    return {entry.filename: read_all(root / entry.filename) for entry in root.root.infolist() if not entry.is_dir()}


def _records(run: Path) -> dict[str, bytes]:
    """Return the files that a run recorded, by name: its own, those of its trials, and the user's code."""
    code = {
        path.relative_to(run).as_posix(): path.read_bytes() for path in sorted((run / provenance.CODE).rglob("*.py"))
    }
    return code | {
        path.relative_to(run).as_posix(): _record(path)
        for folder in (run, *sorted((run / TRIALS).glob("*")))
        for path in sorted(folder.glob("*"))
        if path.is_file() and path.suffix in RECORD_SUFFIXES
    }


def _record(path: Path) -> bytes:
    """Return what the archive holds of a file.

    A manifest lists what is in the archive only. Of the absolute paths of the command and the recipe only the last
    names stay: an archive is handed on, and where folders lie on somebody's machine is nobody else's business. What the
    recipe says of its data is sealed, and stays.
    """
    if path.name == "run.json":
        info = read_json(path)
        command, where = info.get("command"), [info.pop(name) for name in list(info) if name.endswith("_path")]
        short = [_without_folders(word) for word in command] if isinstance(command, list) else command
        recipe = str(info.get("recipe", ""))
        is_path = Path(recipe).is_absolute()
        if where or command != short or is_path:
            info |= {"command": short} | ({"recipe": "/".join(Path(recipe).parts[1:][-2:])} if is_path else {})
            return digests.format_json(info, indent=2).encode()
    if path.name != MANIFEST:
        return path.read_bytes()
    files, further = digests.read_manifest(path)
    kept = {name: digest for name, digest in files.items() if PurePosixPath(name).suffix in RECORD_SUFFIXES}
    return digests.format_manifest(kept, **further).encode()


def _without_folders(word: Any) -> Any:
    """Return a word of a command with the last name of an absolute path in its place, also after an equals sign."""
    before, equals, value = word.rpartition("=") if isinstance(word, str) else ("", "", word)
    return f"{before}{equals}{Path(value).name}" if isinstance(value, str) and Path(value).is_absolute() else word


def _check_entries(path: Path, archive: zipfile.ZipFile) -> None:
    """Raise `RunError` for an archive that no run wrote."""
    entries = archive.infolist()
    names, size = [entry.filename for entry in entries], sum(entry.file_size for entry in entries)
    if len(entries) > MAX_FILES or size > MAX_BYTES:
        raise RunError(
            f"{path} says that it holds {len(entries):,} files of {size:,} bytes in all. An archive of a run has at "
            f"most {MAX_FILES:,} files and {MAX_BYTES:,} bytes."
        )
    for entry in entries:
        name = PurePosixPath(entry.filename)
        if name.is_absolute() or ".." in name.parts or any(character in entry.filename for character in "\\:\0"):
            raise RunError(
                f"{path} holds a file named {entry.filename!r}, which leads out of the archive or is no name on every "
                "system. Rename it, or its run folder."
            )
        if entry.compress_type not in _METHODS or entry.flag_bits & 0x61:  # encrypted, or patched data
            raise RunError(f"{path} holds {entry.filename!r}, encrypted or compressed in another way than deflate.")
    if len(set(names)) < len(names):
        raise RunError(f"{path} holds two files of one name.")
