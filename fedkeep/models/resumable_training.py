"""Training that can be resumed after a kill, from a file: for models that are trained before a federation."""

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
"""Called after every step with the number of steps that are done, and the loss of the step."""


class ResumableTraining(Protocol):
    """A training that can be saved and restored between two steps.

    ``losses``: The losses of the steps so far.
    """

    losses: list[float]

    def step(self) -> float:
        """Take one step."""

    def save(self, path: Path) -> None:
        """Save everything that the next step depends on."""

    def restore(self, path: Path) -> None:
        """Restore what `save` has saved."""


def train_resumably(run: ResumableTraining, steps: int, path: Path, every: float, on_step: OnStep | None) -> None:
    """Take the remaining steps of a training, from its file if there is one.

    ``every``: Seconds between two saves.
    ``on_step``: Called after every step.
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
    """Check that trained weights are finite, which they may not be after the last step although its loss was."""
    invalid = next((name for name, tensor in weights.items() if not bool(tensor.isfinite().all())), None)
    if invalid is not None:
        raise _diverged(f"{invalid} has numbers that are not finite")


def _diverged(what: str) -> RunError:
    return RunError(f"the training has diverged: {what}. Begin again with a lower learning rate.")


def save_training(
    path: Path,
    identity: Mapping[str, Any],
    models: Mapping[str, Weights],
    optimiser: torch.optim.Optimizer,
    losses: list[float],
) -> None:
    """Save everything that the next step depends on, atomically.

    ``identity``: What distinguishes this training from others, as JSON can represent it.
    ``models``: Models by a name without dots.
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
    """Restore a training's optimizer, and return its models and losses.

    ``optimiser``: The optimizer, whose state is replaced.
    Returns: The models by name.
    """
    try:
        with safe_open(path, framework="pt") as opened:
            saved_identity = opened.metadata()["training"]
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise RunError(f"cannot read the checkpoint {path}: {error}. Remove it to begin again.") from error
    if saved_identity != json.dumps(identity):
        raise RunError(
            f"{path} belongs to another training: {_difference(json.loads(saved_identity), identity)}. Use the same "
            "options and data, or another folder."
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


def _difference(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    return ", ".join(f"it has another {name!r}" for name in expected if expected[name] != saved.get(name))
