"""What a CUDA graph does, on the CPU: a step is written down without being taken, and then taken with the same memory.

Whatever a step decides in Python while it is written down is decided for good, numbers that it asks for cannot be told,
and what it reads must lie where it lay. Streams, the memory that graphs share and what reaches past operators, such as
`Tensor.tolist`, do not show here; `pretended` refuses the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from pretended import TELLING
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedkeep.engine.recording import Recorder, Replay

INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class Tape(TorchDispatchMode):
    """Writes down what is computed while it is entered, and undoes it in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[Any, Any, Any, Any]] = []
        self.own: set[int] = set()  # memory that was made while writing
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # of other memory, what was in it first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in TELLING or name == "lift_fresh":
            raise RuntimeError(f"{name}: no number can be told, or made here, while a graph is recorded")
        if name in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1]):
            raise RuntimeError(f"{name} by yes and no: how long the result is cannot be told")
        for tensor in _tensors((args, kwargs)):
            self._keep(tensor)  # not all operators say what they write to
        before = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        found = func(*args, **kwargs)
        self.own |= {_memory(tensor) for tensor in _tensors(found)} - before
        self.written.append((func, args, kwargs, found))
        return found

    def _keep(self, tensor: Tensor) -> None:
        if (memory := _memory(tensor)) not in self.own | self.before.keys():
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
            self.before[memory] = whole, whole.clone()

    def undo(self) -> None:
        for whole, before in self.before.values():
            whole.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, found in self.written:
            for place, tensor in zip(_tensors(found), _tensors(func(*args, **kwargs)), strict=True):
                if _memory(place) != _memory(tensor):
                    place.copy_(tensor)


class TapeRecorder(Recorder):
    """Records on the CPU."""

    def record(self, step: Callable[[], None]) -> Replay:
        drawn = torch.get_rng_state()
        with Tape() as tape:
            step()
        tape.undo()
        torch.set_rng_state(drawn)
        return tape.replay

    def apart(self) -> AbstractContextManager[None]:
        return nullcontext()


class Counted(Recorder):
    """Counts what another records, what is replayed, and which steps are taken apart."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.recorded = self.replayed = self.plain = 0

    def record(self, step: Callable[[], None]) -> Replay:
        replay = self.recorder.record(step)
        self.recorded += 1

        def counted() -> None:
            self.replayed += 1
            replay()

        return counted

    def apart(self) -> AbstractContextManager[None]:
        self.plain += 1
        return self.recorder.apart()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
