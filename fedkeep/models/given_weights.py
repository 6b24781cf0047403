"""Weights that a user has: read from a file or a folder, and fitted to a network."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedkeep.errors import ConfigError
from fedkeep.models.custom import SplitNetwork
from fedkeep.models.heads import BIAS, WEIGHT
from fedkeep.models.weights import Weights

log = logging.getLogger(__name__)

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What an exported model's folder holds, a trial's, and a model's of Hugging Face; an index lists several files."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read weights from a safetensors file, or from the folder of an exported model or of a model of Hugging Face."""
    files = [path]
    if path.is_dir():
        files = [path / FILE]
        if (path / INDEX).is_file():
            listed = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
            files = [path / Path(name).name for name in dict.fromkeys(listed)]
        elif (path / "run.json").is_file() and not files[0].is_file():
            raise ConfigError(
                f"model.weights={str(path)!r} is the folder of a run, which has a model for each method and seed. "
                "Export one (fedkeep export), and name its folder."
            )
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError, ValueError) as error:
            raise ConfigError(
                f"model.weights={str(path)!r}: cannot read weights from {file.name}: {error}. Give a safetensors file, "
                "or a folder with model.safetensors: a model that fedkeep export or save_pretrained wrote. Of a "
                'module: safetensors.torch.save_file(module.state_dict(), "model.safetensors").'
            ) from None
    return weights


def fit_weights(given: Weights, network: nn.Module, initial: Weights, source: str) -> tuple[Weights, str]:
    """Return given weights under the names and types of a network, and what is to be said of them.

    A classifier for another number of classes stays as it is in ``initial``. Names may have a prefix more or less
    than the network's, as those of a part of a larger module have.
    """
    names = _matching_names(given, network, initial)
    head = [name for name in (WEIGHT, BIAS) if name in initial]
    new_head = any(name not in names or given[names[name]].shape != initial[name].shape for name in head)
    needed = [name for name in initial if not (new_head and name in head)]
    faults = [f"it has no {_own_name(network, name)!r}" for name in needed if name not in names]
    for name in (name for name in needed if name in names):
        tensor, wanted = given[names[name]], initial[name]
        if tensor.shape != wanted.shape or tensor.is_floating_point() != wanted.is_floating_point():
            faults.append(f"{names[name]!r} is {_form(tensor)}, and the network's is {_form(wanted)}")
        elif tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            faults.append(f"{names[name]!r} has numbers that are not finite")
    if faults:
        own = type(_own(network))
        renamed = " Files of transformers may have other names than its modules: give MODEL.from_pretrained(FOLDER)."
        hint = renamed if own.__module__.startswith("transformers.") else ""
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ConfigError(
            f"{source} does not fit the network {own.__name__}: {'; '.join(faults[:3])}{more}. Give the weights of a "
            f"network of the same form, and the recipe's model the options that it had.{hint}"
        )
    fitted = {name: given[names[name]].to(initial[name]) if name in needed else initial[name] for name in initial}
    left = [name for name in given if name not in {names[name] for name in needed}]
    note = "with a new classifier" if new_head else ""
    if left:
        log.warning(
            "%s: %s not used, since the network has none of this name and shape%s.",
            source,
            f"{left[0]!r} and {len(left) - 1} more are" if len(left) > 1 else f"{left[0]!r} is",
            "; its classifier begins anew" if new_head else "",
        )
    return fitted, note


def _matching_names(given: Weights, network: nn.Module, initial: Weights) -> dict[str, str]:
    """Return by the network's name the given name of each tensor that is found: by the prefix with which most are."""
    own = {name: _own_name(network, name) for name in initial}
    found: list[dict[str, str]] = [{name: name for name in initial if name in given}]
    for less, more in product(_prefixes(own.values()), _prefixes(given)):
        pairs = ((name, more + text.removeprefix(less)) for name, text in own.items() if text.startswith(less))
        found.append({name: text for name, text in pairs if text in given})
    return max(found, key=len)


def _prefixes(names: Iterable[str]) -> list[str]:
    """Return the beginnings of names of up to two parts, the shortest first."""
    parts = {"".join(f"{part}." for part in name.split(".")[:-1][:depth]) for name in names for depth in range(3)}
    return sorted(parts, key=lambda prefix: (len(prefix), prefix))


def _own(network: nn.Module) -> nn.Module:
    return network.body if isinstance(network, SplitNetwork) else network


def _own_name(network: nn.Module, name: str) -> str:
    return network.own_name(name) if isinstance(network, SplitNetwork) else name


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_state_dict(value: object) -> Mapping[str, Tensor]:
    """Return a state dict that was given in Python; raise `ConfigError` for anything else."""
    if isinstance(value, Mapping) and value and all(isinstance(tensor, Tensor) for tensor in value.values()):
        return value
    kind = type(value).__name__
    hint = " Its state dict is module.state_dict()." if isinstance(value, nn.Module) else ""
    raise ConfigError(
        f"weights must be a path (a safetensors file, or the folder of an exported model or of a model of Hugging "
        f"Face) or a state dict, tensors by name, not a {kind}.{hint}"
    )
