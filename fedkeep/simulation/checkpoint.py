"""Checkpoints between rounds: the whole state of a run, written so that a kill at any moment loses nothing older.

A checkpoint is a folder with one file for the server, one for each client that keeps something, and a manifest that
names them. Files are never overwritten: new ones are written beside the old, then the manifest is renamed into place,
then what it no longer names is removed. Randomness needs no saving, since every draw is derived from its name.
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
from fedkeep.simulation.state import SimulationState

FORMAT = 2
LONGEST = 60.0  # seconds of finished rounds that a kill may cost


@dataclass
class Checkpoint:
    """The checkpoint folder of one run.

    Parameters
    ----------
    folder : Path
        Where it lives.
    share : float
        The largest share of the run's time that saving may take, unless a minute is over; what `due` goes by.
    cost : float
        Seconds that the last save took.
    """

    folder: Path
    share: float = 0.05
    cost: float = 0.0
    _saved_at: float = field(default_factory=time.perf_counter)

    @property
    def manifest(self) -> Path:
        """The file whose presence makes a checkpoint."""
        return self.folder / "manifest.json"

    def due(self) -> bool:
        """Tell whether another checkpoint would stay within the share, or a minute of rounds is at stake."""
        return time.perf_counter() - self._saved_at >= min(self.cost / self.share, max(self.cost, LONGEST))

    def save(self, state: SimulationState, positions: dict[str, int]) -> None:
        """Save a simulation between rounds.

        Parameters
        ----------
        state : SimulationState
            What is saved.
        positions : dict[str, int]
            Stored with it: how far the records had come.
        """
        began = time.perf_counter()
        old = self._read()["clients"] if self.manifest.exists() else {}
        empty = encode(state.client_state())  # a client that keeps nothing is not kept
        clients: dict[str, str] = {client: name for client, name in old.items() if client not in state.changed}
        for client in sorted(state.changed):
            content = encode(state.client_states[client])
            if content != empty:
                clients[client] = f"client-{quote(client, safe='')}-{state.finished}.safetensors"
                atomic_write(self.folder / clients[client], content)
        server, model = f"server-{state.finished}.safetensors", f"model-{state.finished}.safetensors"
        atomic_write(self.folder / server, encode(state.server.state))
        atomic_write(self.folder / model, encode(state.server.model))
        served = f"served-{state.finished}.safetensors"
        averages = set(state.schedule.served) != {"last"} or bool(state.server.eval_model)
        if averages:
            atomic_write(
                self.folder / served, encode((state.round_average, state.moving_average, state.server.eval_model))
            )
        manifest = {
            "format": FORMAT,
            "round": state.finished,
            "server": server,
            "model": model,
            "served": served if averages else None,
            "clients": clients,
            "positions": positions,
        }
        atomic_write(self.manifest, json.dumps(manifest))
        state.client_states = {client: state.client_states[client] for client in clients}
        state.changed.clear()
        named = {self.manifest.name, server, model, manifest["served"], *clients.values()}
        for file in self.folder.iterdir():  # older files, and what a kill left half written
            if file.name not in named:
                file.unlink()
        self._saved_at = time.perf_counter()
        self.cost = self._saved_at - began

    def restore(self, state: SimulationState) -> dict[str, int]:
        """Put a simulation where the checkpoint was taken; return the positions, or an empty dict without a checkpoint.

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
        if manifest["served"] is not None:
            models = self._load(manifest["served"], tuple[Weights, Weights, Weights], state)
            state.round_average, state.moving_average, state.server.eval_model = models
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
        if not isinstance(manifest, dict) or not {"round", "server", "model", "served", "clients", "positions"} <= set(
            manifest
        ):
            raise RunError(f"{self.manifest} is damaged. Remove that folder to start this part of the run again.")
        return manifest
