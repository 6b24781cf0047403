"""Models as values: a model is its named tensors, and nothing here changes its arguments in place.

The functions work on whole state dicts. Arithmetic is done on floating-point tensors, without gradients; integer
buffers, such as batch norm's count of batches, are those of the first model. Results share no memory with arguments.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fedkeep.errors import ConfigError, ValueRefused

Weights: TypeAlias = Mapping[str, Tensor]
"""A whole state dict by name: parameters and buffers."""


def state_dict_copy(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's whole state dict, detached, on the module's device.

    Raises
    ------
    ConfigError
        If the module keeps something in its state dict that is no tensor.
    """
    weights = {}
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"{type(module).__name__} keeps {name!r}, a {type(tensor).__name__}, in its state dict. A model is "
                "sent and averaged as tensors: keep it in a buffer, or out of the state dict."
            )
        # In plain layout, however the module keeps it: what a model is must not depend on how it was trained.
        weights[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return weights


@torch.no_grad()
def load_weights(module: nn.Module, weights: Weights) -> None:
    """Copy weights into a module of the same form, from any device.

    Raises
    ------
    ValueRefused
        If names, shapes or types differ; nothing is copied then.
    """
    own = module.state_dict()
    _require_same_form(weights, own, f"these weights do not fit {type(module).__name__}")
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def find_mismatch(given: Weights, expected: Weights) -> str | None:
    """Return why two models differ in names, shapes or types, said of the first, or None if they do not.

    The order of names does not count, nor does the device.
    """
    if given.keys() != expected.keys():
        missing = [name for name in expected if name not in given]
        extra = [name for name in given if name not in expected]
        faults = [f"{word} {_listed(names)}" for word, names in (("it lacks", missing), ("it has", extra)) if names]
        return " and ".join(faults) + (", which is not expected" if extra else "")
    for name, wanted in expected.items():
        tensor = given[name]
        if tensor.shape != wanted.shape:
            return f"{name!r} has shape {list(tensor.shape)} instead of {list(wanted.shape)}"
        if tensor.dtype != wanted.dtype:
            return f"{name!r} is {_type(tensor)} instead of {_type(wanted)}"
    return None


@torch.no_grad()
def add(a: Weights, b: Weights, scale: float = 1.0) -> dict[str, Tensor]:
    """Return ``a + scale * b``; raise `ValueRefused` if their forms differ."""
    _require_same_form(b, a, "cannot add the second model to the first")
    names = _floating(a)
    return _result(a, torch._foreach_add([a[n] for n in names], [b[n] for n in names], alpha=scale) if names else ())


@torch.no_grad()
def subtract(a: Weights, b: Weights) -> dict[str, Tensor]:
    """Return ``a - b``; raise `ValueRefused` if their forms differ."""
    _require_same_form(b, a, "cannot subtract the second model from the first")
    names = _floating(a)
    return _result(a, torch._foreach_sub([a[n] for n in names], [b[n] for n in names]) if names else ())


@torch.no_grad()
def scale(a: Weights, factor: float) -> dict[str, Tensor]:
    """Return ``factor * a``."""
    names = _floating(a)
    return _result(a, torch._foreach_mul([a[n] for n in names], factor) if names else ())


@torch.no_grad()
def mean(models: Sequence[Weights], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """Return the mean of models, sum_i p_i w_i / sum_i p_i, in the order given (FedAvg, McMahan et al., 2017).

    It is kept as a running mean, w += (w_i - w) p_i / (p_1 + ... + p_i): equal models give exactly that model, and one
    model its copy. Models of weight 0 take no part, except that integer buffers are always the first model's.

    Parameters
    ----------
    models : at least one, all of one form.
    weights : how much each counts, finite and not negative, not all 0; None for equally.

    Raises
    ------
    ValueRefused
        If a model's form differs from the first's.
    ValueError
        Without models, or with weights that are not as above.
    """
    shares = _shares(models, weights)
    first = models[0]
    for number, model in enumerate(models[1:], start=2):
        _require_same_form(model, first, f"cannot average: model {number} is of another form than model 1")
    names = _floating(first)
    chosen = [(model, share) for model, share in zip(models, shares, strict=True) if share > 0]
    running = [chosen[0][0][name].detach().clone() for name in names]
    total = chosen[0][1]
    for model, share in chosen[1:] if names else ():
        total += share
        torch._foreach_lerp_(running, [model[name] for name in names], share / total)
    return _result(first, running)


def tensor_hash(tensor: Tensor) -> str:
    """Return a hash of a tensor's type, shape and numbers, 32 hexadecimal digits: equal for equal bits only."""
    plain = tensor.detach().cpu().contiguous()
    hashed = hashlib.blake2b(f"{plain.dtype} {list(plain.shape)} ".encode(), digest_size=16)
    hashed.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def parameter_count(module: nn.Module) -> int:
    """Return the number of parameters, frozen ones included; a shared one counts once, buffers do not."""
    return sum(parameter.numel() for parameter in module.parameters())


def _shares(models: Sequence[Weights], weights: Sequence[float] | None) -> list[float]:
    if not models:
        raise ValueError("There is no model to average: give at least one.")
    if weights is None:
        return [1.0] * len(models)
    shares = [float(weight) for weight in weights]
    if len(shares) != len(models):
        raise ValueError(f"{len(models)} models cannot be averaged with {len(shares)} weights: give one for each.")
    if not all(math.isfinite(share) and share >= 0 for share in shares) or not any(shares):
        raise ValueError(f"Weights of a mean must be finite, not negative and not all 0, unlike {shares}.")
    return shares


def _floating(weights: Weights) -> list[str]:
    return [name for name, tensor in weights.items() if tensor.is_floating_point()]


def _result(first: Weights, floating: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return a model of new floating-point tensors, in the order of ``first``, and copies of its other tensors."""
    new = iter(floating)
    return {name: next(new) if t.is_floating_point() else t.detach().clone() for name, t in first.items()}


def _require_same_form(given: Weights, expected: Weights, what: str) -> None:
    reason = find_mismatch(given, expected)
    if reason is not None:
        raise ValueRefused(f"{what}: {reason}. Both must come from one architecture with the same options.")


def _listed(names: Sequence[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
