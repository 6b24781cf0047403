"""Models as values: a model is its tensors by name, in memory or in a temporary file.

The functions work on whole state dicts and change no argument in place. They compute with floating-point tensors,
without gradients. Integer buffers, such as batch norm's count of batches, are taken from the first model.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fedkeep._utils.process import MemoryTrimmer
from fedkeep.errors import ConfigError, RunError, ValueRefused

ADVICE = "Set TMPDIR to a folder with more room, or take smaller cohorts (run.cohort_size)."


class WeightsFile:
    """A temporary file without a name, in the system's folder for such files (``TMPDIR``).

    The system removes it when the process ends, however it ends. The space of a model that nothing refers to any more
    is used again, and the file is emptied when it holds none. One thread may use it.

    ``largest``: The largest size of the file so far, in bytes.
    ``trimmer``: Gives the memory back of models that were put into the file, and of tensors that were read.
    """

    def __init__(self) -> None:
        self.trimmer = MemoryTrimmer()
        self._file: Any = None
        self._end = self.largest = 0
        self._used = 0  # number of models in the file
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # positions by length, in bytes

    def check_room(self, needed: int) -> None:
        """Check that the disk has room for models that are not there yet.

        ``needed``: Their size in bytes; 0 or less if none will come.
        """
        unused = sum(length * len(positions) for length, positions in self._free.items())
        if needed > unused and (free := shutil.disk_usage(tempfile.gettempdir()).free + unused) < needed:
            raise RunError(
                f"the models of a round's clients do not fit into memory, and take {needed / 1e9:.1f} GB in "
                f"{tempfile.gettempdir()}, which has {free / 1e9:.1f} GB free. {ADVICE}"
            )

    def put(self, weights: Mapping[str, Tensor]) -> StoredWeights:
        """Write a model to the file.

        Returns: The same model. Its tensors are read from the file each time that they are asked for.
        """
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        length = sum(tensor.nbytes for tensor in plain.values())
        position = self._free[length].pop() if self._free[length] else self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="fedkeep-")  # noqa: SIM115 — open for as long as this object
                weakref.finalize(self, self._file.close)
            self._file.seek(position)
            for tensor in plain.values():
                if tensor.numel():
                    self._file.write(_bytes_of(tensor))
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"the models of this round's clients do not fit into memory, and {length / 1e6:.1f} MB for one more "
                f"cannot be written to {tempfile.gettempdir()}: {error.strerror}. {ADVICE}"
            ) from error
        self._end = max(self._end, position + length)
        self.largest = max(self.largest, self._end)
        self._used += 1
        places: dict[str, tuple[Tensor, int, torch.device]] = {}
        for name, tensor in plain.items():
            places[name] = tensor.to("meta"), position, weights[name].device
            position += tensor.nbytes
        stored = StoredWeights(self, places)
        weakref.finalize(stored, self._release, position - length, length).atexit = False
        return stored

    def read(self, position: int, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Read a tensor.

        ``position``: Where it begins, in bytes.
        """
        tensor = torch.empty(shape, dtype=dtype)
        self.trimmer.dropped(tensor.nbytes)  # as many were read before, and most of them are gone
        if tensor.numel():
            self._file.seek(position)
            if self._file.readinto(_bytes_of(tensor)) != tensor.nbytes:
                raise RunError(f"a temporary file in {tempfile.gettempdir()} was cut short by another program.")
        return tensor

    def _release(self, position: int, length: int) -> None:
        self._free[length].append(position)
        self._used -= 1
        if not self._used:
            self._free.clear()
            self._end = 0
            os.ftruncate(self._file.fileno(), 0)


