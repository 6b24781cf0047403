"""A training between two steps as one file, so that it can go on after a kill: for what is trained beforehand."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from fedkeep._utils.files import atomic_write
from fedkeep.errors import RunError
from fedkeep.models.weights import Weights

OnStep = Callable[[int, float], None]
"""Told after every step how many are done, and the step's loss."""


class ResumableTraining(Protocol):
    """A training between two steps; ``losses`` are those of the steps so far."""

    losses: list[float]

    def step(self) -> float:
        """Take one step; return its loss."""

    def save(self, path: Path) -> None:
        """Write all that the next step depends on."""

    def restore(self, path: Path) -> None:
        """Go to where `save` wrote."""


def train_resumably(run: ResumableTraining, steps: int, path: Path, every: float, on_step: OnStep | None) -> None:
    """Take the steps that are left, from where the file was written if there is one.

    Parameters
    ----------
    steps : in all. path : of the file. every : seconds from one writing to the next.

    Raises
    ------
    RunError
        If the loss is no longer finite.
    """
    if path.is_file():
        run.restore(path)
    saved = time.monotonic()
    while len(run.losses) < steps:
        loss = run.step()
        if not math.isfinite(loss):
            raise _diverged(f"the loss of step {len(run.losses)} is {loss}")
        if time.monotonic() - saved >= every:
            run.save(path)
            saved = time.monotonic()
        if on_step is not None:
            on_step(len(run.losses), loss)


def check_finite(weights: Weights) -> None:
    """Raise `RunError` if trained weights are not finite: the last step may have spoiled them after a finite loss."""
    spoiled = next((name for name, tensor in weights.items() if not bool(tensor.isfinite().all())), None)
    if spoiled is not None:
        raise _diverged(f"{spoiled} has numbers that are not finite")


def _diverged(what: str) -> RunError:
    return RunError(f"the training has diverged: {what}. Begin again in another folder, with a lower training.lr.")


def save_training(
    path: Path,
    identity: Mapping[str, Any],
    models: Mapping[str, Weights],
    optimiser: torch.optim.Optimizer,
    losses: list[float],
) -> None:
    """Write all that the next step depends on, whole or not at all.

    Parameters
    ----------
    identity : what makes it this training and no other, as JSON can hold it.
    models : by a name of their own, without dots. losses : of the steps so far.
    """
    tensors = {f"{kind}.{name}": tensor for kind, model in models.items() for name, tensor in model.items()}
    for index, moments in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{name}": tensor for name, tensor in moments.items()}
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    atomic_write(path, tensor_bytes(whole, metadata={"training": json.dumps(identity)}))


def restore_training(
    path: Path, identity: Mapping[str, Any], optimiser: torch.optim.Optimizer
) -> tuple[dict[str, dict[str, Tensor]], list[float]]:
    """Return the models and the losses of a training that was saved, and put its optimiser where it was.

    Raises
    ------
    RunError
        If it cannot be read, or belongs to another training.
    """
    try:
        with safe_open(path, framework="pt") as opened:
            theirs = opened.metadata()["training"]
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise RunError(f"cannot read the checkpoint {path}: {error}. Remove it to begin again.") from error
    if theirs != json.dumps(identity):
        raise RunError(
            f"{path} belongs to another training: {_difference(json.loads(theirs), identity)}. Use the same options "
            "and data, or another folder."
        )
    losses: list[float] = tensors.pop("losses").tolist()
    models: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        models.setdefault(kind, {})[rest] = tensor
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in models.pop("optimiser", {}).items():
        index, moment = name.split(".", 1)
        state.setdefault(int(index), {})[moment] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return models, losses


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return ", ".join(f"it has another {name!r}" for name in ours if ours[name] != theirs.get(name))
