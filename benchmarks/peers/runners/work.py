"""The work that all peers share, as the driver wrote it: images, clients, cohorts, the order of examples, weights."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import numpy as np


class Work:
    """Read a folder that ``work.write`` of the driver made. Arrays are mapped, so that processes share the pages.

    Attributes
    ----------
    network, batch_size, epochs, lr, momentum, weight_decay, clients, cohort : numbers and names of the workload.
    images : float32 [n, channels, height, width], normalised. labels : int64 [n].
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        about = json.loads((self.folder / "work.json").read_text())
        self.network: str = about["network"]
        self.classes: int = about["classes"]
        self.clients: int = about["clients"]
        self.cohort: int = about["cohort"]
        self.epochs: int = about["epochs"]
        self.batch_size: int = about["batch_size"]
        self.lr: float = about["lr"]
        self.momentum: float = about["momentum"]
        self.weight_decay: float = about["weight_decay"]
        self.images, self.labels = self._map("images"), self._map("labels")
        self._cohorts, self._order, self._starts = self._map("cohorts"), self._map("order"), self._map("starts")

    @property
    def rounds(self) -> int:
        """How many rounds are written down."""
        return len(self._cohorts)

    @cached_property
    def initial(self) -> dict[str, np.ndarray]:
        """The initial weights by FedKeep's names, in the order of the network's parameters."""
        with np.load(self.folder / "initial.npz") as file:
            return dict(file)

    def clients_of(self, number: int) -> list[int]:
        """Return the ordered cohort of a round, counted from 1."""
        return [int(client) for client in self._cohorts[number - 1]]

    def rows(self, number: int, place: int) -> np.ndarray:
        """Return the rows, int64 [epochs, examples], that the client at a place of a round's cohort trains on, in
        order."""
        entry = (number - 1) * self.cohort + place
        return self._order[self._starts[entry] : self._starts[entry + 1]].reshape(self.epochs, -1)

    def one_epoch(self, number: int, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return images and labels of the same, for workloads of one epoch."""
        (rows,) = self.rows(number, place)
        return self.images[rows], self.labels[rows]

    def _map(self, name: str) -> np.ndarray:
        return np.load(self.folder / f"{name}.npy", mmap_mode="r")
