"""The model from which a run's rounds begin, where a recipe says so: given weights, or pooled training."""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedkeep._utils.files import atomic_write, make_folder
from fedkeep.data import Augmentation, Federation
from fedkeep.data.cache import cache_folder
from fedkeep.data.catalog import local_paths
from fedkeep.data.readers import to_nfc
from fedkeep.errors import ConfigError, RunError, in_one_line
from fedkeep.experiment.build import class_names
from fedkeep.experiment.recipe import Recipe, model_to_table, resolve_pretrained
from fedkeep.models.custom import SplitNetwork, describe_network
from fedkeep.models.heads import BIAS, WEIGHT
from fedkeep.models.pretrained import class_of_folder, load_state_dict
from fedkeep.models.trial_step import constants_of
from fedkeep.models.weights import Weights, state_dict_copy, tensor_hash, tied_names
from fedkeep.options import as_table
from fedkeep.training.model_runner import ModelRunner
from fedkeep.training.pooled import train_on_pool

log = logging.getLogger(__name__)

FILE = "model.safetensors"
"""What an exported model's folder holds, and a trial's."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read weights from a safetensors file, or from the folder of an exported model or of a model of Hugging Face."""
    shown, file = f"model.weights={str(path)!r}", path / FILE if path.is_dir() else path
    if class_name := class_of_folder(path):
        return load_state_dict(path, class_name, shown)
    if (path / "run.json").is_file() and not file.is_file():
        raise ConfigError(
            f"{shown} is the folder of a run, which has a model for each method and seed. Export one (fedkeep export), "
            "and name its folder."
        )
    try:
        return load_file(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(
            f"{shown}: cannot read weights from {file.name}: {error}. Give a safetensors file, or the folder of a "
            "model that fedkeep export or save_pretrained wrote. Of a module: "
            'safetensors.torch.save_file(module.state_dict(), "model.safetensors").'
        ) from None


def fit_weights(given: Weights, network: nn.Module, initial: Weights, source: str) -> tuple[Weights, str]:
    """Return given weights under the names and types of a network, and what is to be said of them.

    A classifier for another number of classes stays as it is in ``initial``. Names may have a prefix more or less
    than the network's, as those of a part of a larger module have.
    """
    names = _matching_names(given, network, initial)
    for same in tied_names(network):  # a file may hold only one of them
        if known := next((names[name] for name in same if name in names), None):
            names |= {name: names.get(name, known) for name in same}
    head = [name for name in (WEIGHT, BIAS) if name in initial]
    new_head = any(name not in names or given[names[name]].shape != initial[name].shape for name in head)
    needed = [name for name in initial if not (new_head and name in head)]
    faults = [f"it has no {_own_name(network, name)!r}" for name in needed if name not in names]
    for name in (name for name in needed if name in names):
        tensor, wanted = given[names[name]], initial[name]
        if tensor.shape != wanted.shape or tensor.is_floating_point() != wanted.is_floating_point():
            faults.append(f"{names[name]!r} is {_form(tensor)}, and the network's is {_form(wanted)}")
        elif tensor.is_floating_point() and not bool(tensor.to(wanted.dtype).isfinite().all()):
            faults.append(f"{names[name]!r} has numbers that are not finite")
    if faults:
        own = type(network.body if isinstance(network, SplitNetwork) else network).__name__
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ConfigError(
            f"{source} does not fit the network {own}: {'; '.join(faults[:3])}{more}. Give the weights of a network of "
            "the same form, and the recipe's model the options that it had."
        )
    fitted = dict(initial) | {name: given[names[name]].to(initial[name], copy=True) for name in needed}
    used = {names[name] for name in needed} | constants_of(network).keys()
    used |= {own for name in needed if isinstance(network, SplitNetwork) for own in network.own_names(name)}
    left = [name for name in given if name not in used]
    note = "with a new classifier" if new_head else ""
    if left:
        unused = f"{left[0]!r} and {len(left) - 1} more are" if len(left) > 1 else f"{left[0]!r} is"
        anew = "; its classifier begins anew" if new_head else ""
        log.warning(f"{source}: {unused} not used, since the network has none of this name and shape{anew}.")
    return fitted, note


def _matching_names(given: Weights, network: nn.Module, initial: Weights) -> dict[str, str]:
    """Return by the network's name the given name of each tensor that is found: by the prefix with which most are."""
    own = {name: _own_name(network, name) for name in initial}
    found: list[dict[str, str]] = []
    for called in ({name: name for name in initial}, own):
        for less, more in product(_prefixes(called.values()), _prefixes(given)):
            pairs = ((name, more + text.removeprefix(less)) for name, text in called.items() if text.startswith(less))
            found.append({name: text for name, text in pairs if text in given})
    return max(found, key=len)


def _prefixes(names: Iterable[str]) -> list[str]:
    """Return the beginnings of names of up to two parts, the shortest first."""
    parts = {"".join(f"{part}." for part in name.split(".")[:-1][:depth]) for name in names for depth in range(3)}
    return sorted(parts, key=lambda prefix: (len(prefix), prefix))


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
    if _read(_kept_file(name)) is None:
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
    for path in local_paths(name, data_dir):
        if os.path.exists(path):  # False for odd names
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
        if recipe.weights.startswith(KEPT) and recipe.weights != KEPT + _digest_of(given):
            raise ConfigError(f"{path}, which keeps weights that were given in Python, is damaged. Give them again.")
        source = f"model.weights={recipe.weights!r}"
        fitted, note = fit_weights(given, runner.train_network, own, source)
        exported = {} if class_of_folder(path) else _read_export(path, source)
        _check_features(exported, federation.dataset.features, source)
        if not note and exported.get("rows_per_class"):
            names = class_names(federation)
            fitted, note = _with_classes_of(exported, names[:classes], fitted, own, source, names)
        made_by = " ".join(filter(None, (f"the weights of {shown}", note)))
        return InitialModel(fitted, made_by, _digest_of(given))
    passes, what = recipe.pretraining.passes, "images" if federation.dataset.has_images else "examples"
    made_by = f"{passes} {'pass' if passes == 1 else 'passes'} of pooled training on the clients' {what}"
    if federation.num_tasks > 1:
        made_by += " of the first task"
    return InitialModel(_trained_on_pool(recipe, seed, federation, runner), f"{made_by}: no federated method")


def _read_export(path: Path, source: str) -> Mapping[str, Any]:
    """Return the ``config.json`` beside exported weights, for which they were checked; empty if there is none."""
    if not (path / "config.json").is_file():
        return {}
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source}: cannot read its config.json: {in_one_line(error, 300)}. Export it again."
        ) from None
    if not isinstance(config, dict):
        return {}
    if config.get("weights_sha256", found := hashlib.sha256((path / FILE).read_bytes()).hexdigest()) != found:
        raise ConfigError(f"{source}: {FILE} is not the one that config.json was written for. Export the model again.")
    return config


