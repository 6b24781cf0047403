"""Steps of one local training on a GPU, each replayed with one call instead of one call for each layer.

A small network's layers take longer to call than to compute. A CUDA graph is captured from a step on the second full
batch and replayed on the others, which are copied to where the captured step reads its batch. The arithmetic is the
same. Only steps that are all this package's and PyTorch's are captured: a user's loss or layer may do something else in
each step, which a captured step would not.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

from fedkeep.interface.pytree import tree_nodes
from fedkeep.losses import Batch, Loss

log = logging.getLogger(__name__)

Step = Callable[[list[Batch]], None]


class CapturedStep(Protocol):
    """A step that can be replayed, such as a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Do again what was captured, with what now stands in its tensors."""


Capture = Callable[[Callable[[], None]], CapturedStep]
"""Captures what a function does on the GPU, without doing it."""


def can_capture(network: nn.Module, loss: Loss) -> bool:
    """Tell whether a step does the same in every step: whether nothing in network and loss is code of the user's."""
    known = ("fedkeep.", "torch.nn.", "builtins")
    layers = (type(module).__module__ for module in network.modules())
    parts = (
        isinstance(part, Tensor | str | int | float | slice | None)
        if is_leaf
        else type(part).__module__.startswith(known)
        for part, is_leaf in tree_nodes(loss)
    )
    return all(layer.startswith(known) for layer in layers) and all(parts)


class CapturedSteps:
    """Takes steps of one local training, from the third of a batch's shape on by replaying the second.

    ``step``: Takes a step.
    ``capture``: Captures one.
    """

    def __init__(self, step: Step, capture: Capture) -> None:
        self._step = step
        self._capture = capture
        self._seen: dict[Hashable, int] = {}
        self._captured: dict[Hashable, tuple[list[Batch], CapturedStep]] = {}
        self._refused = False

    def __call__(self, batches: list[Batch]) -> None:
        """Take one step."""
        shapes = tuple((name, part.shape) for batch in batches for name, part in _columns(batch))
        if shapes not in self._captured and not self._may_capture(shapes):
            self._step(batches)
            return
        if shapes not in self._captured:
            places = [Batch({name: part.clone() for name, part in b.data.items()}, b.index.clone()) for b in batches]
            try:
                self._captured[shapes] = places, self._capture(lambda: self._step(places))
            except RuntimeError as error:
                log.info("Steps are not captured as CUDA graphs: %s", error)
                self._refused = True
                self._step(batches)
                return
        places, captured = self._captured[shapes]
        for place, batch in zip(places, batches, strict=True):
            for (_, into), (_, part) in zip(_columns(place), _columns(batch), strict=True):
                into.copy_(part)
        captured.replay()

    def _may_capture(self, shapes: Hashable) -> bool:
        """Count a shape, and tell whether it came often enough: libraries are loaded, and memory found, at first."""
        seen = self._seen[shapes] = self._seen.get(shapes, 0) + 1
        return not self._refused and seen >= 2


def _columns(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    yield from batch.data.items()
    yield "index", batch.index


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
