"""Steps of local training on a GPU, each replayed with one call instead of one call for each layer.

A small network's layers take longer to call than to compute. A CUDA graph is captured from a step on the second batch
of a size and replayed on the others, also of the next clients; batches, weights and the loss's tensors are copied to
where the captured step reads them. The arithmetic is the same. Only steps that are all this package's and PyTorch's
are captured: a user's loss or layer may do something else in each step, which a captured step would not.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedkeep.interface.pytree import replace_tensors, tree_nodes, tree_tensors
from fedkeep.losses import Batch, Loss

log = logging.getLogger(__name__)


class CapturedStep(Protocol):
    """A step that can be replayed, such as a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Do again what was captured, with what now stands in its tensors."""


Capture = Callable[[Callable[[], None]], CapturedStep]
"""Captures what a function does on the GPU, without doing it."""


def can_capture(network: nn.Module, loss: Loss) -> bool:
    """Tell whether a step does the same in every step: whether nothing in network and loss is code of the user's."""
    known = ("fedkeep.", "torch.nn.", "builtins")
    code = (getattr(code, "__module__", "") for module in network.modules() for code in _code_of(module))
    parts = (
        isinstance(part, Tensor | str | int | float | slice | None)
        if is_leaf
        else type(part).__module__.startswith(known)
        for part, is_leaf in tree_nodes(loss)
    )
    return all(module.startswith(known) for module in code) and all(parts)


def _code_of(module: nn.Module) -> Iterator[Any]:
    """Yield what runs in a forward and a backward pass: a layer's class, hooks, and a ``forward`` of its own."""
    yield type(module)
    yield from (part for name, part in vars(module).items() if name == "forward")
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
        yield from hooks.values()
    for parameter in module.parameters(recurse=False):
        yield from (parameter._backward_hooks or {}).values()


class CapturedSteps:
    """Takes steps of local trainings, from the third of a batch's shape on by replaying the second.

    The trainings differ in numbers alone, so that what was captured in one is replayed in the next.

    ``stepper``: Takes a step, a `fedkeep.training.local_training.SGDStepper`.
    ``capture``: Captures one.
    """

    def __init__(self, stepper: Any, capture: Capture) -> None:
        self.stepper = stepper
        self._capture = capture
        self._loss: Loss
        self._captured_loss: Loss | None = None  # has the tensors that captured steps read
        self._seen: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, tuple[list[Batch], CapturedStep]] = {}
        self._rows: dict[tuple[int, str], Tensor] = {}  # columns of batches that captured steps read, of most rows
        self._refused = False

    def restart(self, loss: Loss) -> None:
        """Begin a training with a loss that differs from the one before in numbers alone."""
        self.stepper.restart()
        self._loss = loss
        if self._captured_loss is None:
            return
        tensors = list(zip(tree_tensors(self._captured_loss), tree_tensors(loss), strict=True))
        if any(len(part) > len(into) for (into, per_example), (part, _) in tensors if per_example):
            self._captured_loss = None
            self._captured.clear()
            return
        for (into, per_example), (part, _) in tensors:
            (into[: len(part)] if per_example else into).copy_(part)

    def __call__(self, batches: list[Batch]) -> None:
        """Take one step."""
        shapes = tuple((name, part.shape) for batch in batches for name, part in _columns(batch))
        if shapes not in self._captured and not self._try_capture(shapes, batches):
            self.stepper.step(self._loss, batches)
            return
        places, captured = self._captured[shapes]
        for place, batch in zip(places, batches, strict=True):
            for (_, into), (_, part) in zip(_columns(place), _columns(batch), strict=True):
                into.copy_(part)
        captured.replay()

    def _try_capture(self, shapes: Hashable, batches: list[Batch]) -> bool:
        """Capture a step, unless its shape is new: libraries are loaded, and memory found, at first."""
        self._seen[shapes] += 1
        if self._refused or self._seen[shapes] < 2:
            return False
        if self._captured_loss is None:
            self._captured_loss = replace_tensors(self._loss, map(_place, tree_tensors(self._loss)))
        loss = self._captured_loss
        places = []
        for number, batch in enumerate(batches):
            columns = {name: self._first_rows(number, name, part) for name, part in _columns(batch)}
            places.append(Batch(columns, columns.pop("")))
        try:
            self._captured[shapes] = places, self._capture(lambda: self.stepper.step(loss, places))
        except RuntimeError as error:
            log.info("Steps are not captured as CUDA graphs: %s", error)
            self._refused = True
        return not self._refused

    def _first_rows(self, number: int, name: str, part: Tensor) -> Tensor:
        """Return where captured steps read a column; batches of all sizes share one place."""
        if len(self._rows.get((number, name), ())) < len(part):
            self._rows[number, name] = part.clone()
        return self._rows[number, name][: len(part)]


def _place(of: tuple[Tensor, bool]) -> Tensor:
    """Return a copy of a loss's tensor, with room for the examples of a client that has twice as many."""
    tensor, per_example = of
    return torch.cat((tensor, torch.zeros_like(tensor))) if per_example else tensor.clone()


def _columns(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    yield from batch.data.items()
    yield "", batch.index


class CudaGraphCapture:
    """Captures CUDA graphs, all in one pool of memory; only one of them may be replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.CUDAGraph | None = None  # keeps the pool

    def __call__(self, function: Callable[[], None]) -> CapturedStep:
        graph = torch.cuda.CUDAGraph()
        pool = self._last.pool() if self._last is not None else None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), _no_collection():
            graph.capture_begin(pool)
            try:
                function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._last = graph
        return graph


@cache
def capture_on(device: torch.device) -> Capture | None:
    """Return what captures steps on a device; None for a CPU, which calls a layer quickly."""
    return CudaGraphCapture(device) if device.type == "cuda" else None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing what belongs to the GPU, which ends a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
