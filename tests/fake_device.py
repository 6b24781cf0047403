"""A second device that is none: memory of this machine under another name, to be told where tensors meet that may not.

A GPU is rarely at hand where tests run. Its rules can be kept without one: what lives there meets nothing that lives
here, but for single numbers; it draws from no generator of the CPU; and whoever wants to know a number, or sends one
from ordinary memory, waits for all that was asked of it before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from fedkeep.training.local_training import TrainJob

DEVICE = torch.device("meta")  # a name that PyTorch knows, and lets anybody answer to
HERE = torch.device("cpu")

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
# Of these a GPU must say numbers, or how long a result is, before the program can go on.
TELLING = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_dim",
}


class There(Tensor):
    """A tensor on the pretended device; ``held`` is what is in it."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:  # type: ignore[override]
        return f"There({self.held})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on the pretended device, but nobody pretends")


class FakeDevice(TorchDispatchMode):
    """Keeps the rules of the device while it is entered.

    Attributes
    ----------
    waits : what was waited for inside of the local steps, by name.
    trainings : how many local trainings there were. under_way : how many are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.trainings = self.under_way = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, There)]
        wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if wanted == DEVICE:
            kwargs["device"] = HERE
        is_there = bool(there) if wanted is None else wanted == DEVICE
        if func is aten.copy_.default:
            is_there = isinstance(args[0], There)
        self._look(func, args, kwargs, tensors, is_there)
        found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if not is_there:
            return found
        named = tree_map(lambda leaf: There(leaf) if isinstance(leaf, Tensor) else leaf, found)
        return return_and_correct_aliasing(func, args, kwargs, named)

    def _look(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], is_there: bool) -> None:
        name = func._schema.name.removeprefix("aten::")
        strangers = [tensor for tensor in tensors if not isinstance(tensor, There)]
        generator = kwargs.get("generator")
        if is_there and generator is not None and generator.device == HERE:
            raise AssertionError(f"{name} on the device draws from a generator of the CPU")
        if len(strangers) == len(tensors):
            if func in COPIES and is_there:
                self._wait(f"{name} of {list(tensors[0].shape)} to the device", _is_pinned(args, kwargs))
            return
        if func in COPIES:
            self._wait(f"{name} of {list(tensors[0].shape)} between here and the device", not strangers and is_there)
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            chosen = [index for index in args[1] if index is not None]
            self._wait(f"{name} by yes and no", all(index.dtype != torch.bool for index in chosen))
            self._wait(f"{name} by places that are here", all(isinstance(index, There) for index in chosen))
        elif any(stranger.ndim for stranger in strangers):
            raise AssertionError(f"{name} of tensors here and on the device: {[list(t.shape) for t in strangers]}")
        self._wait(name, name not in TELLING)

    def _wait(self, what: str, not_really: bool) -> None:
        if self.under_way and not not_really:
            self.waits.append(what)


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, There) else leaf


def _is_pinned(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking")) and getattr(args[0], "pinned", False)


def _pinned(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy.pinned = True  # type: ignore[attr-defined]
    return copy


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """Pretend that there is the device `DEVICE`, for the block."""
    rules = FakeDevice()
    tensor, autocast, steps = torch.tensor, torch.autocast, TrainJob.steps

    def result(data: Any, *, device: Any = None, **others: Any) -> Tensor:
        # PyTorch makes it here and moves it, unseen by modes.
        plain = tensor(data, **others)
        return plain if device is None else plain.to(device)

    @functools.wraps(steps)
    def watched(*given: Any, **named: Any) -> Iterator[Any]:
        rules.trainings += 1
        rules.under_way += 1
        try:
            yield from steps(*given, **named)
        finally:
            rules.under_way -= 1

    def either(device: str, *given: Any, **named: Any) -> Callable[..., Any]:
        return autocast("cpu", *given, **named)

    with pytest.MonkeyPatch.context() as patch, rules:
        patch.setattr(torch, "tensor", result)
        patch.setattr(torch, "autocast", either)
        patch.setattr(Tensor, "pin_memory", _pinned)
        patch.setattr(TrainJob, "steps", watched)
        yield rules
