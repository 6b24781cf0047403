"""Write down the work that all contestants share: data, clients, cohorts, the order of examples, initial weights.

It is FedKeep that draws them, from a recipe and its seed; the others read them (`runners/work.py`).
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedkeep import load, load_recipe
from fedkeep._utils import seeds
from fedkeep.data import Federation
from fedkeep.errors import DataError
from fedkeep.experiment.build import build_federation, build_simulation
from fedkeep.experiment.recipe import Recipe
from fedkeep.trials.simulation import Simulation

SYNTHETIC = {"synthetic-28": (50_000, 1, 28), "synthetic-32": (50_000, 1, 32)}
STAND_INS = {
    "fashion-mnist": ("zalando-datasets/fashion_mnist", "image", (60_000, 1, 28)),
    "cifar10": ("uoft-cs/cifar10", "img", (50_000, 3, 32)),
}


def data_for(recipe: Path, data_dir: str | None, cache: Path) -> tuple[Path, str]:
    """Return a data folder that has what a recipe needs, and a word on it if it is not the real thing.

    A data set that is not in ``data_dir`` is replaced by random images of its size and number, on which steps cost the
    same.
    """
    name, made = load_recipe(str(recipe)).data, cache / "data"
    if name in SYNTHETIC:
        _make_images(made / name, "image", SYNTHETIC[name])
        return made, "synthetic images"
    folder, column, size = STAND_INS[name]
    if data_dir is not None:
        try:
            load(name, data_dir=data_dir)
            return Path(data_dir), name
        except (DataError, ImportError):
            pass
    _make_images(made / folder, column, size)
    return made, f"random images of the size of {name}, which is not at hand"


def write(recipe_file: Path, method: str, data: Path, rounds: int, folder: Path) -> int:
    """Write the work of the first rounds of a recipe into a folder, and return the steps of a median round."""
    recipe = load_recipe(str(recipe_file), methods=[method])
    federation = build_federation(recipe, recipe.seeds[0], data)
    engine = build_simulation(recipe, recipe.methods[0], recipe.seeds[0], federation)
    dataset, training = federation.dataset, recipe.training
    cohorts = [engine.sample_cohort(number) for number in range(1, rounds + 1)]
    orders = [
        order(engine, federation, number, client) for number, cohort in enumerate(cohorts, start=1) for client in cohort
    ]
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "images": dataset.normalise(dataset.train["input"]).numpy(),
        "labels": dataset.train["label"].numpy(),
        "cohorts": np.array(cohorts, dtype=np.int64),
        "order": torch.cat(orders).numpy(),
        "starts": np.cumsum([0, *map(len, orders)]),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.savez(folder / "initial.npz", **{name: w.numpy() for name, w in engine.context.runner.initial.items()})
    (folder / "work.json").write_text(json.dumps(_about(recipe, federation), indent=2))
    steps = [training.epochs * -(-(len(one) // training.epochs) // training.batch_size) for one in orders]
    return int(np.median(np.array(steps).reshape(rounds, -1).sum(1)))


def order(engine: Simulation, federation: Federation, number: int, client: str) -> Tensor:
    """Return the rows, int64 [epochs * examples], that a client trains on in a round, in order."""
    rows = federation.partition[int(client)]
    drawn = seeds.rng(engine.settings.seed, "batches", task=1, round=number, client=client)
    return torch.cat([rows[torch.randperm(len(rows), generator=drawn)] for _ in range(engine.settings.training.epochs)])


def _about(recipe: Recipe, federation: Federation) -> dict[str, object]:
    training = recipe.training
    return {
        "network": recipe.model.name,
        "classes": federation.dataset.num_classes,
        "clients": len(federation.clients),
        "cohort": recipe.run.cohort_size,
        "epochs": training.epochs,
        "batch_size": training.batch_size,
        "lr": training.lr,
        "momentum": training.momentum,
        "weight_decay": training.weight_decay,
    }


def _make_images(folder: Path, column: str, size: tuple[int, int, int]) -> None:
    """Write a data set of random images as Parquet files, a brighter patch for each of ten classes."""
    import pyarrow
    from pyarrow import parquet

    count, channels, side = size
    noise = np.random.default_rng(0)
    for split, number in (("test", 1000), ("train", count)):
        file = folder / f"{split}.parquet"
        if file.is_file():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        labels = np.arange(number) % 10
        images = noise.integers(0, 128, (number, side, side, channels), dtype=np.uint8)
        for label in range(10):
            images[labels == label, 2 * label : 2 * label + 4] += 100
        table = {column: [{"bytes": _png(image), "path": None} for image in images], "label": labels}
        partial = file.with_suffix(".tmp")
        parquet.write_table(pyarrow.table(table), partial)
        partial.rename(file)


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.squeeze()).save(file, "PNG", compress_level=1)
    return file.getvalue()
