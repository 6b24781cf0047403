"""Checkpoints between rounds: the whole state of a run, so that a kill at any moment loses nothing older.

A checkpoint is a folder with one file for the server, one for each client that has a state, and a manifest that lists
them. Files are never overwritten: new files are written beside the old ones, then the manifest is replaced atomically,
then files that it no longer lists are removed. Random generators need not be saved, since each is derived from a name.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedkeep._utils.files import atomic_write
from fedkeep.errors import RunError, ValueRefused
from fedkeep.interface.algorithm import state_types
from fedkeep.interface.codec import decode, encode
from fedkeep.models import Weights
from fedkeep.models.weights import find_mismatch
from fedkeep.simulation.defense import ReplyHistory
from fedkeep.simulation.state import SimulationState

FORMAT = 3
MAX_LOSS_SECONDS = 60.0  # of finished rounds that a kill may lose


@dataclass
class Checkpoint:
    """The checkpoint folder of one run.

    Parameters
    ----------
    folder : Path
        The folder.
    share : float
        The largest share of the run's time that saving may take, unless a minute of rounds could be lost (see `due`).
    cost : float
        Seconds that the last save took.
    """

    folder: Path
    share: float = 0.05
    cost: float = 0.0
    _saved_at: float = field(default_factory=time.perf_counter)

    @property
    def manifest(self) -> Path:
        """The file that makes the folder a checkpoint."""
        return self.folder / "manifest.json"

    def due(self) -> bool:
        """Tell whether it is time to save: within the share of the run's time, or if a minute of rounds could be lost.

        Returns
        -------
        bool
            True if it is.
        """
        return time.perf_counter() - self._saved_at >= min(self.cost / self.share, max(self.cost, MAX_LOSS_SECONDS))

    def save(self, state: SimulationState, positions: dict[str, int]) -> None:
        """Save a simulation between two rounds.

        Parameters
        ----------
        state : SimulationState
            The simulation.
        positions : dict[str, int]
            Lengths of the record files in bytes, which are saved with it.
        """
        began = time.perf_counter()
        old = self._read()["clients"] if self.manifest.exists() else {}
        empty = encode(state.client_state())  # a state without content is not written
        clients: dict[str, str] = {client: name for client, name in old.items() if client not in state.changed}
        for client in sorted(state.changed):
            content = encode(state.client_states[client])
            if content != empty:
                clients[client] = f"client-{quote(client, safe='')}-{state.finished}.safetensors"
                atomic_write(self.folder / clients[client], content)
        server, model = f"server-{state.finished}.safetensors", f"model-{state.finished}.safetensors"
        atomic_write(self.folder / server, encode(state.server.state))
        atomic_write(self.folder / model, encode(state.server.model))
        averages_file = f"averages-{state.finished}.safetensors"
        averages = set(state.schedule.evaluation_models) != {"last"} or bool(state.server.eval_model)
        if averages:
            atomic_write(
                self.folder / averages_file,
                encode((state.round_average, state.moving_average, state.server.eval_model)),
            )
        manifest = {
            "format": FORMAT,
            "round": state.finished,
            "server": server,
            "model": model,
            "averages": averages_file if averages else None,
            "clients": clients,
            "positions": positions,
            "replies": state.history.to_table(),
        }
        atomic_write(self.manifest, json.dumps(manifest))
        state.client_states = {client: state.client_states[client] for client in clients}
        state.changed.clear()
        listed = {self.manifest.name, server, model, manifest["averages"], *clients.values()}
        for file in self.folder.iterdir():  # older files, and those that a kill left incomplete
            if file.name not in listed:
                file.unlink()
        self._saved_at = time.perf_counter()
        self.cost = self._saved_at - began

    def restore(self, state: SimulationState) -> dict[str, int]:
        """Restore a simulation from the checkpoint, if there is one.

        Parameters
        ----------
        state : SimulationState
            The simulation, before its first round.

        Returns
        -------
        dict[str, int]
            The lengths of the record files in bytes; empty without a checkpoint.

        Raises
        ------
        RunError
            If a file is missing or damaged, or belongs to another method or model.
        """
        if not self.manifest.exists():
            return {}
        manifest = self._read()
        state.set_task(state.schedule.position(manifest["round"])[0])
        server_state, _ = state_types(type(state.algorithm))
        model = self._load(manifest["model"], Weights, state)
        mismatch = find_mismatch(model, state.context.runner.initial)
        if mismatch is not None:
            raise RunError(f"the checkpoint in {self.folder} is of another model: {mismatch}.")
        state.server.model = model
        state.server.state = self._load(manifest["server"], server_state, state)
        state.client_states = {
            client: self._load(name, state.client_state, state) for client, name in manifest["clients"].items()
        }
        state.changed.clear()
        state.round_average = model
        if manifest["averages"] is not None:
            models = self._load(manifest["averages"], tuple[Weights, Weights, Weights], state)
            state.round_average, state.moving_average, state.server.eval_model = models
        state.history = ReplyHistory(**manifest["replies"])
        state.finished = manifest["round"]
        return dict(manifest["positions"])

    def _load(self, name: str, hint: Any, state: SimulationState) -> Any:
        try:
            return decode((self.folder / name).read_bytes(), hint, state.device)
        except (OSError, ValueRefused) as error:
            raise RunError(
                f"cannot read the checkpoint file {name} in {self.folder}: {error} Remove that folder to start this "
                "part of the run again."
            ) from error

    def _read(self) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads(self.manifest.read_text())
        except (OSError, ValueError) as error:
            raise RunError(
                f"cannot read {self.manifest}: {error}. Remove that folder to start this part of the run again."
            ) from error
        if isinstance(manifest, dict) and manifest.get("format", FORMAT) != FORMAT:
            raise RunError(f"{self.manifest} was written by another version of FedKeep (format {manifest['format']}).")
        if not isinstance(manifest, dict) or not {
            "round",
            "server",
            "model",
            "averages",
            "clients",
            "positions",
            "replies",
        } <= set(manifest):
            raise RunError(f"{self.manifest} is damaged. Remove that folder to start this part of the run again.")
        return manifest
