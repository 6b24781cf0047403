"""A training between two steps as one file, so that it can go on after a kill: for what is trained beforehand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from fedkeep.errors import RunError
from fedkeep.files import write_whole
from fedkeep.models.weights import Weights


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
    write_whole(path, tensor_bytes(whole, metadata={"training": json.dumps(identity)}))


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
