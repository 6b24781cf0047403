"""The model from which a run's rounds begin, where a recipe says so: given weights, or pooled training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedkeep._utils import progress
from fedkeep._utils.files import atomic_write, make_folder
from fedkeep.data import Augmentation, Federation
from fedkeep.data.cache import cache_folder
from fedkeep.data.catalog import data_folder
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.recipe import Recipe, model_to_table, resolve_pretrained
from fedkeep.models import Weights
from fedkeep.models.custom import describe_network
from fedkeep.models.given_weights import check_state_dict, fit_weights, read_weights
from fedkeep.models.weights import state_dict_copy, tensor_hash
from fedkeep.options import as_table
from fedkeep.training.model_runner import ModelRunner
from fedkeep.training.pooled import train_on_pool

COLUMNS = ("input", "label")
KEPT = "state-dict:"
"""What the name of a state dict begins with that was given in Python and is kept in the cache; its digest follows."""


@dataclass(frozen=True, eq=False)
class InitialModel:
    """The model from which all methods of a seed begin; how it was made, in words; and the digest of given weights."""

    weights: Weights
    made_by: str
    given: str = ""

    @property
    def digest(self) -> str:
        """A hash of names and tensors."""
        return _digest_of(self.weights)


def keep_weights(value: object) -> str:
    """Return the path of given weights as text; a state dict is kept in the cache, under the name that is returned."""
    if isinstance(value, str | Path):
        return str(value)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in check_state_dict(value).items()}
    name = KEPT + _digest_of(weights)
    # Tensors may share memory, which safetensors refuses: each gets its own.
    _write(_kept_file(name), {key: tensor.clone() for key, tensor in weights.items()})
    return name


def locate_weights(name: str, data_dir: str | Path | None) -> Path:
    """Return where a recipe's weights are: in the cache, at a path from here, or in the data folder."""
    if name.startswith(KEPT):
        if (file := _kept_file(name)).is_file():
            return file
        raise ConfigError(
            f"the weights {name!r} were given in Python, and are no longer in {cache_folder()}. Give them again: "
            "fedkeep.resume(RUN, weights=...)."
        )
    folder = data_folder(data_dir)
    for path in (Path(name), *([] if folder is None else [folder / name])):
        if path.exists():
            return path.resolve()
    raise ConfigError(
        f"model.weights={name!r}: there is no such file or folder. Give a path to a safetensors file, or to the folder "
        "of an exported model or of a model of Hugging Face."
    )


def initial_model(
    recipe: Recipe, seed: int, federation: Federation, device: torch.device, data_dir: str | Path | None = None
) -> InitialModel | None:
    """Return the model from which a seed's trials begin; None if that is the network's own initial weights.

    Pooled training happens once: its result is kept in the cache under all that it depends on.
    """
    if not recipe.weights and not recipe.pretraining.passes:
        return None
    model = resolve_pretrained(recipe.model, data_dir)
    shape, classes = federation.dataset.shape, federation.cumulative_classes[0]
    runner = ModelRunner(lambda: model.build(shape, classes), seed, device)
    if recipe.weights:
        path = locate_weights(recipe.weights, data_dir)
        shown = "a state dict" if recipe.weights.startswith(KEPT) else path.name
        given, own = read_weights(path), state_dict_copy(runner.train_network, with_frozen=True)
        fitted, note = fit_weights(given, runner.train_network, own, f"model.weights={recipe.weights!r}")
        made_by = " ".join(filter(None, (f"the weights of {shown}", note)))
        return InitialModel(fitted, made_by, _digest_of(given))
    passes, what = recipe.pretraining.passes, "images" if federation.dataset.has_images else "examples"
    made_by = f"{passes} {'pass' if passes == 1 else 'passes'} of pooled training on the clients' {what}"
    if federation.num_tasks > 1:
        made_by += " of the first task"
    return InitialModel(_trained_on_pool(recipe, seed, federation, runner), f"{made_by}: no federated method")


def _trained_on_pool(recipe: Recipe, seed: int, federation: Federation, runner: ModelRunner) -> Weights:
    """Return the model of pooled training, from the cache if it is there."""
    dataset, rows = (
        federation.dataset,
        torch.unique(federation.partition.rows),
    )  # sorted: whose they are does not matter
    data = {name: dataset.train[name].index_select(0, rows.to(dataset.train[name].device)) for name in COLUMNS}
    identity: dict[str, Any] = {
        "pretraining": as_table(recipe.pretraining),
        "augmentation": as_table(recipe.augmentation),
        "model": model_to_table(recipe.model),
        "network": describe_network(recipe.model, dataset.shape, federation.cumulative_classes[0]),
        "initial weights": _digest_of({**runner.frozen, **runner.initial}),
        "data": [tensor_hash(data[name]) for name in COLUMNS],
        "normalisation": [list(dataset.mean), list(dataset.std)],
        "seed": seed,
        "device": runner.device.type,
    }
    file = cache_folder() / f"initial-model-{_digest([json.dumps(identity, sort_keys=True)])}.safetensors"
    try:
        make_folder(file.parent)
        with FileLock(file.with_suffix(".lock")):  # other processes wait for the one that trains
            if (found := _read(file)) is not None:
                return found
            steps = recipe.pretraining.passes * -(-len(rows) // recipe.pretraining.batch_size)
            trained = train_on_pool(
                runner,
                {name: column.to(runner.device) for name, column in data.items()},
                dataset.normalise if runner.extractor is None else runner.extractor,
                recipe.augmentation if runner.extractor is None else Augmentation(),
                recipe.pretraining,
                seed,
                lambda done: progress.report("pooled training, step", done, steps),
            )
            _write(file, trained)
            return trained
    except OSError as error:
        raise _unwritable(file, error) from error


def _read(file: Path) -> dict[str, Tensor] | None:
    """Return the weights of a file of the cache; None if there is none that can be read."""
    try:
        return load_file(file) if file.is_file() else None
    except (OSError, SafetensorError):
        return None


def _write(file: Path, weights: Mapping[str, Tensor]) -> None:
    try:
        make_folder(file.parent)
        atomic_write(file, save({name: tensor.cpu().contiguous() for name, tensor in weights.items()}))
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: OSError) -> RunError:
    return RunError(
        f"the initial model cannot be kept in {file.parent} ({error.strerror}), where all processes of a run find it. "
        "Set FEDKEEP_CACHE to a folder that can be written to."
    )


def _kept_file(name: str) -> Path:
    return cache_folder() / f"{name.replace(':', '-')}.safetensors"


def _digest_of(weights: Weights) -> str:
    return _digest(f"{name} {tensor_hash(tensor)}" for name, tensor in sorted(weights.items()))


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