class StoredWeights(Mapping[str, Tensor]):
    """A model in a `WeightsFile`.

    ``places``: For each tensor one of its form on the device ``meta``, its position in the file, and its device.
    """

    def __init__(self, file: WeightsFile, places: Mapping[str, tuple[Tensor, int, torch.device]]) -> None:
        self._file = file
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        form, position, device = self._places[name]
        return self._file.read(position, form.shape, form.dtype).to(device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @cached_property
    def form(self) -> Mapping[str, Tensor]:
        """The shapes and types of the tensors, as tensors without content, by name."""
        return {name: form for name, (form, _, _) in self._places.items()}

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Read some elements of a tensor.

        ``start``, ``stop``: The elements from ``start`` up to ``stop``, as the flattened tensor has them.
        Returns: [stop - start].
        """
        form, position, device = self._places[name]
        start, stop = min(start, form.numel()), min(stop, form.numel())
        return self._file.read(position + start * form.itemsize, (stop - start,), form.dtype).to(device)


def form_of(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors that have the shapes and types of a model's, without reading them from a file."""
    return weights.form if isinstance(weights, StoredWeights) else weights


def part_of(weights: Mapping[str, Tensor], name: str, start: int, stop: int) -> Tensor:
    """Return some elements of a model's tensor; of a stored one no others are read.

    ``start``, ``stop``: The elements from ``start`` up to ``stop``, as the flattened tensor has them.
    Returns: [stop - start].
    """
    if isinstance(weights, StoredWeights):
        return weights.part(name, start, stop)
    return weights[name].reshape(-1)[start:stop]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data


Weights: TypeAlias = Mapping[str, Tensor]
"""A state dict without frozen parameters, which never change: trained parameters and buffers by name."""


def frozen_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module that are not trained (``requires_grad`` is False), by each of their names."""
    return {name: p.data for name, p in module.named_parameters(remove_duplicate=False) if _is_frozen(p)}


def tied_names(module: nn.Module, *, trained: bool = False) -> list[list[str]]:
    """Return the names of each parameter that stands at several places of a module; all, or those that are trained."""
    names: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad or not trained:
            names[parameter].append(name)
    return [same for same in names.values() if len(same) > 1]


def tied_parameters(module: nn.Module) -> list[str]:
    """Return the further names of trained parameters that stand at several places of a module."""
    return sorted(name for _, *further in tied_names(module, trained=True) for name in further)


def _is_frozen(entry: Any) -> bool:
    return isinstance(entry, nn.Parameter) and not entry.requires_grad


def state_dict_copy(module: nn.Module, *, with_frozen: bool = False) -> dict[str, Tensor]:
    """Copy a module's state dict, detached, on the module's device; mostly without frozen parameters.

    Returns: The copies by name, in contiguous layout.
    """
    weights = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not with_frozen and _is_frozen(tensor):
            continue
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"{type(module).__name__} keeps {name!r}, a {type(tensor).__name__}, in its state dict. A model is "
                "sent and averaged as tensors: keep it in a buffer, or out of the state dict."
            )
        # Contiguous whatever the module's layout, so that a model does not depend on how it was trained.
        weights[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return weights


@torch.no_grad()
def load_weights(module: nn.Module, weights: Weights) -> None:
    """Copy weights into a module, from any device; frozen parameters that are not among them stay."""
    given, state = form_of(weights), module.state_dict(keep_vars=True)
    state = {name: tensor for name, tensor in state.items() if name in given or not _is_frozen(tensor)}
    _require_same_form(weights, state, f"these weights do not fit {type(module).__name__}")
    for name, tensor in state.items():
        tensor.copy_(weights[name])


def check_weights(value: object, what: str) -> None:
    """Check that something is a model."""
    found = "None" if value is None else f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        others = {type(item).__name__ for item in form_of(value).values() if not isinstance(item, Tensor)}
        if not others:
            return
        found += f" of {', '.join(sorted(others))}"
    raise ConfigError(
        f"{what} is {found} where weights are expected, a dict of tensors by name, such as the model of a Fit or the "
        "result of weighted_mean(replies)."
    )


def all_finite(tensors: list[Tensor]) -> bool:
    """Tell whether numbers are finite; False also if they are so large that a norm, or the norms' sum, overflows."""
    # A norm is finite only if all its terms are, and `isfinite` takes ten times as long.
    norms = torch._foreach_norm(tensors) if tensors else ()
    return not norms or math.isfinite(torch.stack([norm.to(norms[0].device) for norm in norms]).sum())


def check_finite(weights: Weights) -> None:
    """Raise `RunError` if trained weights are not finite, which they may not be although the last loss was."""
    if (invalid := not_finite(weights)) is not None:
        raise diverged(f"{invalid} has numbers that are not finite")


def not_finite(weights: Weights) -> str | None:
    """Return the name of a tensor with numbers that are not finite; None if there is none."""
    if all_finite([tensor for tensor in weights.values() if tensor.is_floating_point()]):
        return None
    return next((name for name, tensor in weights.items() if not bool(tensor.isfinite().all())), None)


def diverged(what: str) -> RunError:
    """Return the error of a training before the federation that does not converge."""
    return RunError(f"the training has diverged: {what}. Begin again with a lower learning rate.")


def find_mismatch(given: Weights, expected: Weights) -> str | None:
    """Describe how a model differs from another in names, shapes or types.

    The order of names and the device do not matter.

    Returns: The first difference; None if there is none.
    """
    given, expected = form_of(given), form_of(expected)
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
            return f"{name!r} is {dtype_name(tensor)} instead of {dtype_name(wanted)}"
    return None


@torch.no_grad()
def add(a: Weights, b: Weights, scale: float = 1.0) -> dict[str, Tensor]:
    """Compute ``a + scale * b``.

    ``a``, ``b``: Models of the same form.
    """
    _require_same_form(b, a, "cannot add the second model to the first")
    names = _floating(a)
    return _result(a, torch._foreach_add([a[n] for n in names], [b[n] for n in names], alpha=scale) if names else ())


@torch.no_grad()
def subtract(a: Weights, b: Weights) -> dict[str, Tensor]:
    """Compute ``a - b``.

    ``a``, ``b``: Models of the same form.
    """
    _require_same_form(b, a, "cannot subtract the second model from the first")
    names = _floating(a)
    return _result(a, torch._foreach_sub([a[n] for n in names], [b[n] for n in names]) if names else ())


@torch.no_grad()
def scale(a: Weights, factor: float) -> dict[str, Tensor]:
    """Compute ``factor * a``."""
    names = _floating(a)
    return _result(a, torch._foreach_mul([a[n] for n in names], factor) if names else ())


@torch.no_grad()
def joint_norm(tensors: Iterable[Tensor]) -> float:
    """Compute the Euclidean norm of all tensors together."""
    return join_norms(torch._foreach_norm(found) if (found := list(tensors)) else [])


@torch.no_grad()
def distances(a: Weights, b: Weights, names: Sequence[str]) -> list[Tensor]:
    """Compute the Euclidean norm of ``a - b`` for each of some tensors."""
    return [_distance(a[name], b[name]) for name in names]


def _distance(a: Tensor, b: Tensor) -> Tensor:
    if a.numel() <= _CACHED:
        return torch.dist(a, b)
    pieces = zip(torch.split(a.flatten(), _CACHED), torch.split(b.flatten(), _CACHED), strict=True)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.dist(*piece) for piece in pieces]))
    return norm


