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

from fedkeep.errors import RunError, ValueRefused
from fedkeep.files import write_whole
from fedkeep.interface.algorithm import state_types
from fedkeep.interface.codec import decode, encode
from fedkeep.models import Weights
from fedkeep.models.weights import same_form
from fedkeep.simulation.simulation import Simulation

FORMAT = 2
LONGEST = 60.0  # seconds of finished rounds that a kill may cost


@dataclass
class Checkpoint:
    """The checkpoint folder of one run.

    Parameters
    ----------
    folder : where it lives.
    share : the largest share of the run's time that saving may take, unless a minute is over; what `due` goes by.
    cost : seconds that the last save took.
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

    def save(self, engine: Simulation, positions: dict[str, int]) -> None:
        """Save the engine as it is between rounds; ``positions`` is stored with it (how far the logs had come)."""
        began = time.perf_counter()
        old = self._read()["clients"] if self.manifest.exists() else {}
        empty = encode(engine.client_state())  # a client that keeps nothing is not kept
        clients: dict[str, str] = {client: name for client, name in old.items() if client not in engine.changed}
        for client in sorted(engine.changed):
            content = encode(engine.states[client])
            if content != empty:
                clients[client] = f"client-{quote(client, safe='')}-{engine.finished}.safetensors"
                write_whole(self.folder / clients[client], content)
        server, model = f"server-{engine.finished}.safetensors", f"model-{engine.finished}.safetensors"
        write_whole(self.folder / server, encode(engine.server.state))
        write_whole(self.folder / model, encode(engine.server.model))
        served = f"served-{engine.finished}.safetensors"
        averages = set(engine.schedule.served) != {"last"} or bool(engine.server.served)
        if averages:
            write_whole(self.folder / served, encode((engine.graduates, engine.average, engine.server.served)))
        manifest = {
            "format": FORMAT,
            "round": engine.finished,
            "server": server,
            "model": model,
            "served": served if averages else None,
            "clients": clients,
            "positions": positions,
        }
        write_whole(self.manifest, json.dumps(manifest))
        engine.states = {client: engine.states[client] for client in clients}
        engine.changed.clear()
        named = {self.manifest.name, server, model, manifest["served"], *clients.values()}
        for file in self.folder.iterdir():  # older files, and what a kill left half written
            if file.name not in named:
                file.unlink()
        self._saved_at = time.perf_counter()
        self.cost = self._saved_at - began

    def restore(self, engine: Simulation) -> dict[str, int]:
        """Put the engine where the checkpoint was taken, and return the positions; an empty dict without a checkpoint.

        Raises
        ------
        RunError
            If a file is missing or damaged, or belongs to another method or model.
        """
        if not self.manifest.exists():
            return {}
        manifest = self._read()
        engine.enter(engine.schedule.place(manifest["round"])[0])
        server_state, _ = state_types(type(engine.algorithm))
        model = self._load(manifest["model"], Weights, engine)
        mismatch = same_form(model, engine.context.runner.initial)
        if mismatch is not None:
            raise RunError(f"the checkpoint in {self.folder} is of another model: {mismatch}.")
        engine.server.model = model
        engine.server.state = self._load(manifest["server"], server_state, engine)
        engine.states = {
            client: self._load(name, engine.client_state, engine) for client, name in manifest["clients"].items()
        }
        engine.changed.clear()
        engine.graduates = model
        if manifest["served"] is not None:
            models = self._load(manifest["served"], tuple[Weights, Weights, Weights], engine)
            engine.graduates, engine.average, engine.server.served = models
        engine.finished = manifest["round"]
        return dict(manifest["positions"])

    def _load(self, name: str, hint: Any, engine: Simulation) -> Any:
        try:
            return decode((self.folder / name).read_bytes(), hint, engine.device)
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
