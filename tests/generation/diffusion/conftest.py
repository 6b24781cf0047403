"""The toy generator, trained once for all tests, those of other pytest workers too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import toy
from filelock import FileLock

from fedkeep.generation.pixel import PixelGenerator, load_generator
from fedkeep.generation.training import GeneratorTraining, train_generator

STEPS = 100


@dataclass
class TrainedToy:
    folder: Path
    losses: list[float]
    """Of each step."""
    hash: str
    """Of the generator that training returned."""

    def load(self) -> PixelGenerator:
        return load_generator(self.folder)


@pytest.fixture(scope="session")
def trained_toy(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> TrainedToy:
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent
    folder, notes = base / "trained-toy", base / "trained-toy.json"
    with FileLock(base / "trained-toy.lock"):
        if not notes.exists():
            losses: list[float] = []
            settings = GeneratorTraining(steps=STEPS, batch_size=32, lr=5e-3, ema=0.97)
            result = train_generator(
                toy.card(), toy.data(90), settings, folder, on_step=lambda done, loss: losses.append(loss)
            )
            notes.write_text(json.dumps([losses, result.hash()]))
    return TrainedToy(folder, *json.loads(notes.read_text()))