_CACHED = 2**18
"""Numbers whose differences stay in the processor's cache: `torch.dist` writes them down."""


def distance(a: Weights, b: Weights, names: Sequence[str]) -> float:
    """Compute the Euclidean norm of ``a - b``; 0 without any name."""
    return join_norms(distances(a, b, names))


@torch.no_grad()
def mean(models: Iterable[Weights], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """Compute the mean of models, sum_i p_i w_i / sum_i p_i, in the order given (FedAvg, McMahan et al., 2017).

    It is computed as a running mean, w += (w_i - w) p_i / (p_1 + ... + p_i). So the mean of equal models is exactly
    that model, and of models that are made or read one after another only two are in memory. Models of weight 0 are
    left out, except that integer buffers are always those of the first model.

    ``models``: At least one model, all of the same form.
    ``weights``: The weight of each model: finite, not negative, and not all 0. By default all are equal.
    """
    shares = None if weights is None else _shares(weights)
    running = RunningMean()
    for number, model in enumerate(models):
        running.add(model, 1.0 if shares is None else shares[number] if number < len(shares) else 0.0)
    if not running.number:
        raise ValueError("There is no model to average: give at least one.")
    if shares is not None and running.number != len(shares):
        raise ValueError(f"{running.number} models cannot be averaged with {len(shares)} weights: give one for each.")
    return running.value()


class RunningMean:
    """The mean of models that come one after another, of which none is kept.

    ``number``: How many models were added.
    """

    def __init__(self) -> None:
        self.number = 0
        self._total = 0.0
        self._names: list[str] = []
        self._first: Weights = {}
        self._running: list[Tensor] | None = None
        self._infinite: list[int] = []  # places of tensors that are not finite
        self._kept: dict[str, Tensor] = {}  # of the first model: what is not averaged

    @torch.no_grad()
    def add(self, model: Weights, weight: float = 1.0) -> None:
        """Add a model.

        ``weight``: Its weight. One of weight 0 is left out, except that integer buffers are always those of the first.
        """
        self.number += 1
        if self.number == 1:
            form = form_of(model)
            self._first = {name: tensor.to("meta") for name, tensor in form.items()}
            self._names = _floating(form)
            self._kept = {name: model[name].detach().clone() for name in form if not form[name].is_floating_point()}
        else:
            words = f"cannot average: model {self.number} is of another form than model 1"
            _require_same_form(model, self._first, words)
        if weight == 0:
            return
        self._total += weight
        share = weight / self._total
        if self._running is None:
            self._running = [model[name].detach().clone() for name in self._names]
            if not all_finite(self._running):
                self._infinite = [n for n, tensor in enumerate(self._running) if not tensor.isfinite().all()]
            return
        kept = {n: self._running[n].clone() for n in self._infinite}
        if isinstance(model, StoredWeights):  # one tensor after another is read
            for tensor, name in zip(self._running, self._names, strict=True):
                torch._foreach_lerp_([tensor], [model[name]], share)
        elif self._names:
            torch._foreach_lerp_(self._running, [model[name] for name in self._names], share)
        for n, before in kept.items():  # infinity less infinity is not a number
            self._running[n] = torch.where(model[self._names[n]] == before, before, self._running[n])

    def value(self) -> dict[str, Tensor]:
        """Return the mean so far; it changes with the next model.

        Returns: The mean; empty without models.
        """
        means = dict(zip(self._names, self._running or (), strict=True))
        return {name: means[name] if name in means else self._kept[name] for name in self._first}


def tensor_hash(tensor: Tensor) -> str:
    """Return a hash of a tensor's type, shape and bits."""
    plain = tensor.detach().cpu().contiguous()
    hashed = hashlib.blake2b(f"{plain.dtype} {list(plain.shape)} ".encode(), digest_size=16)
    hashed.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def hash_weights(weights: Weights) -> str:
    """Return a hash of named tensors that does not depend on the order of the names."""
    lines = "".join(f"{name} {tensor_hash(weights[name])}\n" for name in sorted(weights))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def parameter_count(module: nn.Module) -> int:
    """Return the number of a module's parameters.

    Returns: The number, with frozen parameters, without buffers; shared parameters count once.
    """
    return sum(parameter.numel() for parameter in module.parameters())


def _shares(weights: Sequence[float]) -> list[float]:
    shares = [float(weight) for weight in weights]
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


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's type, such as float32."""
    return str(tensor.dtype).removeprefix("torch.")


def join_norms(norms: Sequence[Tensor]) -> float:
    """Return the norm of everything whose parts have these norms."""
    return float(torch.linalg.vector_norm(torch.stack(list(norms)).double())) if norms else 0.0
