"""Checkpoints between rounds: the whole state of a run, so that a kill at any moment loses nothing older.

A checkpoint is a manifest that lists files with their digests: those of the server, one for each client that has a
state, and the records up to its round. Files are never overwritten: new files are forced to disk, then their manifest
is, then all files but those of the last two checkpoints are removed. If the last one is damaged, the one before it is
taken. Random generators need not be saved, since each is derived from a name.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedkeep._utils.digests import DamagedFile, Digest, Identity, digest_of, read_all, read_manifest, write_manifest
from fedkeep._utils.files import atomic_write, quoted_name, sync_folder
from fedkeep.errors import RunError, ValueRefused
from fedkeep.interface.algorithm import state_types
from fedkeep.interface.codec import decode, encode
from fedkeep.models import Weights
from fedkeep.models.weights import find_mismatch
from fedkeep.rounds.reply_step import ReplyStep
from fedkeep.trials.simulation import Simulation

log = logging.getLogger(__name__)
FORMAT = 7
MAX_LOST_SECONDS = 60.0  # of finished rounds that a kill may lose
LONGEST_CLIENT = 200  # bytes of a client in a file's name, which has 255 with all that `atomic_write` adds meanwhile
KEEP = 2  # checkpoints that are kept: the last one, and the one before
_MANIFEST = re.compile(r"manifest-(\d+)\.json")

CheckRecords = Callable[[Mapping[str, Digest]], None]
"""Raises `DamagedFile` if the record files do not begin as they did when a checkpoint was saved."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one checkpoint consists of.

    ``round``: The number of finished rounds.
    ``files``: The digests of the checkpoint's files, by name.
    ``server``: The file of the server: its state and all its models, which may share tensors.
    ``clients``: The file of each client that has a state.
    ``records``: The digests of the record files at that round.
    ``kept``: The file of what reply steps keep.
    ``steps``: The names of the run's reply steps, in order.
    ``identity``: To which trial it belongs.
    ``ended``: Whether a callback has ended the trial.
    """

    round: int
    server: str
    clients: Mapping[str, str]
    kept: str
    steps: Sequence[str]
    identity: Identity = Identity()
    ended: bool = False
    records: Mapping[str, Digest]
    files: Mapping[str, Digest]

    @property
    def name(self) -> str:
        """The name of the manifest's own file."""
        return f"manifest-{self.round}.json"


def manifests(folder: Traversable) -> list[str]:
    """Return the names of the manifests in a checkpoint folder.

    ``folder``: The folder, which need not exist.
    Returns: The names, the latest round's first.
    """
    found = {
        int(match[1]): file.name
        for file in (folder.iterdir() if folder.is_dir() else ())
        if (match := _MANIFEST.fullmatch(file.name))
    }
    return [found[round] for round in sorted(found, reverse=True)]


def load_manifest(path: Traversable) -> Manifest:
    """Read the manifest of a checkpoint."""
    files, entries = read_manifest(path)
    if (found := entries.pop("format", None)) != FORMAT:
        raise RunError(f"{path} was written by another version of FedKeep (format {found}).")
    if path.name != f"manifest-{entries['round']}.json":
        raise DamagedFile(f"{path} is damaged: it is the manifest of round {entries['round']}.")
    entries["records"] = {name: Digest(**digest) for name, digest in entries["records"].items()}
    entries["identity"] = Identity.from_table(path, entries.get("identity"))
    return Manifest(**entries, files=files)