def _check_features(exported: Mapping[str, Any], features: Sequence[str], source: str) -> None:
    """Refuse a table whose features are others, or in another order, than those from which a model has learned."""
    known = exported["input"].get("features") if isinstance(exported.get("input"), Mapping) else None
    known = known and [to_nfc(str(name)) for name in known]  # earlier versions kept names as they came
    if known and features and list(features) != known:  # arrays have no names of features, as they have none of classes
        order = "in this order" if sorted(known) == sorted(features) else "no others"
        raise ConfigError(
            f"{source} was trained on the features {', '.join(map(str, known))}, and the data have "
            f"{', '.join(features)}. Give it a table with these columns and values, and {order} (data.columns chooses "
            "columns); or give its weights alone, the safetensors file, if you know that they fit."
        )


def _with_classes_of(
    exported: Mapping[str, Any],
    names: Sequence[str],
    weights: Weights,
    initial: Weights,
    source: str,
    every: Sequence[str] = (),
) -> tuple[Weights, str]:
    """Return an exported model with its classifier in the order of the data's classes; with a new one for others.

    ``every``: The classes of all tasks, if there are several.
    """
    told = exported.get("label_names")
    known = list(map(str, told)) if isinstance(told, list) else list(names)
    # Classes of arrays have numbers, which say nothing beside names; those of tasks may be in another order.
    numbered = [list(of) == list(map(str, range(len(of)))) for of in (known, every or names)]
    is_unnamed = any(numbered) and not all(numbered) and set(known).isdisjoint(every or names)
    one_row = exported.get("rows_per_class", 1) == 1
    if one_row and (known == list(names) or is_unnamed):
        return weights, ""
    head = [name for name in (WEIGHT, BIAS) if name in weights]
    if one_row and sorted(known) == sorted(names):
        rows = [known.index(name) for name in names]
        return {**weights, **{name: weights[name][rows] for name in head}}, "with its classes in the data's order"
    log.warning("%s knows the classes %s, and the data have others: its classifier begins anew.", source, known[:10])
    return {**weights, **{name: initial[name] for name in head}}, "with a new classifier"


def _trained_on_pool(recipe: Recipe, seed: int, federation: Federation, runner: ModelRunner) -> Weights:
    """Return the model of pooled training, from the cache if it is there."""
    dataset, rows = federation.dataset, torch.unique(federation.partition.rows)  # sorted: no matter whose they are
    data = {name: dataset.train[name].index_select(0, rows.to(dataset.train[name].device)) for name in COLUMNS}
    identity: dict[str, Any] = {
        "form": 2,
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
            trained = train_on_pool(
                runner,
                {name: column.to(runner.device) for name, column in data.items()},
                dataset.normalise if runner.extractor is None else runner.extractor,
                recipe.augmentation if runner.extractor is None else Augmentation(),
                recipe.pretraining,
                seed,
            )
            _write(file, trained)
            return trained
    except OSError as error:
        if (found := _read(file)) is not None:  # in the folder of somebody else, where nothing can be locked
            return found
        raise _unwritable(file, error) from error


def _read(file: Path) -> dict[str, Tensor] | None:
    """Return the weights of a file of the cache; None if there is none that is whole."""
    try:
        if not file.is_file():
            return None
        with safe_open(file, framework="pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            if (opened.metadata() or {}).get("digest") == _digest_of(weights):
                return weights
        why = "its numbers are not those that were written"
    except (OSError, SafetensorError) as error:
        why = in_one_line(error, 200)
    log.warning("The initial model %s is damaged (%s); it is made again.", file, why)
    return None


def _write(file: Path, weights: Mapping[str, Tensor]) -> None:
    try:
        whole = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
        atomic_write(file, save(whole, {"digest": _digest_of(whole)}))
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
