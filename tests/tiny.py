"""The tiny federation of `fedkeep.testing`, a recipe as small, and options with which every method runs there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from interception import record_fits
from torch import Tensor

from fedkeep.data import Augmentation
from fedkeep.interface import Algorithm
from fedkeep.rounds.messages import StepRequest
from fedkeep.rounds.reply_step import ReplyStep
from fedkeep.rounds.state import SimulationState
from fedkeep.testing.runs import (
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
    wrap_steps,
)
from fedkeep.trials.callbacks import Callback
from fedkeep.trials.simulation import Simulation

StepT = TypeVar("StepT", bound=ReplyStep)

__all__ = [
    "CLASSES",
    "FAMILIES",
    "INVERSION",
    "PROTOTYPES",
    "RECIPE",
    "REPLAY",
    "SHAPE",
    "SHORT",
    "SIZES",
    "TOYS",
    "TRAINING",
    "UNMOVED",
    "RecordFits",
    "ToyGenerator",
    "bits",
    "by_hand",
    "change_replies",
    "configured",
    "dataset",
    "equal",
    "federation",
    "finite",
    "network",
    "record_arguments",
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
evaluation_models = ["last"]

[[methods]]
algorithm = "fedavg"

[[methods]]
algorithm = "fedseq"

[[methods]]
algorithm = "sfedkd"
teachers = 2
"""

FAMILIES = ("fedavg", "fedcad", "sfedkd", "fedskf", "target", "feddcl")
"""One method of each family, with state at the server, at clients and nowhere; matrices of others are slow."""

INVERSION = {
    "num_images": 6,
    "synthesis_batch_size": 4,
    "generator_steps": 2,
    "warmup": 1,
    "generator_channels": 2,
    "student_steps": 2,
}
PROTOTYPES = {"prototype_rounds": 2, "prototype_steps": 2, "prototype_batch_size": 4}
REPLAY = {"images_per_new_class": 2, "images_per_old_class": 2, **PROTOTYPES}
TOYS: dict[str, dict[str, Any]] = {
    "target": INVERSION,
    "feddcl": {**REPLAY, "server_images_per_class": 3},
    "dddr": REPLAY,
    "lander": {**INVERSION, "anchors": str(Path(__file__).parent / "anchors.csv"), "replay_batch_size": 3},
    "seqkeep": {"w_nontarget": 3.0},
}
"""Options without which a method cannot run here (as it comes it is too large, or lacks a file), or would not teach."""


def configured(cls: type[Algorithm[Any, Any]]) -> Algorithm[Any, Any]:
    """Return a method as it comes, or with its options of `TOYS`."""
    return cls(**TOYS.get(cls.name(), {}))


class RecordFits(Callback):
    """Records every local training of a run of one trial.

    Attributes
    ----------
    fits : list[RecordedFit]
        In order.
    """

    def on_trial_begin(self, state: SimulationState) -> None:
        self.fits = record_fits(state)


class Unmoved(Augmentation):
    """An augmentation that happens to change nothing: teachers are asked in every batch all the same."""

    def __call__(self, images: Tensor, normalise: Any, *_: Any) -> Tensor:
        return normalise(images)  # type: ignore[no-any-return]


UNMOVED = Unmoved(horizontal_flip=True)


def change_replies(simulation: SimulationState, step: str, change: Callable[[Any, Any], Any]) -> None:
    """Let a client step reply what a function makes of the client and its reply."""

    def wrap(request: StepRequest) -> Any:
        @functools.wraps(request.step)
        def changed(client: Any, *args: Any, **kwargs: Any) -> Any:
            return change(client, request.step(client, *args, **kwargs))

        return changed if request.step.__name__ == step else request.step

    wrap_steps(simulation, wrap)


def record_arguments(simulation: SimulationState, step: str) -> dict[tuple[int, str], tuple[Any, ...]]:
    """Return what will hold the arguments with which a client step was asked, by (round, client)."""
    seen: dict[tuple[int, str], tuple[Any, ...]] = {}

    def note(request: StepRequest) -> Any:
        if request.step.__name__ == step:
            seen[request.round, request.client] = request.args
        return request.step

    wrap_steps(simulation, note)
    return seen


def write_recipe(folder: Path, text: str = RECIPE, name: str = "recipe.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def step(simulation: Simulation, kind: type[StepT]) -> StepT:
    """Return a simulation's reply step of a class."""
    return next(one for one in simulation.steps if isinstance(one, kind))
