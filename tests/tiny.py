"""The tiny federation of `fedkeep.testing`, a recipe as small, and options with which every method runs there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedkeep.interface import Algorithm
from fedkeep.testing.federation import (
    CLASSES,
    SHAPE,
    SHORT,
    SIZES,
    TRAINING,
    ToyGenerator,
    bits,
    by_hand,
    dataset,
    equal,
    federation,
    finite,
    network,
    run_rounds,
    simulation,
    simulation_with_tasks,
    stream,
)

__all__ = [
    "CLASSES",
    "INVERSION",
    "PROTOTYPES",
    "RECIPE",
    "REPLAY",
    "SHAPE",
    "SHORT",
    "SIZES",
    "TOYS",
    "TRAINING",
    "ToyGenerator",
    "bits",
    "by_hand",
    "configured",
    "dataset",
    "equal",
    "federation",
    "finite",
    "network",
    "run_rounds",
    "simulation",
    "simulation_with_tasks",
    "stream",
    "write_recipe",
]

RECIPE = """
title = "tiny"
seeds = [0]

[data]
name = "digits"

[partition]
scheme = "exdir"
num_clients = 8
classes_per_client = 2
alpha = 0.5

[model]
name = "mlp"
hidden = [8]

[training]
epochs = 1
batch_size = 64
lr = 0.05

[run]
rounds = 2
cohort_size = 2

[[methods]]
algorithm = "fedavg"

[[methods]]
algorithm = "fedseq"

[[methods]]
algorithm = "sfedkd"
teachers = 2
"""

INVERSION = {
    "num_images": 6,
    "synthesis_batch_size": 4,
    "generator_steps": 2,
    "warmup": 1,
    "generator_channels": 2,
    "student_steps": 2,
}
PROTOTYPES = {"prototype_rounds": 2, "prototype_steps": 2, "prototype_batch_size": 4, "sampler_steps": 2}
REPLAY = {"images_per_new_class": 2, "images_per_old_class": 2, **PROTOTYPES}
TOYS: dict[str, dict[str, Any]] = {
    "target": INVERSION,
    "feddcl": {**REPLAY, "server_images_per_new_class": 3, "server_images_per_old_class": 2},
    "dddr": REPLAY,
    **{
        f"{name}-kd-on-generated-images": {**PROTOTYPES, "server_images_per_new_class": 3}
        for name in ("ft", "ewc", "lwf")
    },
    "lander": {**INVERSION, "anchors": str(Path(__file__).parent / "anchors.csv"), "synthetic_batch_size": 3},
}
"""Options without which a method cannot run here: as it comes it is too large, or lacks a file."""


def configured(cls: type[Algorithm[Any, Any]]) -> Algorithm[Any, Any]:
    """Return a method as it comes, or small."""
    return cls(**TOYS.get(cls.name(), {}))


def write_recipe(folder: Path, text: str = RECIPE, name: str = "recipe.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)
