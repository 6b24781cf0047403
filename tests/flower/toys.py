"""FedDCL whole, at toy size: a generator, and clients of three networks that learn two tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tiny

from fedkeep.cli import main

FEDDCL = """
title = "toy"
seeds = [0]

[data]
name = "digits"

[generator]
name = "{generator}"
sampler_steps = 2

[partition]
scheme = "dirichlet"
num_clients = 3
min_size = 2

[tasks]
num_tasks = 2
num_classes = 4

[model]
name = "mlp"
hidden = [12]

[[client_models]]
clients = ["0"]
name = "mlp"
hidden = [9, 7]

[[client_models]]
clients = ["1"]
name = "mlp"
hidden = [5]

[training]
epochs = 1
batch_size = 32
lr = 0.05

[run]
rounds = 2
cohort_size = 3
evaluation_models = ["last"]

[[methods]]
algorithm = "feddcl"
images_per_new_class = 4
images_per_old_class = 4
server_images_per_class = 6
prototype_rounds = 2
prototype_steps = 2
prototype_batch_size = 8
"""
QUICK = ("unet.widths=[8,8]", "unet.blocks=1", "noise_schedule.num_timesteps=20", "training.steps=4")
TINY = [word for change in QUICK for word in ("--set", change)]


def toy_recipe(folder: Path, others: Sequence[str] = (), more: str = "", regime: str = "paper") -> str:
    """Train a generator in a folder, and return a recipe that names it, with other methods and sections."""
    generator = folder / "generator"
    assert main(["generator", "train", "digits", "--regime", regime, "--out", str(generator), *TINY]) == 0
    methods = "".join(f'\n[[methods]]\nalgorithm = "{name}"\n' for name in others)
    return tiny.write_recipe(folder, FEDDCL.format(generator=generator.as_posix()) + methods + more)
