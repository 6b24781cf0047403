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
    stream,
)
from fedkeep.testing.federation import run_rounds as played
from fedkeep.testing.federation import simulation as engine
from fedkeep.testing.federation import simulation_with_tasks as engine_with_tasks

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
    "engine",
    "engine_with_tasks",
    "equal",
    "federation",
    "finite",
    "network",
    "played",
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
clients = 8
classes = 2
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
cohort = 2

[[methods]]
algorithm = "fedavg"

[[methods]]
algorithm = "fedseq"

[[methods]]
algorithm = "sfedkd"
teachers = 2
"""

INVERSION = {"nums": 6, "synthesis_batch_size": 4, "g_steps": 2, "warmup": 1, "ngf": 2, "kd_steps": 2}
PROTOTYPES = {"proto_rounds": 2, "proto_steps": 2, "proto_batch": 4, "sampler_steps": 2}
REPLAY = {"cur": 2, "pre": 2, **PROTOTYPES}
TOYS: dict[str, dict[str, Any]] = {
    "target": INVERSION,
    "feddcl": {**REPLAY, "server_cur": 3, "server_pre": 2},
    "dddr": REPLAY,
    **{f"{name}-kd-on-generated-images": {**PROTOTYPES, "server_cur": 3} for name in ("ft", "ewc", "lwf")},
    "lander": {**INVERSION, "anchors": str(Path(__file__).parent / "anchors.csv"), "syn_batch_size": 3},
}
"""Options without which a method cannot run here: as it comes it is too large, or lacks a file."""


def configured(cls: type[Algorithm[Any, Any]]) -> Algorithm[Any, Any]:
    """Return a method as it comes, or small."""
    return cls(**TOYS.get(cls.name(), {}))


def write_recipe(folder: Path, text: str = RECIPE, name: str = "recipe.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)