@dataclass
class Checkpoint:
    """The checkpoint folder of one run.

    ``share``: The largest share of the run's time that saving may take, unless a minute of rounds could be lost (see
        `due`).
    ``identity``: The trial, to which all checkpoints in the folder must belong.
    ``cost``: Seconds that the last save took.
    """

    folder: Path
    share: float = 0.01
    identity: Identity = Identity()
    cost: float = 0.0
    _saved_at: float = field(default_factory=time.perf_counter)
    _manifests: list[Manifest] = field(default_factory=list)  # the last one last

    def due(self) -> bool:
        """Tell whether it is time to save: within the share of the time, or if a minute of rounds could be lost."""
        return time.perf_counter() - self._saved_at >= min(self.cost / self.share, max(self.cost, MAX_LOST_SECONDS))

    def save(self, state: Simulation, records: Mapping[str, Digest]) -> None:
        """Save a simulation between two rounds.

        ``records``: Digests of the record files, which are saved with it.
        """
        began = time.perf_counter()
        files: dict[str, Digest] = {}

        def write(name: str, content: bytes) -> str:
            atomic_write(self.folder / name, content, sync=False)
            files[name] = digest_of(content)
            return name

        states = state.client_states
        before = self._manifests[-1].clients if self._manifests else {}
        clients = {client: name for client, name in before.items() if client not in states.changed}
        files |= {name: self._manifests[-1].files[name] for name in clients.values()}
        empty = encode(states.type())  # a state without content is not written
        for client in sorted(states.changed):
            content = encode(states[client])
            if content != empty:
                name = f"client-{quoted_name(client, LONGEST_CLIENT)}-{state.finished}.safetensors"
                clients[client] = write(name, content)
        averages = {} if state.evaluation_models == ("last",) else state.averages
        saved = state.server.state, state.server.model, state.server.eval_model, averages
        server = write(f"server-{state.finished}.safetensors", encode(saved))
        steps = _with_memory(state)
        memory = write(f"kept-{state.finished}.safetensors", encode(tuple(step.kept for step in steps)))
        sync_folder(self.folder)  # the files' names are on disk before the manifest that lists them
        listed: dict[str, Any] = {"server": server, "clients": clients, "kept": memory}
        listed["steps"] = [step.name for step in state.steps]
        if state.ended:
            listed["ended"] = True
        manifest = Manifest(round=state.finished, **listed, identity=self.identity, records=records, files=files)
        entries = {"format": FORMAT, "round": manifest.round, **listed, "identity": self.identity.to_table()}
        of_records = {name: asdict(digest) for name, digest in records.items()}
        write_manifest(self.folder / manifest.name, files, **entries, records=of_records)
        states.put({client: states[client] for client in clients})
        earlier = [one for one in self._manifests if one.round < manifest.round]
        self._manifests = [*earlier, manifest][-KEEP:]
        needed = {name for one in self._manifests for name in (one.name, *one.files)}
        for file in self.folder.iterdir():  # older files, and those that a kill left incomplete
            if file.name not in needed:
                file.unlink()
        self._saved_at = time.perf_counter()
        self.cost = self._saved_at - began

    def restore(self, state: Simulation, check_records: CheckRecords = lambda records: None) -> Mapping[str, Digest]:
        """Restore a simulation from the last checkpoint that is whole, if there is one.

        ``state``: The simulation, before its first round.
        ``check_records``: Checks the record files against their digests at a checkpoint.
        Returns: The digests of the record files; empty without a checkpoint.
        """
        damages: list[str] = []
        names = manifests(self.folder)
        for place, name in enumerate(names):
            try:
                manifest = load_manifest(self.folder / name)
                manifest.identity.check(self.folder / name, self.identity, self._advice)
                check_records(manifest.records)
                contents = {file: read_all(self.folder / file, manifest.files[file]) for file in manifest.files}
            except DamagedFile as damage:
                damages.append(str(damage))
                continue
            self._put(manifest, contents, state)
            if damages:
                again = (
                    f"The trial goes on from its checkpoint of round {manifest.round}, and repeats the rounds after it."
                )
                log.warning(" ".join([*dict.fromkeys(damages), again]))
            self._manifests = [*self._older(names[place + 1 :]), manifest]
            return manifest.records
        if damages:
            raise RunError(
                f"no checkpoint in {self.folder} is whole: {' '.join(dict.fromkeys(damages))} Restore what is damaged "
                f"from a copy, or remove the folder {self.folder.parent} to run this trial again."
            )
        return {}

    @property
    def _advice(self) -> str:
        return (
            "Put back what belongs together: the trial's folder, or the recipe, data and code with which it was begun. "
            f"Or remove the folder {self.folder.parent} to run this trial again."
        )

    def _older(self, names: list[str]) -> list[Manifest]:
        """Return the readable manifest before the one that was restored, whose files are kept for as long as it is."""
        for name in names:
            try:
                return [load_manifest(self.folder / name)]
            except RunError:
                continue
        return []

    def _put(self, manifest: Manifest, contents: Mapping[str, bytes], state: Simulation) -> None:
        """Set a simulation to what a whole checkpoint contains."""

        def read(name: str, hint: Any) -> Any:
            try:
                return decode(contents[name], hint, state.settings.device)
            except (KeyError, ValueRefused) as error:
                raise RunError(
                    f"the checkpoint file {name} in {self.folder} is of another method or version: {error} Remove the "
                    f"folder {self.folder.parent} to run this trial again."
                ) from error

        steps = _with_memory(state)
        names = [step.name for step in state.steps]
        if list(manifest.steps) != names:
            raise RunError(
                f"the checkpoint in {self.folder} was written with the reply steps {', '.join(manifest.steps)}, and "
                f"there are {', '.join(names)} now. Give the same ones, or begin a new run."
            )
        state.set_task(state.settings.run.position(manifest.round)[0])
        server_state, _ = state_types(type(state.algorithm))
        models = Weights, Weights, Mapping[str, Weights]
        server, model, eval_model, averages = read(manifest.server, tuple.__class_getitem__((server_state, *models)))
        mismatch = find_mismatch(model, state.context.runner.initial)
        if mismatch is not None:
            raise RunError(f"the checkpoint in {self.folder} is of another model: {mismatch}.")
        state.server.state, state.server.model, state.server.eval_model = server, model, eval_model
        state.averages |= {"round": model, **averages}
        states = state.client_states
        states.put({client: read(name, states.type) for client, name in manifest.clients.items()})
        kept_type = tuple.__class_getitem__(tuple(type(step.kept) for step in steps))
        for step, kept in zip(steps, read(manifest.kept, kept_type), strict=True):
            step.kept = kept
        state.finished, state.ended = manifest.round, manifest.ended


def _with_memory(state: Simulation) -> list[ReplyStep]:
    """Return the reply steps that keep something."""
    return [step for step in state.steps if step.kept is not None]
